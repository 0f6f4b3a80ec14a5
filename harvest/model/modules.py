"""Modules of the user's: `module:PATH` and `module_input:PATH`, found by their path and measured by a probe."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from harvest.errors import RequestError
from harvest.model.architectures import trunk_of, unwrapped
from harvest.model.points import MODULES, Layer, Name, has
from harvest.model.probe import PROBE, Side, probe


def user_names(model: Any, asked: str, layers: Sequence[int], *, every: bool) -> list[Name]:
    """The names of one entry of `capture.sites`, their widths still 0; `{layer}` stands for each of `layers`.

    Raises RequestError where a layer has no such module; with `every` layer only where none has.
    """
    kind, _, path = asked.partition(":")
    inner = unwrapped(model)
    paths: dict[Layer, str] = {None: path}
    if "{layer}" in path:
        paths = {layer: at_layer(path, layer) for layer in layers}
    found = {layer: here for layer, here in paths.items() if here and has(inner, here)}
    if not found or (len(found) < len(paths) and not every):
        missing = next(here for layer, here in paths.items() if layer not in found)
        near = difflib.get_close_matches(missing, [name for name, _ in inner.named_modules() if name], 3, 0.5)
        raise RequestError(
            f"capture.sites = {asked!r}: the model has no module {missing!r}"
            + (f"; the nearest are {', '.join(near)}" if near else "")
        )
    return [
        Name(
            site=kind,
            layer=layer,
            module=here,
            width=0,
            reads=MODULES[kind],
            earlier=0 if layer is None else calls_before(inner, path, layer),
        )
        for layer, here in found.items()
    ]


def at_layer(path: str, layer: int) -> str:
    """A path with `{layer}` in it, at one layer."""
    return path.replace("{layer}", str(layer))


def calls_before(model: nn.Module, path: str, layer: int) -> int:
    """How often a forward that comes to a layer has run the module there for layers before it, which may share it."""
    module, before = model.get_submodule(at_layer(path, layer)), [at_layer(path, other) for other in range(layer)]
    return sum(has(model, here) and model.get_submodule(here) is module for here in before)


def with_widths(model: Any, names: Sequence[Name]) -> tuple[Name, ...]:
    """Fills in the widths of the user's modules by one probe; RequestError for one without a row per token."""
    asked = [name for name in names if name.site in MODULES]
    if not asked:
        return tuple(names)
    seen = probe(runs_of(model, names), unwrapped(model), {(name.module, name.reads) for name in asked})
    return tuple(
        dataclasses.replace(name, width=_width(name, seen.shapes, seen.error)) if name.site in MODULES else name
        for name in names
    )


def returns_the_stream(model: Any, block: str, hidden: int) -> bool:
    """Whether the block at a path hands on one vector of `hidden` values per token, and so the residual stream.

    A block whose forward cannot be probed is taken at its word; its rows are still checked when they are captured. One
    that a forward passes by (some models call their blocks' `forward` themselves) can have no hook.
    """
    point: tuple[str, Side] = (block, "output")
    seen = probe(trunk_of(model), unwrapped(model), {point})
    if point not in seen.shapes:
        return seen.error is not None
    return seen.shapes[point] == (*PROBE, hidden) and point not in seen.several


def runs_of(model: Any, names: Sequence[Name]) -> nn.Module:
    """What must run to see these names: the trunk, or the whole model for a module outside it, such as the head."""
    inner, trunk = unwrapped(model), trunk_of(model)
    inside = {id(module) for module in trunk.modules()}
    return trunk if all(id(inner.get_submodule(name.module)) in inside for name in names) else inner


def _width(name: Name, shapes: Mapping[tuple[str, Side], tuple[int, ...] | None], error: str | None) -> int:
    point, what = (name.module, name.reads), f"capture.sites = {str(name)!r}"
    if point not in shapes:
        why = f"its width cannot be told from the config ({error})" if error else "it does not run when text is read"
        raise RequestError(f"{what}: {why}; allowed are modules that read or write one vector per token")
    shape = shapes[point] or ()
    if shape[:2] == PROBE:
        return math.prod(shape[2:])
    if len(shape) > 1 and shape[0] == math.prod(PROBE):
        return math.prod(shape[1:])
    raise RequestError(
        f"{what}: its {name.reads} is not one vector per token; allowed are modules that read or write one"
    )
