"""Which names a model has, so that one means the same everywhere: sites of the table, modules of the user's.

A *site* is a place in a block, a *name* is a site at a layer: `residual.12`. Layers are the true block indices of
the model, counted from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harvest.errors import RequestError
from harvest.model.architectures import architecture_of, blocks_path, config_of, decoder_layers, trunk_of, unwrapped
from harvest.model.modules import at_layer, calls_before, returns_the_stream, user_names, with_widths
from harvest.model.points import (
    MODULES,
    OUTSIDE,
    SITES,
    Name,
    Point,
    has,
    point_of,
    refuse_site,
    resolve_layers,
    split_site,
)

__all__ = ["SITES", "Name", "decoder_layers", "resolve_layers", "resolve_names", "sites_of", "trunk_of"]


def resolve_names(model: Any, sites: Sequence[str], layers: str | Sequence[int]) -> tuple[Name, ...]:
    """The names that a job asks for, site by site in its order, layers rising, each once.

    Works on a model whose weights are on the meta device. With `layers="all"` a site is taken at every layer that has
    it. Raises RequestError for a site or module that the model does not have and for a layer beyond its ends, naming
    what is allowed.
    """
    found = _Sites(model)
    resolve_layers(layers, found.n_layers)
    names: dict[str, Name] = {}
    for asked in sites:
        for name in found.names(asked, layers):
            names.setdefault(str(name), name)
    return with_widths(model, list(names.values()))


class _Sites:
    """The sites of one model; asked about each entry of `capture.sites` in turn."""

    def __init__(self, model: Any) -> None:
        self.model, self.inner, self.trunk = model, unwrapped(model), trunk_of(model)
        self.blocks = decoder_layers(model)
        self.n_layers = len(self.blocks)
        self.hidden = int(config_of(model).hidden_size)
        trunk = next(path for path, module in self.inner.named_modules() if module is self.trunk)
        self.prefix = f"{trunk}." if trunk else ""
        self.block = f"{self.prefix}{blocks_path(model)}."
        self.having = {site: self._layers_of(site) for site in SITES}
        self.available = [site for site, having in self.having.items() if not isinstance(having, str)]

    def _layers_of(self, site: str) -> list[int] | str:
        """The layers that have a site (none are counted for a site outside the blocks), or why no layer has."""
        point = point_of(self.model, site)
        if isinstance(point, str):
            return point
        if architecture_of(self.model) is None and not returns_the_stream(self.model, f"{self.block}0", self.hidden):
            return "its blocks do not return one state per token, and its architecture is not in the table of sites"
        if site in OUTSIDE:
            return [] if has(self.trunk, point.module) else "it has no such part"
        layers = [layer for layer, block in enumerate(self.blocks) if has(block, point.module)]
        return layers or "none of its blocks has such a part"

    def names(self, asked: str, layers: str | Sequence[int]) -> list[Name]:
        """The names of one entry of `capture.sites`; the width of a module of the user's is still 0."""
        if asked.partition(":")[0] in MODULES and ":" in asked:
            return user_names(self.model, asked, resolve_layers(layers, self.n_layers), every=layers == "all")
        site, layer = split_site(asked)
        having = self.having.get(site, "")
        refuse_site(asked, site, layer, having, self.model.config.model_type, self.available)
        assert not isinstance(having, str)
        if site in OUTSIDE:
            return [self._outside(site)]
        setting = f"capture.sites = {asked!r}"
        if layer is not None:
            chosen = resolve_layers([layer], self.n_layers, setting)
        else:
            chosen = having if layers == "all" else resolve_layers(layers, self.n_layers)
        if lacking := sorted({*chosen} - {*having}):
            raise RequestError(f"{setting}: layers {_list(lacking)} have none; allowed are {_list(having)}")
        return [self._in_block(site, at) for at in chosen]

    def _in_block(self, site: str, layer: int) -> Name:
        point = point_of(self.model, site)
        assert not isinstance(point, str)
        template = f"{self.block}{{layer}}" + (f".{point.module}" if point.module else "")
        path = at_layer(template, layer)
        scale = float(getattr(self.blocks[layer], point.scale)) if point.scale else 1.0
        return Name(
            site=site,
            layer=layer,
            module=path,
            width=self._width(point, path),
            reads=point.reads,
            scale=scale,
            earlier=calls_before(self.inner, template, layer),
        )

    def _outside(self, site: str) -> Name:
        point = point_of(self.model, site)
        assert not isinstance(point, str)
        return Name(site=site, layer=None, module=f"{self.prefix}{point.module}", width=self.hidden, reads=point.reads)

    def _width(self, point: Point, path: str) -> int:
        """Of a site in a block, from the module that reads or writes it."""
        module: Any = self.inner.get_submodule(path)
        if point.width == "stream":
            return self.hidden
        told = ("in_features", "nx") if point.width == "in" else ("out_features", "nf")  # the latter are GPT-2's own
        named = [int(getattr(module, name)) for name in told if hasattr(module, name)]
        return named[0] if named else len(module.weight)  # a router may have its weights alone


def _list(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


# ---- harvest sites MODEL -----------------------------------------------------------------------------------------


def sites_of(name: str) -> dict[str, Any]:
    """What can be captured from a model, from its config alone: site -> width, module and layers; plain values."""
    from harvest.model.load import load_config, skeleton  # loads transformers, which the table itself does not need
    from harvest.settings.model import ModelSettings

    settings = ModelSettings(name=name)
    model = skeleton(load_config(settings), settings)
    found = _Sites(model)
    return {
        "model": name,
        "architecture": model.config.model_type,
        "layers": found.n_layers,
        "sites": {site: _described(found.names(site, "all"), found.block) for site in found.available},
    }


def _described(names: Sequence[Name], block: str) -> dict[str, Any]:
    first = names[0]
    module = first.module
    if first.layer is not None:
        module = f"{block}{{layer}}{module.removeprefix(f'{block}{first.layer}')}"
    return {
        "width": first.width,
        "module": module if first.reads == "output" else f"input of {module}",
        "layers": _ranges([name.layer for name in names if name.layer is not None]),
    }


def _ranges(layers: Sequence[int]) -> str | None:
    """`0 to 31`, or every layer where some are left out; None without any."""
    if not layers:
        return None
    whole = list(layers) == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]} to {layers[-1]}" if whole else _list(layers)
