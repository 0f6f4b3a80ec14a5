"""What each site is: the input or the output of one module, told from the table of architectures; and its names.

None is computed from two values, so what is captured is what the model itself went on with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from harvest.errors import RequestError
from harvest.model.architectures import Architecture, architecture_of, config_of, says
from harvest.model.probe import Side
from harvest.settings.base import nearest

Layer = int | None
Width = Literal["stream", "in", "out"]
"""Of a row: that of the residual stream, or what the linear module at the point takes or gives."""
MODULES: dict[str, Side] = {"module": "output", "module_input": "input"}
"""`module:PATH` and `module_input:PATH`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """One vector per token: a site, the layer it is at, and the point of the model where it is read."""

    site: str
    """As in SITES; `module` or `module_input` for a module of the user's."""
    layer: Layer
    """True index of the block; None for what lies outside the blocks and for a path without `{layer}`."""
    module: str
    """Path in the model."""
    width: int
    """Values of a row."""
    reads: Side = "output"
    """Which side of the module; of several values the first."""
    scale: float = 1.0
    """Factor on what is read: what a block multiplies with before it adds."""
    earlier: int = 0
    """Calls of the module in a forward before the one that counts: layers may share one block."""

    def __str__(self) -> str:
        if self.site in MODULES:
            return f"{self.site}:{self.module}"
        return self.site if self.layer is None else f"{self.site}.{self.layer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Where in a block, or in the trunk for a site without layers, a site is read."""

    module: str
    """Below the block or the trunk; empty for the block itself."""
    reads: Side = "output"
    scale: str | None = None
    """Attribute of the block: the factor on what is read."""
    width: Width = "stream"


def _at(
    module: str | None, reads: Side = "output", *, scale: str | None = None, width: Width = "stream"
) -> Point | None:
    return None if module is None else Point(module=module, reads=reads, scale=scale, width=width)


IN_BLOCK: dict[str, Callable[[Architecture], Point | None]] = {
    "residual": lambda a: Point(module=""),
    "residual_pre": lambda a: Point(module="", reads="input"),
    "residual_mid": lambda a: _at(a.mid, "input"),
    "attn": lambda a: _at(a.attn_out or a.attn),
    "mlp": lambda a: _at(a.mlp_out or a.mlp),
    "attn_contribution": lambda a: _at(a.after_attn or a.attn_out or a.attn, scale=a.scale),
    "mlp_contribution": lambda a: _at(a.after_mlp or a.mlp_out or a.mlp, scale=a.scale),
    "attn_input": lambda a: _at(a.attn, "input"),
    "mlp_input": lambda a: _at(a.mlp, "input"),
    "attn_heads": lambda a: _at(a.o_proj, "input", width="in"),
    "mlp_neurons": lambda a: _at(a.down_proj, "input", width="in"),
    "router": lambda a: _at(a.router, width="out"),
}
OUTSIDE: dict[str, Callable[[Architecture], Point | None]] = {
    "embedding": lambda a: Point(module=f"{a.blocks}.0", reads="input"),
    "final_norm": lambda a: _at(a.final_norm),
}
"""Sites without layers: what enters block 0, and the normed state that the head reads."""
SITES = (*IN_BLOCK, *OUTSIDE)
"""Every site by name, beside `module:PATH` and `module_input:PATH`."""
SUMS = ("residual_mid", "attn_contribution", "mlp_contribution")
"""Sites that mean something only where the residual stream is the sum of what the sublayers add."""

TRANSFORMER_LENS = {
    "hook_resid_pre": "residual_pre",
    "hook_resid_mid": "residual_mid",
    "hook_resid_post": "residual",
    "hook_attn_out": "attn_contribution",
    "hook_mlp_out": "mlp_contribution",
    "attn.hook_z": "attn_heads",
    "mlp.hook_post": "mlp_neurons",
}
"""`blocks.L.<key>` is accepted for the site."""
MISLEADING = {
    "hook_mlp_in": "differs between versions of TransformerLens; use residual_mid or mlp_input",
    "ln_final.hook_normalized": "lies before the norm's gain, where models have no module; use final_norm",
}
"""TransformerLens names that are refused, and why."""


def point_of(model: Any, site: str) -> Point | str:
    """Where a site is read on this model, or why the model has none; single blocks may still lack the module."""
    return point_in(architecture_of(model), config_of(model), site)


def point_in(architecture: Architecture | None, config: Any, site: str) -> Point | str:
    """The same for a model with this config."""
    if architecture is None:  # only the output of a block is sure to mean what it should
        return Point(module="") if site == "residual" else "its architecture is not in the table of sites"
    if site in SUMS and says(architecture.post_norm, config):
        return "a norm follows each sum in its blocks"
    if site == "residual_mid" and says(architecture.parallel, config):
        return "attention and MLP are parallel in its blocks"
    point = (IN_BLOCK.get(site) or OUTSIDE[site])(architecture)
    return "it has no such part" if point is None else point


def has(module: nn.Module, path: str) -> bool:
    """Whether there is a module at a path below."""
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


# ---- what a job may ask for ----------------------------------------------------------------------------------------


def split_site(asked: str) -> tuple[str, int | None]:
    """A site of the job with its layer: ours (`attn`, or `attn.15` for one layer) or TransformerLens'."""
    if match := re.fullmatch(r"blocks\.(\d+)\.(.+)", asked):
        hook = match[2]
        return TRANSFORMER_LENS.get(hook, hook if hook in MISLEADING else asked), int(match[1])
    if match := re.fullmatch(r"([a-z_]+)\.(-?\d+)", asked):
        return match[1], int(match[2])
    return asked, None


def refuse_site(asked: str, site: str, layer: Layer, found: Any, kind: str, available: Iterable[str]) -> None:
    """Raises RequestError for a site that there is not, or that the model has not: `found` is text and says why."""
    known = f"this model has {', '.join([*available, *(f'{module}:PATH' for module in MODULES)])}"
    if site not in SITES or (site in OUTSIDE and layer is not None):
        meant = [] if site in MISLEADING or site in SITES else nearest(site, SITES)
        hint = f"did you mean {meant[0]}? " if meant else f"{site} has no layers, so " if site in OUTSIDE else ""
        raise RequestError(f"capture.sites = {asked!r}: {hint}{MISLEADING.get(site, 'no such site')}; {known}")
    if isinstance(found, str):
        raise RequestError(f"capture.sites = {asked!r}: {kind!r} has none: {found}; {known}")


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
