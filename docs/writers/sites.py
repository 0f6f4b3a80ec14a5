"""The page of sites: what each means, and where it is read in each family, from the table that the code uses."""

from __future__ import annotations

from harvest.model.architectures import ARCHITECTURES, WRAPPERS, Architecture
from harvest.model.overview import overview
from harvest.model.points import IN_BLOCK, MISLEADING, OUTSIDE, SITES, SUMS, TRANSFORMER_LENS
from writers.markdown import code, prose, table

MEANINGS = {
    "residual": ("d_model", "output of block L, before the final norm also at the last layer"),
    "residual_pre": ("d_model", "input of block L"),
    "residual_mid": ("d_model", "the residual stream between attention and MLP"),
    "attn": ("d_model", "output of the attention, after its output projection"),
    "mlp": ("d_model", "output of the MLP, after its down projection"),
    "attn_contribution": ("d_model", "what the attention adds to the stream: not `attn` where a norm follows it"),
    "mlp_contribution": ("d_model", "what the MLP adds to the stream: not `mlp` where a norm follows it"),
    "attn_input": ("d_model", "what the attention receives, after its norm"),
    "mlp_input": ("d_model", "what the MLP receives, after its norm: a transcoder's input"),
    "attn_heads": ("n_heads * d_head", "input of the output projection, heads concatenated"),
    "mlp_neurons": ("d_mlp", "input of the down projection of a dense MLP"),
    "router": ("n_experts", "logits of a mixture of experts"),
    "embedding": ("d_model", "what enters block 0; has no layer"),
    "final_norm": ("d_model", "the normed state that the head reads; has no layer"),
}
"""Site -> width of a row, and what it is."""
HEAD = """A *site* is a place in a block, a *name* is a site at a layer: `residual.12`. Layers are true block indices,
counted from 0. `harvest sites MODEL` prints what one model has, with widths and modules, from its config alone.
"""
MODULES = """`module:PATH` is the output of any submodule by its path in the model, `module_input:PATH` its input;
`{layer}` in the path stands for every layer asked for. Both, and `residual`, also work for decoders that are not in the
table, remote code among them. Encoder-decoder models are refused.
"""
WHERE = """Paths of blocks and of `final_norm` are below the model's trunk (`model.` or `transformer.` in most), the
others below a block. What is not listed, the family does not have.
"""


def page() -> str:
    """Sites, the names of TransformerLens, and family by family where each is read."""
    lens = {site: f"blocks.L.{hook}" for hook, site in TRANSFORMER_LENS.items()}
    rows = [(code(site), width, prose(what), code(lens.get(site, ""))) for site, (width, what) in MEANINGS.items()]
    refused = [(code(hook), prose(why)) for hook, why in MISLEADING.items()]
    wrapped = ", ".join(code(kind) for kind in WRAPPERS)
    return "\n".join(
        [
            f"# Sites by architecture\n\n{HEAD}",
            table(["site", "width", "what it is", "TransformerLens name, accepted too"], rows),
            f"{MODULES}\nTransformerLens names that are refused:\n",
            table(["name", "why"], refused),
            "## What they do not have\n",
            overview(),
            f"Of multimodal models ({wrapped}) the text model is read.\n",
            f"## Where each is read\n\n{WHERE}",
            *(_family(families, architecture) for families, architecture in families_alike()),
        ]
    )


def families_alike() -> list[tuple[list[str], Architecture]]:
    """Families whose parts are called the same, and what they are called."""
    found: list[tuple[list[str], Architecture]] = []
    for family, architecture in ARCHITECTURES.items():
        alike = next((families for families, other in found if other == architecture), None)
        if alike is None:
            found.append(([family], architecture))
        else:
            alike.append(family)
    return found


def _family(families: list[str], architecture: Architecture) -> str:
    rows = [(code(site), where, _only(architecture, site)) for site in SITES if (where := _where(architecture, site))]
    return f"### {', '.join(families)}\n\n" + table(["site", "read at", ""], rows)


def _where(architecture: Architecture, site: str) -> str:
    """`output of self_attn`; empty where the family has none."""
    point = (IN_BLOCK.get(site) or OUTSIDE[site])(architecture)
    always = site in SUMS and architecture.post_norm is True
    if point is None or always or (site == "residual_mid" and architecture.parallel is True):
        return ""
    module = point.module or f"{architecture.blocks}.L"
    times = f", times {code(point.scale)} of the block" if point.scale else ""
    return f"{point.reads} of {code(module)}{times}"


def _only(architecture: Architecture, site: str) -> str:
    """In which models of a family, where not in all."""
    flags = [*(architecture.post_norm or ())] if site in SUMS and architecture.post_norm is not True else []
    if site == "residual_mid" and isinstance(architecture.parallel, tuple):
        flags += architecture.parallel
    without = [f"not {code(flag[4:])}" if flag.startswith("not ") else code(flag) for flag in flags]
    experts = "in dense blocks" if site == "mlp_neurons" and architecture.router is not None else ""
    return f"unless {' or '.join(without)}" if without else experts
