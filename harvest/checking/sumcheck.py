"""A shard's saved sums against those that its stored rows give: counts exactly, sums up to rounding.

The run added the rows up in other blocks, so that a law of reductions is what is relied on (`harvest.reduce.base`):
rows split anywhere and merged in dataset order come to the same, up to the rounding of float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from harvest.errors import RequestError
from harvest.reduce.base import Reduction, StateFile
from harvest.reduce.health import Health
from harvest.reduce.known import reduction_of
from harvest.reduce.moments import Moments
from harvest.store.ledger import RunRecord

COUNTING: dict[str, Reduction[Any]] = {"moments": Moments(), "health": Health()}
"""Every run has one of them: it counts rows, and values that are no finite numbers."""
LIKE_SUMS = {np.dtype("<f8"): 1e-9, np.dtype("<f4"): 1e-4}
"""Relative to the largest value: float64 sums in another grouping differ by 1e-16 times some thousand rows; a lost row
by one part in n. Float32 keeps half of the digits."""
MOVED_ROWS = 1e-6
"""Share of the rows whose norm may lie in the next bin: an ulp beside an edge, which one norm in 1e13 is."""


class SumCheck:
    """The reductions of a run: which of them can be made again, and whether a shard's saved sums are what they give."""

    def __init__(self, run: RunRecord) -> None:
        asked = run.job.get("statistics") or {}
        kinds = [*(["covariance"] if asked.get("covariance") else []), *asked.get("also", ())]
        self.reductions: dict[str, Reduction[Any]] = {}
        """Beside the one that counts: kind -> the reduction."""
        self.unknown: list[str] = []
        """Those that this installation has no file for."""
        for kind in dict.fromkeys(kinds):
            try:
                self.reductions[kind] = reduction_of(kind)
            except RequestError:
                self.unknown.append(kind)
        self.remade: set[str] = set()
        """Kinds that were made again from stored rows, somewhere."""

    def of(self, saved: StateFile | None) -> list[Reduction[Any]]:
        """What to make of a shard's rows again: first what counts; without sound sums that is all."""
        if saved is None:
            return [COUNTING["health"]]
        counting = COUNTING[counting_kind(saved)]
        return [counting, *(one for one in self.reductions.values() if one.kind != counting.kind)]

    def wrong(self, saved: StateFile, name: str, made: Mapping[str, Any], rows: int) -> list[str]:
        """What is wrong with the saved sums of a name in a shard of so many rows; `made`: kind -> state over them.

        Raises DamageError for a state that cannot be read.
        """
        counting, *others = self.of(saved)
        found = [_of_counting(saved, counting, name, made, rows)]
        for reduction in others:
            what = _differs(saved, reduction, name, made)
            found.append(None if what is None else f"{reduction.kind}: {what}")
        self.remade |= made.keys()
        return [what for what in found if what is not None]


def counting_kind(saved: StateFile) -> str:
    """Which reduction counts a shard's rows."""
    return next((kind for kind in COUNTING if saved.names(kind)), "health")


def _of_counting(
    saved: StateFile, reduction: Reduction[Any], name: str, made: Mapping[str, Any], rows: int
) -> str | None:
    if name not in saved.names(reduction.kind):
        return "no sums are saved"
    state = saved.load(reduction, name)
    counted = state.rows if reduction.kind == "health" else _all_rows(state)
    if counted != rows:
        return f"sums over {counted} rows, the shard has {rows}"
    return _differs(saved, reduction, name, made)


def _all_rows(state: Any) -> int:
    parts = (state.ordinary, state.special)
    return int(sum(part.rows + part.non_finite_rows for part in parts))


def _differs(saved: StateFile, reduction: Reduction[Any], name: str, made: Mapping[str, Any]) -> str | None:
    """Of one reduction; what the rows were not read for is only asked to be there."""
    if name not in saved.names(reduction.kind):
        return "no sums are saved"
    state = saved.load(reduction, name)
    if reduction.kind not in made:
        return None
    one, two = reduction.arrays(state), reduction.arrays(made[reduction.kind])
    for field in sorted({*one, *two}):
        if field not in one or field not in two or not _agree(field, one, two):
            return f"{field} is not what the stored rows give"
    return None


def _agree(field: str, saved: Mapping[str, np.ndarray], made: Mapping[str, np.ndarray]) -> bool:
    """Counts exactly, sums up to the rounding of another grouping."""
    part, _, last = field.rpartition(".")
    histogram = {f"{part}.first", f"{part}.norms"} <= saved.keys()  # of norms: the bins from the first on
    if histogram and last == "norms":
        return _same_histogram(*((int(of[f"{part}.first"][0]), of[field]) for of in (saved, made)))
    if histogram and last == "first":
        return True  # looked at with its counts
    one, two = saved[field], made[field]
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    if one.dtype not in LIKE_SUMS:
        return bool((one == two).all())
    finite = np.isfinite(two)
    like, scale = LIKE_SUMS[one.dtype], float(np.abs(two[finite]).max(initial=0.0))
    return bool(np.allclose(one, two, rtol=like, atol=like * scale, equal_nan=True))


def _same_histogram(one: tuple[int, np.ndarray], two: tuple[int, np.ndarray]) -> bool:
    """Whether the counts (first bin, int64 [k]) agree but for norms that an ulp moved to the next bin."""
    total = int(one[1].sum())
    if total != int(two[1].sum()):
        return False
    first = min(one[0], two[0])
    length = max(one[0] + len(one[1]), two[0] + len(two[1])) - first
    if length > 2**20:  # of all float64 there are 131,072 bins; such a `first` is none
        return False
    below = [np.cumsum(np.pad(counts, (at - first, length - (at - first) - len(counts)))) for at, counts in (one, two)]
    return int(np.abs(below[0] - below[1]).sum()) <= max(1, MOVED_ROWS * total)
