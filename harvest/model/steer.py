"""`harvest.steer`: a direction added to what a model computes, or taken out of it, for as long as a `with` block lasts.

Every forward inside is changed, `generate` included; the model is left as it was found, also after an error.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harvest.errors import RequestError
from harvest.model.architectures import unwrapped
from harvest.model.points import Name
from harvest.model.probe import first_tensor, received
from harvest.model.sites import resolve_names

MODES = ("add", "ablate", "project")
UNITS = ("raw", "unit")
POSITIONS = ("all", "generated")


@contextlib.contextmanager
def steer(
    model: Any,
    direction: Any,
    scale: float = 1.0,
    mode: str = "add",
    unit: str = "raw",
    layers: Sequence[int] | None = None,
    sites: Sequence[str] = ("residual",),
    positions: str = "all",
) -> Iterator[None]:
    """Changes every state h at the sites and layers while the block lasts; u is the direction at length 1.

    `add`: h + scale * v, v being the direction as it is (`raw`, in the units of the activations) or u (`unit`).
    `ablate`: h - scale * (h.u) u, so that 1 removes it. `project`: scale * (h.u) u, what lies along it alone.
    `direction`: a Direction or a vector [d] for all of `layers` (None: every layer), or name -> Direction or vector as
    `run.directions()["sentiment"]` gives it, each at its own place. `generated` is the last token of the prompt, that
    the first new token is predicted from, and everything after it. Sums are float32 or finer, results in the model's
    dtype. Raises RequestError for an undefined direction, another width, and whatever is not allowed.
    """
    for setting, value, allowed in (("mode", mode, MODES), ("unit", unit, UNITS), ("positions", positions, POSITIONS)):
        if value not in allowed:
            raise RequestError(f"{setting} = {value!r}: allowed are {', '.join(allowed)}")
    for setting, values, kind in (("layers", layers, int), ("sites", sites, str)):
        if values is not None and (isinstance(values, str) or not _all_of(values, kind)):
            raise RequestError(
                f"{setting} = {values!r}: allowed is a list of {'whole numbers' if kind is int else 'names'}"
            )
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise RequestError(f"scale = {scale!r}: allowed are finite numbers")
    edits = _edits(model, direction, float(scale), mode, unit, layers, tuple(sites))
    watch = _Positions(generated=positions == "generated")
    handles: list[Any] = []
    try:
        handles.append(model.register_forward_pre_hook(watch.see, with_kwargs=True))
        for edit in edits:
            handles.append(edit.register(unwrapped(model).get_submodule(edit.name.module), watch))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _all_of(values: Any, kind: type) -> bool:
    return isinstance(values, Iterable) and all(isinstance(one, kind) and not isinstance(one, bool) for one in values)


def _edits(
    model: Any,
    direction: Any,
    scale: float,
    mode: str,
    unit: str,
    layers: Sequence[int] | None,
    sites: tuple[str, ...],
) -> list[_Edit]:
    names = resolve_names(model, sites, "all" if layers is None else tuple(layers))
    vectors = {str(name): direction for name in names}
    if isinstance(direction, Mapping):
        vectors = _by_place(direction, names, chosen=layers is not None)
    edits = []
    for name in names:
        if str(name) in vectors:
            raw = _vector(vectors[str(name)], name)
            unit_vector = raw / raw.norm()
            edits.append(
                _Edit(name=name, mode=mode, scale=scale, added=raw if unit == "raw" else unit_vector, u=unit_vector)
            )
    twice = [edit.name for edit in edits if getattr(edit.name, "earlier", 0)]
    if twice:
        raise RequestError(f"sites = {list(sites)}: {twice[0]} shares its module with another layer; leave it out")
    return edits


def _by_place(direction: Mapping[str, Any], names: Sequence[Name], *, chosen: bool) -> dict[str, Any]:
    """Name -> what the mapping has for it; a read (`@-3`) is dropped where a name has but one."""
    found: dict[str, Any] = {}
    for at, value in direction.items():
        name = at.partition("@")[0]
        if name in found:
            raise RequestError(f"direction: {name} is read at several places; allowed is one direction for each name")
        found[name] = value
    wanted = {str(name) for name in names}
    lacking = sorted(wanted - set(found))
    if not wanted & set(found) or (chosen and lacking):
        raise RequestError(
            f"direction: none at {(lacking or sorted(wanted))[0]}, which sites and layers ask for; "
            f"there are {', '.join(found) or 'none'}"
        )
    return {name: value for name, value in found.items() if name in wanted}


def _vector(direction: Any, name: Name) -> torch.Tensor:
    """float64 [d] in the units of the activations."""
    status = getattr(direction, "status", "ok")
    if status != "ok":
        raise RequestError(f"direction at {name}: undefined, {status}")
    given = getattr(direction, "raw", direction)
    try:
        array = given.detach().cpu().double().numpy() if isinstance(given, torch.Tensor) else np.asarray(given, float)
    except (TypeError, ValueError):
        raise RequestError(
            f"direction = {given!r:.60}: allowed are a Direction, a vector, and name -> either of them"
        ) from None
    if array.shape != (name.width,):
        raise RequestError(f"direction at {name}: shape {array.shape}; allowed is ({name.width},)")
    if not np.isfinite(array).all() or not array.any():
        raise RequestError(f"direction at {name}: allowed are finite vectors of some length")
    return torch.from_numpy(array.copy())


class _Positions:
    """Which tokens of the current forward are changed: found from what the model itself is called with."""

    def __init__(self, *, generated: bool) -> None:
        self._generated = generated
        self._ids: torch.Tensor | None = None
        """Of the last prompt, for models that read it whole again for each token."""
        self._first: torch.Tensor | None = None
        self.mask: torch.Tensor | None = None
        """bool [B, T]; None for all."""

    def see(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward begins."""
        self.mask = None
        if not self._generated:
            return
        given = args[0] if args else kwargs.get("input_ids")
        given = kwargs.get("inputs_embeds") if given is None else given
        if given is None:
            raise RequestError("positions = 'generated': the model is called without ids; allowed is 'all'")
        cache = kwargs.get("past_key_values")
        if cache is not None and hasattr(cache, "get_seq_length") and int(cache.get_seq_length()) > 0:
            return  # what follows a prompt that is in the cache
        length = given.shape[1]
        at = torch.arange(length, device=given.device)[None]
        if not self._continues(given):
            self._first = _last_real(kwargs.get("attention_mask"), given)
        assert self._first is not None
        self._ids = given.detach()
        self.mask = at >= self._first[:, None].to(given.device)

    def _continues(self, given: torch.Tensor) -> bool:
        """The forward reads the last one's tokens again, and more."""
        before = self._ids
        if before is None or before.shape[0] != given.shape[0] or before.dtype != given.dtype:
            return False
        known = before.shape[1]
        return given.shape[1] > known and torch.equal(given[:, :known], before.to(given.device))


