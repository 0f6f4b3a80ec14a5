"""One bounded pass over the stored rows of a name: its sums and pools anew, and which rows look like no activation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from harvest.reduce.base import Block, Reduction
from harvest.reduce.pool import DocumentPool, Pooled
from harvest.store.arrays import StoredArray
from harvest.store.storedrows import StoredRows

SCAN_BYTES = 8 << 20
"""Of an array, at a time."""
COLUMNS = ("special", "document", "position")
"""What a block says of its rows."""
INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
LIKE_MEANS = 2.0**-22
"""Relative: a float64 mean in another order, rounded to float32, may fall on the neighbour (2**-23), no further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What one pass over n rows found."""

    sums: Mapping[str, Any]
    """Kind of reduction -> its state over the rows."""
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
    reductions: Sequence[Reduction[Any]],
    columns: Mapping[str, np.ndarray] | None,
    sequence: np.ndarray | None = None,
    pools: Mapping[str, StoredArray] | None = None,
) -> Scan:
    """Reads the rows once, a few MiB at a time.

    `reductions`: the sums to make again; the first counts values that are no finite numbers. `columns`: special bool,
    document int64 and position int32 [n], for those that ask; None where they are not known. `sequence` int64 [n],
    rising, with `pools`: pool -> its stored array, one row for each sequence.
    """
    n, width = stored.shape
    where = _nowhere(n) if columns is None else columns
    states = [reduction.zero() for reduction in reductions]
    pooled = _Pools(pools or {}, width)
    odd, zero, same, flat = (np.zeros(n, bool) for _ in range(4))
    step = max(1, SCAN_BYTES // stored.row_bytes)
    last = None
    for start in range(0, n, step):
        stop = min(start + step, n)
        rows = stored.read(start, stop)
        block = Block(rows=rows, **{column: where[column][start:stop] for column in COLUMNS})
        before = states[0].non_finite_values
        states = [reduction.update(state, block) for reduction, state in zip(reductions, states)]
        if states[0].non_finite_values != before:
            odd[start:stop] = ~torch.isfinite(rows).all(dim=1).numpy()
        if pools and sequence is not None:
            pooled.compare(pooled.pool.update(rows, sequence[start:stop]))
        bits = rows.view(INTEGERS[rows.dtype]).numpy().view(f"u{rows.dtype.itemsize}")
        zero[start:stop], same[start:stop], flat[start:stop] = _odd_rows(bits, last)
        last = bits[-1].copy()
    pooled.compare(pooled.pool.finish())
    return Scan(
        sums={reduction.kind: state for reduction, state in zip(reductions, states)},
        non_finite=states[0].non_finite_values,
        odd=odd,
        zero=zero,
        same=same,
        flat=flat,
        pools=pooled.wrong,
    )


def _nowhere(rows: int) -> dict[str, np.ndarray]:
    return {"special": np.zeros(rows, bool), "document": np.zeros(rows, np.int64), "position": np.zeros(rows, np.int32)}


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
