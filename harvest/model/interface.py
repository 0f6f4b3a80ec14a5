"""What a model computes for sequences in hand: one call, true on every architecture and with padding on either side.

Legend: B sequences, T their common length, d width of a site.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from harvest.errors import RequestError
from harvest.model.architectures import decoder_layers
from harvest.model.cache import ActivationCache, ActivationRecord, Span
from harvest.model.modules import runs_of
from harvest.model.placing import checked_offload, in_words, own_copy, place_of
from harvest.model.points import SITES, Name
from harvest.model.sequences import Sequences
from harvest.model.sites import resolve_layers, resolve_names
from harvest.model.watch import Watch, one_row_per_token, takes


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    """What to capture; checked here as far as that needs no model, and by `capture_activations` before any forward."""

    sites: Sequence[str] = ("residual",)
    """Sites as a job names them (`attn`, `attn.3`, `module:PATH`); a single one may be given as a string."""
    layers: Sequence[int] | int | None = None
    """One or several layers, negative ones from the end; None for all. Repeated ones count once."""
    offload: str = "cpu"
    """Where the tensors go as soon as they are computed: `cpu`, `none` (they stay) or a device such as `cuda:1`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sites", _sites(self.sites))
        object.__setattr__(self, "layers", _layers(self.layers))
        object.__setattr__(self, "offload", checked_offload(self.offload, "offload"))


class CapturedSite(NamedTuple):
    """What one site computed at one layer."""

    layer: int | None
    """True index of the block; None for what lies outside the blocks."""
    site: str
    """The site, or `module:PATH` and `module_input:PATH` in full."""
    tensor: torch.Tensor
    """[T, d] for one sequence, [B, T, d] for several, in the dtype in which it was computed."""

    def __repr__(self) -> str:
        return f"CapturedSite(layer={self.layer}, site={self.site!r}, tensor={in_words(self.tensor)})"


def capture_activations(
    model: Any, input_ids: Any, spec: CaptureSpec, attention_mask: Any = None
) -> list[CapturedSite]:
    """What `spec` asks for, site by site in its order, layers rising.

    `input_ids`: whole numbers [T] or [B, T], a tensor or what makes one. `attention_mask`: the same shape, 1 for a
    token and 0 for padding, which may be on either side but not between tokens; without it every id is a token. A
    token's row is what the model computes for its sequence alone, wherever the padding is; rows of padding are zero.

    The forward runs in evaluation mode without gradients, on the device of the model, and ends after the last module
    needed: what comes later, such as the head, does not run, nor do hooks there. Hooks of the caller's on what runs
    act on [B, T, d] as it was given, and what they change is captured. Padded sequences run one by one without their
    padding, as [1, t, d], where the architecture is not in the table of sites, and once more so where a value is no
    finite number. Tensors are ordinary copies that own just what they show. The model is left as found, also after an
    error. Raises RequestError before the forward for a site or layer that the model does not have, ids or a mask that
    are none, and a sequence without a token.
    """
    if not isinstance(spec, CaptureSpec):
        raise RequestError(f"spec: {type(spec).__name__} given; allowed is CaptureSpec")
    names, place = _names(model, spec), place_of(spec.offload, "offload")
    given = Sequences.of(input_ids, attention_mask)
    with torch.inference_mode(False):
        rows = _rows(model, names, given, given.forwards(model), place)
        if not given.real.all() and not all(row.isfinite().all() for row in rows.values()):
            # attention weighs padding with zero, and zero times NaN is NaN: it may be the padding's
            rows = _rows(model, names, given, given.alone(), place)
    return [CapturedSite(name.layer, _label(name), rows[str(name)]) for name in names]


def _rows(
    model: Any, names: Sequence[Name], given: Sequences, parts: Sequence[Sequences], place: torch.device | None
) -> dict[str, torch.Tensor]:
    """Name -> the rows of `given`, run part by part; what is wrong with one of them is said before the first runs."""
    runs = runs_of(model, names)
    inputs = [part.inputs(model, runs) for part in parts]
    found = [_captured(model, names, part, of_part, place) for part, of_part in zip(parts, inputs)]
    return {name: given.together([of_part.pop(name) for of_part in found]) for name in list(found[0])}


def _captured(
    model: Any,
    names: Sequence[Name],
    part: Sequences,
    inputs: Mapping[str, torch.Tensor],
    place: torch.device | None,
) -> dict[str, torch.Tensor]:
    """Name -> [T, d] of one sequence or [B, T, d] of several, from one forward."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: Name, computed: torch.Tensor) -> None:
        rows_BTd = one_row_per_token(computed, tuple(part.ids.shape), name)
        found[str(name)] = own_copy(rows_BTd[0] if part.single else rows_BTd, place)

    with Watch(model, names, keep) as watch:
        watch.run({**inputs, **({"use_cache": False} if takes(watch.runs, "use_cache") else {})})
    return found


@dataclass(frozen=True, slots=True, eq=False)
class CaptureRequest:
    """What to capture, and the cache to put it in."""

    cache: ActivationCache
    spec: CaptureSpec

    def capture(
        self,
        model: Any,
        input_ids: Any,
        participant: str,
        message_idx: int = -1,
        token_span: Span | None = None,
        phases: Mapping[str, Span] | None = None,
    ) -> list[ActivationRecord]:
        """Captures one sequence and adds a record per site and layer to the cache, or none where one is wrong.

        `token_span`: the tokens of the message itself; None for all. Hooks that steer the model must be in place.
        """
        given = Sequences.of(input_ids)
        if not given.single:
            raise RequestError(f"input_ids: {len(given.ids)} sequences; allowed is one for one message")
        found = capture_activations(model, given.ids, self.spec)
        records = [
            ActivationRecord(participant, message_idx, *site, token_span or (0, len(site.tensor)), phases or {})
            for site in found
        ]
        self.cache.add_batch(records)
        return records


def _sites(sites: Any) -> tuple[str, ...]:
    given = (sites,) if isinstance(sites, str) else sites
    if not isinstance(given, Sequence) or not given or not all(isinstance(site, str) for site in given):
        raise RequestError(f"sites = {sites!r}: allowed are one or several of {', '.join(SITES)} and module paths")
    for site in given:  # a name with a layer or a path is looked up in the model
        if "." not in site and ":" not in site and site not in SITES:
            raise RequestError(f"sites = {site!r}: no such site; allowed are {', '.join(SITES)} and module paths")
    return tuple(given)


def _layers(layers: Any) -> tuple[int, ...] | None:
    if layers is None:
        return None
    try:
        given = [layers] if isinstance(layers, int) else list(layers)
        indices = tuple(operator.index(layer) for layer in given)
        if not indices or any(isinstance(layer, bool) for layer in given):
            raise TypeError
    except TypeError:
        raise RequestError(f"layers = {layers!r}: allowed are one or several whole numbers, or None for all") from None
    return indices


def _names(model: Any, spec: CaptureSpec) -> tuple[Name, ...]:
    n_layers = len(decoder_layers(model))
    layers = _layers(spec.layers)
    chosen = "all" if layers is None else resolve_layers(layers, n_layers, f"layers = {list(layers)}")
    return resolve_names(model, spec.sites, chosen)


def _label(name: Name) -> str:
    return str(name) if name.site.startswith("module") else name.site
