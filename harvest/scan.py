"""One bounded pass over the stored rows of a name: its sums and pools anew, and which rows look like no activation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from harvest.reduce.base import Block, Reduction, StateFile
from harvest.reduce.health import Health
from harvest.reduce.moments import Moments
from harvest.reduce.pool import DocumentPool, Pooled
from harvest.store.arrays import StoredArray
from harvest.storedrows import StoredRows

SCAN_BYTES = 8 << 20
"""Of an array, at a time."""
REDUCTIONS: dict[str, Reduction[Any]] = {"moments": Moments(), "health": Health()}
INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
LIKE_SUMS = 1e-9
"""Relative: float64 sums in another grouping differ by 1e-16 times some thousand rows; a lost row by one part in n."""
LIKE_MEANS = 2.0**-22
"""Relative: a float64 mean in another order, rounded to float32, may fall on the neighbour (2**-23), no further."""
MOVED_ROWS = 1e-6
"""Share of the rows whose norm may lie in the next bin: an ulp beside an edge, which one norm in 1e13 is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What one pass over n rows found."""

    kind: str
    """The reduction whose state `sums` is."""
    sums: Any
    non_finite: int
    """NaN and infinite values."""
    odd: np.ndarray
    """bool [n]: the row has one of them."""
    zero: np.ndarray
    """bool [n]: the row is zero throughout."""
    same: np.ndarray
    """bool [n]: the row has the bits of the one before."""
    flat: np.ndarray
    """bool [n]: every value of the row is the same, and there is more than one."""
    pools: Mapping[str, int] = field(default_factory=dict)
    """Pool -> the first of its rows that the stored rows do not give; pools that fit are left out."""

    @property
    def zero_rows(self) -> int:
        """Rows that are zero throughout."""
        return int(self.zero.sum())


def scan_rows(
    stored: StoredRows,
    special: np.ndarray | None,
    kind: str | None,
    sequence: np.ndarray | None = None,
    pools: Mapping[str, StoredArray] | None = None,
) -> Scan:
    """Reads the rows once, a few MiB at a time.

    `special` bool [n], None where it is not known; `kind` of the sums to make again, `health` where they cannot be.
    `sequence` int64 [n], rising, with `pools`: pool -> its stored array, one row for each sequence.
    """
    kind = kind if kind is not None and special is not None else "health"
    reduction = REDUCTIONS[kind]
    n, width = stored.shape
    flags = np.zeros(n, bool) if special is None else special
    sums = reduction.zero()
    pooled = _Pools(pools or {}, width)
    odd, zero, same, flat = (np.zeros(n, bool) for _ in range(4))
    step = max(1, SCAN_BYTES // stored.row_bytes)
    last = None
    for start in range(0, n, step):
        stop = min(start + step, n)
        rows = stored.read(start, stop)
        nowhere = np.zeros(stop - start, np.int64)  # these sums do not ask where a row is from
        block = Block(rows=rows, special=flags[start:stop], document=nowhere, position=nowhere.astype(np.int32))
        before, sums = sums.non_finite_values, reduction.update(sums, block)
        if sums.non_finite_values != before:
            odd[start:stop] = ~torch.isfinite(rows).all(dim=1).numpy()
        if pools and sequence is not None:
            pooled.compare(pooled.pool.update(rows, sequence[start:stop]))
        bits = rows.view(INTEGERS[rows.dtype]).numpy().view(f"u{rows.dtype.itemsize}")
        zero[start:stop], same[start:stop], flat[start:stop] = _odd_rows(bits, last)
        last = bits[-1].copy()
    pooled.compare(pooled.pool.finish())
    return Scan(
        kind=kind,
        sums=sums,
        non_finite=sums.non_finite_values,
        odd=odd,
        zero=zero,
        same=same,
        flat=flat,
        pools=pooled.wrong,
    )


def _odd_rows(bits: np.ndarray, last: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(zero, same, flat) bool [n] of rows as unsigned bits [n, d]; `last`: the row before them.

    Whole rows are looked at only where a value or two of them already agree: that is hardly ever.
    """
    n, width = bits.shape
    zero, same, flat = np.zeros(n, bool), np.zeros(n, bool), np.zeros(n, bool)
    unsigned = bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)  # -0 is zero, too
    first, final = bits[:, 0], bits[:, -1]
    at = np.flatnonzero(first & unsigned == 0)
    zero[at] = (bits[at] & unsigned == 0).all(axis=1)
    at = np.flatnonzero((first[1:] == first[:-1]) & (final[1:] == final[:-1]))
    same[at + 1] = (bits[at + 1] == bits[at]).all(axis=1)
    same[0] = last is not None and np.array_equal(bits[0], last)
    if width > 1:
        at = np.flatnonzero(first == bits[:, 1])
        flat[at] = (bits[at] == bits[at, :1]).all(axis=1)
    return zero, same, flat


