"""Weighted means of rows with their spread: float64, merged by Chan's formula, so that a large offset costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from harvest.errors import RequestError

BLOCK_VALUES = 2**15 - 1
"""Values turned to float64 at a time: in one core's cache, and below what would wake torch's threads (sums.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedRows:
    """Sums over rows x [d] with weights w."""

    rows: int
    """Rows, those of weight 0 included."""
    weight: float
    """Sum of w."""
    squares: float
    """Sum of w^2."""
    mean: np.ndarray
    """float64 [d]: sum of w x over sum of w; zeros while the weight is 0, [0] before the first row."""
    spread: float
    """Sum of w |x - mean|^2."""

    @property
    def rows_norm(self) -> float:
        """Root of the mean squared norm of the rows: what their rounding is judged by; 0 without weight."""
        if not self.weight:
            return 0.0
        return float(np.hypot(norm(self.mean), np.sqrt(self.spread / self.weight)))

    @property
    def effective(self) -> float:
        """How many equal rows say as much about the mean: weight^2 / squares; 0 without weight."""
        if not self.squares:  # 0 already where the weights are below 1e-162
            return float(self.rows) if self.weight else 0.0
        return self.weight / self.squares * self.weight

    @property
    def error(self) -> float:
        """Standard error of the mean, as the length of a vector; 0 where fewer than two rows tell."""
        return float(np.sqrt(self.spread / self.weight / self.effective)) if self.weight else 0.0


NOTHING = WeightedRows(rows=0, weight=0.0, squares=0.0, mean=np.zeros(0), spread=0.0)


def weighted(rows: torch.Tensor, index: np.ndarray, weight: np.ndarray) -> WeightedRows:
    """Sums over the rows [n, d] at the int64 indices [k], which weigh float64 [k]."""
    total = NOTHING
    for at, x in blocks(rows, index):
        total = merge(total, weighted_block(x, weight[at]))
    return total


def blocks(rows: torch.Tensor, index: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """(which of the indices, their rows as float64 [k, d]), a cacheful at a time; exact from every float dtype."""
    step = max(1, BLOCK_VALUES // max(1, rows.shape[1]))
    for start in range(0, len(index), step):
        part = index[start : start + step]
        first, last = int(part[0]), int(part[-1])
        whole = last - first + 1 == len(part) and bool((np.diff(part) == 1).all())
        taken = rows[first : last + 1] if whole else torch.index_select(rows, 0, torch.from_numpy(part))
        yield slice(start, start + len(part)), taken.to(torch.float64).numpy()


def weighted_block(x: np.ndarray, weight: np.ndarray) -> WeightedRows:
    """Sums over a few rows float64 [n, d] at once."""
    return weighted_stack(x[None], weight)[0]


def weighted_stack(x: np.ndarray, weight: np.ndarray) -> list[WeightedRows]:
    """Sums over a few rows float64 [k, n, d] at each of k names, which weigh the same everywhere."""
    total, (_, n, d) = float(weight.sum()), x.shape
    if not total:
        return [WeightedRows(rows=n, weight=0.0, squares=0.0, mean=np.zeros(d), spread=0.0) for _ in x]
    # einsum and no matrix product: the threads of a BLAS would show in the bits
    means = np.einsum("i,kij->kj", weight, x) / total
    away = x - means[:, None]
    spreads = (weight * np.einsum("kij,kij->ki", away, away)).sum(axis=1)
    squares = float((weight * weight).sum())
    return [
        WeightedRows(rows=n, weight=total, squares=squares, mean=mean.copy(), spread=spread)
        for mean, spread in zip(means, spreads.tolist())
    ]


def merge(a: WeightedRows, b: WeightedRows) -> WeightedRows:
    """Chan's formula; a part without weight leaves the other's mean untouched, bit for bit."""
    if a.rows and b.rows and len(a.mean) != len(b.mean):
        raise RequestError(f"states: rows of {len(a.mean)} and of {len(b.mean)} values do not add up")
    mean, spread = (a.mean, a.spread) if a.weight or not b.rows else (b.mean, b.spread)
    if a.weight and b.weight:
        delta, share = b.mean - a.mean, b.weight / (a.weight + b.weight)
        mean = a.mean + delta * share
        spread = a.spread + b.spread + float(np.einsum("i,i->", delta, delta)) * (a.weight * share)
    return WeightedRows(
        rows=a.rows + b.rows,
        weight=a.weight + b.weight,
        squares=a.squares + b.squares,
        mean=mean,
        spread=spread,
    )


def usable(rows: torch.Tensor) -> np.ndarray:
    """bool [n]: rows [n, d] without a NaN or an infinity."""
    good = np.ones(len(rows), bool)
    with np.errstate(over="ignore", invalid="ignore"):
        for at, x in blocks(rows, np.arange(len(rows))):
            good[at] = np.isfinite(np.einsum("ij->i", x))
    odd = np.flatnonzero(~good)  # a sum may also be infinite because it overflows
    good[odd] = torch.isfinite(rows[torch.from_numpy(odd)]).all(dim=1).numpy()
    return good


def norm(vector: np.ndarray) -> float:
    """Length of float64 [d], right even where the squares would overflow or vanish."""
    return float(norms(vector[None])[0]) if len(vector) else 0.0


def norms(x: np.ndarray) -> np.ndarray:
    """Lengths of the rows float64 [..., d], as float64 [...]."""
    scale = np.abs(x).max(axis=-1, initial=0.0)
    unit = x / np.where(scale > 0, scale, 1.0)[..., None]
    found: np.ndarray = scale * np.sqrt(np.einsum("...j,...j->...", unit, unit))
    return found
