"""Covariance of a name's rows in one pass over the data: float64, around their own mean, merged by Chan's formula.

Over the rows that moments are over: finite ones, special tokens among them. The products are made by a BLAS that is
held to one thread, in blocks of a fixed size: its threads and the batches leave no trace in the bits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from threadpoolctl import ThreadpoolController

from harvest.reduce.base import Block

BLOCK_VALUES = 2**21
"""Values of a block: 16 MiB as float64, enough rows for a product to outweigh adding it up."""
COPIED_VALUES = 2**15 - 1
"""Values turned to float64 at a time: one more would wake torch's threads (sums.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CovarianceState:
    """Sums over a set of rows."""

    rows: int
    """Finite rows."""
    mean: np.ndarray
    """float64 [d]; [0] before the first row, when no width is known."""
    products: np.ndarray
    """float64 [d, d]: summed products of deviations from the mean, symmetric to the bit; [0, 0] before any row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCovariance:
    """What the covariance comes to. With no finite row the arrays are empty."""

    count: int
    """Finite rows, those of special tokens included."""
    mean: np.ndarray
    """float64 [d]"""
    matrix: np.ndarray
    """float64 [d, d], of the population (divided by count), symmetric to the bit."""


NOTHING = CovarianceState(rows=0, mean=np.zeros(0), products=np.zeros((0, 0)))


class Covariance:
    """The reduction `covariance`."""

    kind = "covariance"
    version = 1

    def zero(self) -> CovarianceState:
        """The state of no rows."""
        return NOTHING

    def update(self, state: CovarianceState, block: Block) -> CovarianceState:
        """A new state with the block's rows added."""
        return self.merge(state, _sums_of(block.rows))

    def merge(self, first: CovarianceState, second: CovarianceState) -> CovarianceState:
        """Chan's formula; a part without rows leaves the other's sums untouched, bit for bit."""
        if not first.rows or not second.rows:
            return first if first.rows else second
        if len(first.mean) != len(second.mean):
            raise ValueError(f"covariances of rows of width {len(first.mean)} and {len(second.mean)} do not merge")
        rows = first.rows + second.rows
        delta, share = second.mean - first.mean, second.rows / rows
        products = np.outer(delta, delta)  # symmetric to the bit, and so is all that is done to every element alike
        products *= first.rows * share
        products += first.products
        products += second.products
        return CovarianceState(rows=rows, mean=first.mean + delta * share, products=products)

    def finalise(self, state: CovarianceState) -> RowCovariance:
        """The covariance of the population."""
        return RowCovariance(count=state.rows, mean=state.mean.copy(), matrix=state.products / max(1, state.rows))

    def arrays(self, state: CovarianceState) -> dict[str, np.ndarray]:
        """Fields `rows` int64 [1], `mean` float64 [d] and `upper` float64 [d * (d + 1) / 2]: the products of the upper
        triangle with its diagonal, row by row."""
        d = len(state.mean)
        upper = np.empty(d * (d + 1) // 2)
        for i, at in _upper(d):
            upper[at] = state.products[i, i:]
        return {"rows": np.array([state.rows], np.int64), "mean": state.mean, "upper": upper}

    def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> CovarianceState:
        """The inverse of `arrays`. Raises ValueError for a triangle of another width."""
        mean, upper = arrays["mean"], arrays["upper"]
        d = len(mean)
        if len(upper) != d * (d + 1) // 2:
            raise ValueError(f"a triangle of {len(upper)} values is none of width {d}")
        products = np.empty((d, d))
        for i, at in _upper(d):
            products[i, i:] = products[i:, i] = upper[at]
        return CovarianceState(rows=int(arrays["rows"][0]), mean=mean, products=products)


REDUCTION = Covariance()


def saved_bytes(width: int) -> int:
    """Of a saved state, but for its part of the header."""
    return 8 * (1 + width + width * (width + 1) // 2)


def held_bytes(width: int) -> int:
    """Of a state in memory."""
    return 8 * (1 + width + width * width)


def _upper(d: int) -> Iterator[tuple[int, slice]]:
    """(row of the matrix, where its values from the diagonal on lie in the triangle)."""
    start = 0
    for i in range(d):
        yield i, slice(start, start + d - i)
        start += d - i


def _sums_of(rows: torch.Tensor) -> CovarianceState:
    """Of the finite ones among the rows [n, d]: their mean first, then the products of what deviates from it."""
    count, d = 0, rows.shape[1]
    total = np.zeros(d)
    for x in _blocks(rows):
        count += len(x)
        total += x.sum(axis=0)
    if not count:
        return NOTHING
    mean, products = total / count, np.zeros((d, d))
    with _one_thread:
        for x in _blocks(rows):
            x -= mean
            products += x.T @ x  # numpy makes one triangle and mirrors it: symmetric to the bit
    return CovarianceState(rows=count, mean=mean, products=products)


def _blocks(rows: torch.Tensor) -> Iterator[np.ndarray]:
    """The rows as float64 [k, d], a block at a time and without those that are not finite; the next overwrites it."""
    n, d = rows.shape
    step, copied = max(1, BLOCK_VALUES // max(1, d)), max(1, COPIED_VALUES // max(1, d))
    buffer = torch.empty(min(step, n), d, dtype=torch.float64)
    for start in range(0, n, step):
        block = rows[start : start + step]
        x = buffer[: len(block)]
        for at in range(0, len(block), copied):
            x[at : at + copied].copy_(block[at : at + copied])
        values = x.numpy()
        with np.errstate(invalid="ignore"):
            good = np.isfinite(values.sum(axis=1))  # of float64 sums of shorter values none overflows
        yield values if good.all() else values[good]


class _OneThread:
    """Holds the BLAS, which the whole process shares, to one thread until the last of all who ask for it is done."""

    def __init__(self) -> None:
        self._lock, self._asking = threading.Lock(), 0
        self._limits: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._asking:
                self._limits = _blas().limit(limits=1)
            self._asking += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._asking -= 1
            if not self._asking:
                self._limits.restore_original_limits()


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")  # found once: it takes milliseconds


_one_thread = _OneThread()