class _Pools:
    """The pools of a name made again, against those that are stored."""

    def __init__(self, stored: Mapping[str, StoredArray], width: int) -> None:
        self.pool = DocumentPool(list(stored), width)
        self.wrong: dict[str, int] = {}
        self._stored, self._at = stored, 0

    def compare(self, found: Iterable[Pooled]) -> None:
        """The next documents."""
        for made in found:
            count = len(next(iter(made.values())))
            for kind, values in made.items():
                if kind not in self.wrong:
                    differs = ~_like(kind, self._stored[kind].read(self._at, self._at + count), values)
                    if differs.any():
                        self.wrong[kind] = self._at + int(differs.argmax())
            self._at += count


def _like(kind: str, stored: np.ndarray, made: np.ndarray) -> np.ndarray:
    """bool [k]: rows float32 [k, d] that agree; `last` and `max` round nothing, so they agree to the bit."""
    like: np.ndarray = np.equal(stored, made) | (np.isnan(stored) & np.isnan(made))
    if kind == "mean" and not like.all():
        # A mean near zero of large values keeps the rounding of the large ones.
        finite = np.where(np.isfinite(made), np.abs(made), 0)
        room = LIKE_MEANS * finite + 1e-12 * finite.max(axis=1, initial=0.0, keepdims=True)
        with np.errstate(invalid="ignore"):
            like[np.abs(stored.astype(np.float64) - made) <= room] = True
    every: np.ndarray = np.all(like, axis=1)
    return every


def same_sums(saved: StateFile, name: str, scan: Scan | None, rows: int) -> str | None:
    """What is wrong with the saved sums of a name in a shard of so many rows; None where they are right."""
    kind = kind_of(saved)
    if name not in saved.names(kind):
        return "no sums are saved"
    reduction = REDUCTIONS[kind]
    state = saved.load(reduction, name)
    counted = state.rows if kind == "health" else _all_rows(state)
    if counted != rows:
        return f"sums over {counted} rows, the shard has {rows}"
    if scan is None or scan.kind != kind:
        return None
    one, two = reduction.arrays(state), reduction.arrays(scan.sums)
    for part in one:
        if not _agree(part, one, two):
            return f"{part} is not what the stored rows give"
    return None


def kind_of(saved: StateFile) -> str:
    """Which reduction a shard kept."""
    return next((kind for kind in REDUCTIONS if saved.names(kind)), "health")


def _all_rows(state: Any) -> int:
    parts = (state.ordinary, state.special)
    return int(sum(part.rows + part.non_finite_rows for part in parts))


def _agree(field: str, saved: Mapping[str, np.ndarray], made: Mapping[str, np.ndarray]) -> bool:
    """Counts exactly, sums up to the rounding of another grouping."""
    if field.endswith(".norms"):
        part = field.removesuffix(".norms")
        return _same_histogram(*((int(of[f"{part}.first"][0]), of[field]) for of in (saved, made)))
    if field.endswith(".first"):
        return True  # looked at with its counts
    one, two = saved[field], made[field]
    if one.shape != two.shape:
        return False
    if one.dtype.kind == "i":
        return bool((one == two).all())
    finite = np.isfinite(two)
    scale = float(np.abs(two[finite]).max(initial=0.0))
    return bool(np.allclose(one, two, rtol=LIKE_SUMS, atol=LIKE_SUMS * scale))


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
