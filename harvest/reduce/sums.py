"""Sums over a set of rows, made block by block in one core's cache and merged by Chan's formula, all in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from harvest.reduce import histogram
from harvest.reduce.histogram import Histogram
from harvest.reduce.scripted import scripted

BLOCK_VALUES = {"cpu": 2**15 - 1, "cuda": 2**24}
"""Values of a block. On a CPU its float64 copy (256 KiB) stays in the cache through all passes, and one value more
would wake torch's thread pool for each of them: beside a forward that uses all cores that is 20 to 400 times slower."""
SHORT = (torch.bfloat16, torch.float16)
"""Values of 16 bits, whose squares leave a float64 room to be added up exactly."""
BLOCKS_AT_ONCE = 64
"""Blocks that are merged in one go: bounds what wide rows hold in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSums:
    """Sums over a set of rows; `finite` rows unless said otherwise."""

    rows: int
    """Finite rows: those that the sums are over."""
    mean: np.ndarray
    """float64 [d]; [0] before the first row, when no width is known."""
    m2: np.ndarray
    """float64 [d]: summed squared deviations from the mean."""
    norm_sum: float
    norm_squares: float
    """Sum of squared norms."""
    norm_min: float
    norm_max: float
    low: float
    """Smallest value of any row and column."""
    high: float
    norms: Histogram
    """Of the norms that are not zero."""
    zero_rows: int
    """Rows that are zero throughout."""
    non_finite_rows: int
    """Rows left out."""
    non_finite_values: int
    """NaN and infinite values in them."""


ADDED = ("rows", "norm_sum", "norm_squares", "zero_rows", "non_finite_rows", "non_finite_values")
NOTHING = RowSums(
    rows=0,
    mean=np.zeros(0),
    m2=np.zeros(0),
    norm_sum=0.0,
    norm_squares=0.0,
    norm_min=np.inf,
    norm_max=-np.inf,
    low=np.inf,
    high=-np.inf,
    norms=histogram.EMPTY,
    zero_rows=0,
    non_finite_rows=0,
    non_finite_values=0,
)


def sums_of(rows: torch.Tensor, index: np.ndarray) -> RowSums:
    """Sums over the rows [n, d] at the rising int64 indices."""
    step = max(1, BLOCK_VALUES.get(rows.device.type, BLOCK_VALUES["cpu"]) // max(1, rows.shape[1]))
    total = NOTHING
    for start in range(0, len(index), step * BLOCKS_AT_ONCE):
        total = merge(total, _sums_of_part(rows, index[start : start + step * BLOCKS_AT_ONCE], step))
    return total


def _sums_of_part(rows: torch.Tensor, index: np.ndarray, step: int) -> RowSums:
    sums = _block_sums(rows, index, step)
    if np.isfinite(sums.low) and np.isfinite(sums.high):
        return sums.moments()
    finite = torch.isfinite(rows.index_select(0, torch.from_numpy(index).to(rows.device)))
    good = index[finite.all(dim=1).cpu().numpy()]
    return replace(
        _block_sums(rows, good, step).moments() if len(good) else NOTHING,
        non_finite_rows=len(index) - len(good),
        non_finite_values=finite.numel() - int(finite.sum()),
    )


@dataclass(frozen=True, slots=True)
class _BlockSums:
    """What one pass over the blocks leaves: k blocks, n rows, d columns."""

    counts: np.ndarray
    """float64 [k]"""
    sums: np.ndarray
    """float64 [k, d]"""
    squares: np.ndarray
    """float64 [k, d]: of deviations from the block's mean, or of the values where these are short."""
    short: bool
    norms: np.ndarray
    """float64 [n]"""
    low: float
    high: float

    def moments(self) -> RowSums:
        """All blocks merged at once."""
        if self.short:
            mean, m2 = centred(self.sums.sum(axis=0), self.squares.sum(axis=0), len(self.norms))
        else:
            mean, m2 = _merged(self.counts, self.sums / self.counts[:, None], self.squares)
        above_zero = self.norms[self.norms > 0]
        return RowSums(
            rows=len(self.norms),
            mean=mean,
            m2=m2,
            norm_sum=float(self.norms.sum()),
            norm_squares=float(np.square(self.norms).sum()),
            norm_min=float(self.norms.min()),
            norm_max=float(self.norms.max()),
            low=self.low,
            high=self.high,
            norms=histogram.histogram_of(above_zero),
            zero_rows=len(self.norms) - len(above_zero),
            non_finite_rows=0,
            non_finite_values=0,
        )