def _last_real(attention_mask: Any, given: torch.Tensor) -> torch.Tensor:
    """int64 [B]: place of the last token that is no padding, on whichever side that is."""
    batch, length = given.shape[:2]
    if not isinstance(attention_mask, torch.Tensor) or tuple(attention_mask.shape) != (batch, length):
        return torch.full((batch,), length - 1)
    at = torch.arange(length, device=attention_mask.device)
    found: torch.Tensor = torch.where(attention_mask.bool(), at, -1).amax(dim=1)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edit:
    """One name's change."""

    name: Name
    mode: str
    scale: float
    added: torch.Tensor
    """float64 [d]: what `add` adds once."""
    u: torch.Tensor
    """float64 [d] of length 1."""

    def register(self, module: torch.nn.Module, watch: _Positions) -> Any:
        """The hook that makes it, to be removed by the caller."""
        if self.name.reads == "output":
            return module.register_forward_hook(
                lambda _module, _args, output: _with_first(output, self.changed(first_tensor(output), watch.mask))
            )

        def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            new = self.changed(received(args, kwargs), watch.mask)
            if args:
                return (_with_first(args[0], new), *args[1:]), kwargs
            key = next(key for key, value in kwargs.items() if isinstance(value, torch.Tensor))
            return args, {**kwargs, key: new}

        return module.register_forward_pre_hook(before, with_kwargs=True)

    def changed(self, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The states [B, T, d] as they go on; `mask` bool [B, T] says which are changed."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        h, u = hidden.to(dtype) * self.name.scale, self.u.to(hidden.device, dtype)
        if self.mode == "add":
            new = h + self.scale * self.added.to(hidden.device, dtype)
        else:
            along = (h @ u)[..., None] * u
            new = h - self.scale * along if self.mode == "ablate" else self.scale * along
        new = (new / self.name.scale).to(hidden.dtype)
        if mask is None:
            return new
        rows = mask.to(hidden.device).reshape(hidden.shape[:-1])[..., None]
        return torch.where(rows, new, hidden)


def _with_first(value: Any, new: torch.Tensor) -> Any:
    """What a module gave or received, with its first tensor exchanged."""
    if isinstance(value, torch.Tensor):
        return new
    if isinstance(value, Mapping):
        key = next(iter(value))
        copy = type(value)(value)  # type: ignore[call-arg]  # outputs of transformers copy like dicts
        copy[key] = _with_first(value[key], new)  # type: ignore[index]
        return copy
    rest = [_with_first(value[0], new), *value[1:]]
    return tuple(rest) if isinstance(value, tuple) else rest
