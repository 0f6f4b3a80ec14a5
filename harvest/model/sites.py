"""Where in each architecture a site lies: one table, so that a name means the same on every model.

A *site* is a place in a block, a *name* is a site at a layer: `residual.12`. Layers are the true block
indices of the model, counted from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from harvest.errors import NotBuiltError, RequestError

RESIDUAL, ATTN, MLP = "residual", "attn", "mlp"
SITES = (RESIDUAL, ATTN, MLP)
"""The sites that can be captured; each lies at the output of one module of the block."""

LATER_SITES = (
    "residual_pre",
    "residual_mid",
    "attn_contribution",
    "mlp_contribution",
    "attn_input",
    "mlp_input",
    "attn_heads",
    "mlp_neurons",
    "router",
    "embedding",
    "final_norm",
)
"""Sites of the documented interface that are refused by name until they are built."""

TRANSFORMER_LENS = {"hook_resid_post": RESIDUAL}
"""`blocks.L.<key>` is accepted for the site."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Where the blocks of a family are, below its trunk (`model.base_model`), and what is in a block."""

    blocks: str
    """Path from the trunk to the list of blocks."""
    attn: str
    """Attention module within a block: its output is what `o_proj` returns."""
    mlp: str
    """MLP module within a block: its output is what `down_proj` returns."""


_LLAMA = Architecture(blocks="layers", attn="self_attn", mlp="mlp")
ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "phi3": _LLAMA,
    "gpt2": Architecture(blocks="h", attn="attn", mlp="mlp"),
    "gpt_neox": Architecture(blocks="layers", attn="attention", mlp="mlp"),
}
"""By `config.model_type`. A family joins when a test compares every site of it with plain hooks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """One vector per token: a site at a layer, and the module whose output it is."""

    site: str
    layer: int
    """True index of the block."""
    module: str
    """Path of the module below the trunk."""
    width: int
    """Values of a row."""

    def __str__(self) -> str:
        return f"{self.site}.{self.layer}"


def trunk_of(model: Any) -> nn.Module:
    """The part of a transformers model that ends before its head; PEFT wrappers are looked through."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    trunk: nn.Module = getattr(inner, "base_model", inner)
    return trunk


def architecture_of(model: Any) -> Architecture:
    """The table's entry for a model; RequestError names what is supported where there is none."""
    model_type = model.config.model_type
    if model_type not in ARCHITECTURES:
        raise RequestError(
            f"model.name: architecture {model_type!r} is not supported yet; supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[model_type]


def decoder_layers(model: Any) -> nn.ModuleList:
    """The model's blocks, first to last; RequestError for an architecture that is not in the table."""
    blocks = trunk_of(model).get_submodule(architecture_of(model).blocks)
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def resolve_names(model: Any, sites: Sequence[str], layers: str | Sequence[int]) -> tuple[Name, ...]:
    """The names that a job asks for, site by site in its order, layers rising, each once.

    Works on a model whose weights are on the meta device. Raises RequestError for a site that the model
    does not have and for a layer beyond its ends, naming what is allowed.
    """
    architecture, n_layers = architecture_of(model), len(decoder_layers(model))
    width = int(model.config.get_text_config().hidden_size)
    chosen = resolve_layers(layers, n_layers)
    names: dict[str, Name] = {}
    for site in sites:
        plain, at = _site_and_layers(site, chosen, n_layers)
        for layer in at:
            name = Name(site=plain, layer=layer, module=_module(architecture, plain, layer), width=width)
            names.setdefault(str(name), name)
    return tuple(names.values())


def resolve_layers(layers: str | Sequence[int], n_layers: int, asked: str | None = None) -> list[int]:
    """True layer indices, rising and each once; negative ones count from the end.

    `asked`: the setting and its value, for the message, where it is not `capture.layers`.
    """
    if layers == "all":
        return list(range(n_layers))
    for layer in layers:
        if not -n_layers <= int(layer) < n_layers:
            raise RequestError(
                f"{asked or f'capture.layers = {list(layers)}'}: the model has {n_layers} layers; "
                f"allowed are 0 to {n_layers - 1}, or -{n_layers} to -1 from the end; {layer} is none of them"
            )
    return sorted({int(layer) % n_layers for layer in layers})


def _site_and_layers(site: str, chosen: list[int], n_layers: int) -> tuple[str, list[int]]:
    """A site of the job, in our spelling (`attn`, or `attn.15` for one layer) or TransformerLens', with its layers."""
    if site in SITES:
        return site, chosen
    plain, _, layer = site.partition(".")
    if plain in SITES and layer.removeprefix("-").isdecimal():
        return plain, resolve_layers([int(layer)], n_layers, f"capture.sites = {site!r}")
    if site.startswith("blocks."):
        _, layer, hook = [*site.split(".", 2), ""][:3]
        if layer.isdecimal() and hook in TRANSFORMER_LENS:
            return TRANSFORMER_LENS[hook], resolve_layers([int(layer)], n_layers, f"capture.sites = {site!r}")
    if site in LATER_SITES or site.startswith(("blocks.", "module:", "module_input:")):
        raise NotBuiltError(f"capture.sites = {site!r}: not built in this version; allowed are {', '.join(SITES)}")
    raise RequestError(f"capture.sites = {site!r}: no such site; this model has {', '.join(SITES)}")


def _module(architecture: Architecture, site: str, layer: int) -> str:
    block = f"{architecture.blocks}.{layer}"
    return {RESIDUAL: block, ATTN: f"{block}.{architecture.attn}", MLP: f"{block}.{architecture.mlp}"}[site]


def sites_of(name: str) -> dict[str, Any]:
    """What can be captured from a model, from its config alone: site -> width and module; plain values."""
    from harvest.config import ModelSettings
    from harvest.model.load import load_config, skeleton  # loads transformers, which the table itself does not need

    settings = ModelSettings(name=name)
    model = skeleton(load_config(settings), settings)
    architecture, blocks = architecture_of(model), decoder_layers(model)
    names = resolve_names(model, SITES, [0])
    return {
        "model": name,
        "architecture": model.config.model_type,
        "layers": len(blocks),
        "sites": {
            found.site: {
                "width": found.width,
                "module": _module(architecture, found.site, 0).replace(".0", ".{layer}", 1),
                "layers": f"0 to {len(blocks) - 1}",
            }
            for found in names
        },
    }