def _block_sums(rows: torch.Tensor, index: np.ndarray, step: int) -> _BlockSums:
    n, count = len(index), -(-len(index) // step)
    counts = np.full(count, float(step))
    counts[-1] = n - step * (count - 1)
    short = rows.dtype in SHORT
    visit = scripted(visit_blocks, rows.device)
    *found, low, high = visit(rows, torch.from_numpy(index).to(rows.device), step, not short)
    sums, squares, norms = (part.cpu().numpy() for part in found)
    return _BlockSums(counts, sums, squares, short, norms, float(low), float(high))


def _merged(counts: np.ndarray, means: np.ndarray, m2s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and m2 [d] of k blocks: Chan's formula for many parts."""
    weights = counts / counts.sum()
    # Around the first block's mean, so that a large common offset costs no digits.
    # Plain sums and no matrix products: those wake the threads of the BLAS, whose number would show in the bits.
    mean = means[0] + (weights[:, None] * (means - means[0])).sum(axis=0)
    return mean, m2s.sum(axis=0) + (counts[:, None] * (means - mean) ** 2).sum(axis=0)


def visit_blocks(
    rows: torch.Tensor, index: torch.Tensor, step: int, centre: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One visit to every block of `step` of the rows [n, d] at the rising int64 indices [k].

    Sums and sums of squares of each block (float64 [blocks, d]), norms (float64 [k]), and the smallest and largest
    value, NaN where a block holds one. `centre`: squares of deviations from the block's mean, and not of the values.
    Nothing overflows on the way: float64 holds the square of every float32.
    """
    n, d = index.size(0), rows.size(1)
    count = (n + step - 1) // step
    first, last = int(index[0]), int(index[-1])
    whole = last - first + 1 == n  # without a gap, as it mostly is: blocks are views
    rows = rows[first : last + 1] if whole else rows
    wide = torch.empty([min(step, n), d], dtype=torch.float64, device=rows.device)
    norms = torch.empty([n], dtype=torch.float64, device=rows.device)
    sums = torch.empty([count, d], dtype=torch.float64, device=rows.device)
    squares = torch.empty([count, d], dtype=torch.float64, device=rows.device)
    lows = torch.empty([count], dtype=rows.dtype, device=rows.device)
    highs = torch.empty([count], dtype=rows.dtype, device=rows.device)
    for i in range(count):
        start, stop = i * step, min(n, (i + 1) * step)
        block = rows[start:stop] if whole else torch.index_select(rows, 0, index[start:stop])
        x = wide[: stop - start]
        x.copy_(block)
        low, high = torch.aminmax(block)
        lows[i], highs[i] = low, high
        torch.sum(x, [0], False, out=sums[i])
        if centre:
            torch.norm(x, 2, [1], False, out=norms[start:stop])
            x.sub_(sums[i] / (stop - start))
        x.square_()
        torch.sum(x, [0], False, out=squares[i])
        if not centre:
            torch.sum(x, [1], False, out=norms[start:stop])
    return sums, squares, norms if centre else norms.sqrt_(), lows.min(), highs.max()


def centred(sums: np.ndarray, squares: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and summed squared deviations [d] of n values of 16 bits, from their sums and the sums of their squares.

    The deviations are (n * squares - sums^2) / n with both products carried to 106 bits, so no common offset costs a
    digit: squares have 16 bits (22 of float16), so a float64 adds up thousands of them exactly unless a column spans
    more than 2^9. Where it spans more, the deviations are an eighth of its largest square or more: at most a factor of
    8n cancels, of a sum that is right to some 2^-50.
    """
    left, left_rest = _product(np.full(len(sums), float(n)), squares)
    right, right_rest = _product(sums, sums)
    return sums / n, np.maximum((left - right) + (left_rest - right_rest), 0.0) / n


def _product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a * b as a rounded product and what rounding left out of it, which is exact (Dekker, 1971)."""
    product = a * b
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    return product, a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _halves(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The upper 26 bits of float64 values, and the others (Veltkamp)."""
    spread = a * 134217729.0  # 2^27 + 1
    high = spread - (spread - a)
    return high, a - high


def merge(a: RowSums, b: RowSums) -> RowSums:
    """Chan's formula; the part without rows leaves the other's sums untouched, bit for bit."""
    if a.rows and b.rows and len(a.mean) != len(b.mean):
        raise ValueError(f"moments of rows of width {len(a.mean)} and {len(b.mean)} do not merge")
    mean, m2 = (a.mean, a.m2) if a.rows else (b.mean, b.m2)
    if a.rows and b.rows:
        delta, share = b.mean - a.mean, b.rows / (a.rows + b.rows)
        mean, m2 = a.mean + delta * share, a.m2 + b.m2 + delta * delta * (a.rows * share)
    return RowSums(
        mean=mean,
        m2=m2,
        norm_min=min(a.norm_min, b.norm_min),
        norm_max=max(a.norm_max, b.norm_max),
        low=min(a.low, b.low),
        high=max(a.high, b.high),
        norms=histogram.add(a.norms, b.norms),
        **{name: getattr(a, name) + getattr(b, name) for name in ADDED},
    )
