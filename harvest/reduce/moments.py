"""Moments of every name in one pass: mean, variance, norms and extremes in float64, with and without special tokens.

Rows with a NaN or an infinity are left out of everything and counted. Deviations are taken from the mean of small
blocks and merged by Chan's formula: a mean of 1,000 costs the variance no digits, as E[x^2] - mean^2 would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from harvest.reduce import histogram
from harvest.reduce.base import Block
from harvest.reduce.histogram import Histogram

BLOCK_VALUES = {"cpu": 2**15 - 1, "cuda": 2**24}
"""Values of a block. On a CPU its float64 copy (256 KiB) stays in the cache through all passes, and one value more
would wake torch's thread pool for each of them: beside a forward that uses all cores that is 20 to 400 times slower."""
BLOCKS_AT_ONCE = 64
"""Blocks that are merged in one go: bounds what wide rows hold in memory."""
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
HIGH_NORM = 10.0
"""A row counts as one of high norm beyond this many medians."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMoments:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentsState:
    """Rows of ordinary and of special tokens are summed apart, so that either can be asked for."""

    ordinary: RowMoments
    special: RowMoments

    @property
    def non_finite_values(self) -> int:
        """NaN and infinite values seen."""
        return self.ordinary.non_finite_values + self.special.non_finite_values

    @property
    def zero_rows(self) -> int:
        """Rows seen that are zero throughout."""
        return self.ordinary.zero_rows + self.special.zero_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStatistics:
    """What is known of a set of rows. With no finite row every number that is not a count is NaN."""

    count: int
    """Finite rows; all that follows but the last two is over these."""
    mean: np.ndarray
    """float64 [d]"""
    variance: np.ndarray
    """float64 [d], of the population (divided by count)."""
    mean_norm: float
    mean_squared_norm: float
    norm_quantiles: Mapping[float, float]
    """Share -> norm, within 0.8 %: from a histogram with fixed bins."""
    norm_min: float
    norm_max: float
    high_norm_share: float
    """Share of rows with a norm beyond ten medians (attention sinks)."""
    min: float
    """Smallest single value."""
    max: float
    zero_rows: int
    """Rows that are zero throughout."""
    non_finite_rows: int
    """Rows left out for a NaN or an infinity in them."""
    non_finite: int
    """NaN and infinite values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameStatistics(RowStatistics):
    """Statistics of a name over all its rows, and over those of ordinary tokens alone."""

    ordinary: RowStatistics
    """Without special tokens."""

    @property
    def all(self) -> RowStatistics:
        """With special tokens: itself."""
        return self


NOTHING = RowMoments(
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
FLOATS = ("norm_sum", "norm_squares", "norm_min", "norm_max", "low", "high")
COUNTS = ("rows", "zero_rows", "non_finite_rows", "non_finite_values")


class Moments:
    """The reduction `moments`."""

    kind = "moments"
    version = 1

    def zero(self) -> MomentsState:
        """The state of no rows."""
        return MomentsState(ordinary=NOTHING, special=NOTHING)

    def update(self, state: MomentsState, block: Block) -> MomentsState:
        """A new state with the block's rows added."""
        ordinary = special = NOTHING
        if not block.special.any():
            ordinary = _moments_of(block.rows, None)
        else:
            ordinary = _moments_of(block.rows, np.flatnonzero(~block.special))
            special = _moments_of(block.rows, np.flatnonzero(block.special))
        return self.merge(state, MomentsState(ordinary=ordinary, special=special))

    def merge(self, first: MomentsState, second: MomentsState) -> MomentsState:
        """The state of both."""
        return MomentsState(
            ordinary=_merge(first.ordinary, second.ordinary), special=_merge(first.special, second.special)
        )

    def finalise(self, state: MomentsState) -> NameStatistics:
        """Statistics of the name."""
        everything = _statistics(_merge(state.ordinary, state.special))
        fields = {name: getattr(everything, name) for name in RowStatistics.__dataclass_fields__}
        return NameStatistics(**fields, ordinary=_statistics(state.ordinary))

    def arrays(self, state: MomentsState) -> dict[str, np.ndarray]:
        """Fields `ordinary.*` and `special.*`: mean and m2 float64 [d], floats float64 [6], counts int64 [4], norms
        int64 [k] from the bin `first` int64 [1] on."""
        arrays = {}
        for part, moments in (("ordinary", state.ordinary), ("special", state.special)):
            arrays[f"{part}.mean"] = moments.mean
            arrays[f"{part}.m2"] = moments.m2
            arrays[f"{part}.floats"] = np.array([getattr(moments, name) for name in FLOATS], np.float64)
            arrays[f"{part}.counts"] = np.array([getattr(moments, name) for name in COUNTS], np.int64)
            arrays[f"{part}.first"] = np.array([moments.norms.first], np.int64)
            arrays[f"{part}.norms"] = moments.norms.counts
        return arrays

    def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> MomentsState:
        """The inverse of `arrays`."""
        parts = {}
        for part in ("ordinary", "special"):
            parts[part] = RowMoments(
                mean=arrays[f"{part}.mean"],
                m2=arrays[f"{part}.m2"],
                norms=Histogram(first=int(arrays[f"{part}.first"][0]), counts=arrays[f"{part}.norms"]),
                **dict(zip(FLOATS, arrays[f"{part}.floats"].tolist(), strict=True)),
                **dict(zip(COUNTS, arrays[f"{part}.counts"].tolist(), strict=True)),
            )
        return MomentsState(**parts)


def _moments_of(rows: torch.Tensor, index: np.ndarray | None) -> RowMoments:
    """Moments of rows [n, d], or of those at the int64 indices alone."""
    picked = None if index is None else torch.from_numpy(index).to(rows.device)
    n, d = len(rows) if picked is None else len(picked), rows.shape[1]
    step = max(1, BLOCK_VALUES.get(rows.device.type, 2**15 - 1) // max(1, d))
    total = NOTHING
    for start in range(0, n, step * BLOCKS_AT_ONCE):
        part = slice(start, start + step * BLOCKS_AT_ONCE)
        if picked is None:
            total = _merge(total, _moments_of_part(rows[part], None, step))
        else:
            total = _merge(total, _moments_of_part(rows, picked[part], step))
    return total


def _moments_of_part(rows: torch.Tensor, picked: torch.Tensor | None, step: int) -> RowMoments:
    sums = _block_sums(rows, picked, step)
    if np.isfinite(sums.low) and np.isfinite(sums.high):
        return sums.moments()
    finite = torch.isfinite(rows if picked is None else rows[picked])
    good = finite.all(dim=1).nonzero()[:, 0]
    moments = NOTHING
    if len(good):
        moments = _block_sums(rows, good if picked is None else picked[good], step).moments()
    return replace(
        moments,
        non_finite_rows=len(finite) - len(good),
        non_finite_values=finite.numel() - int(finite.sum()),
    )


@dataclass(frozen=True, slots=True)
class _BlockSums:
    """What one pass over the blocks leaves: k blocks, n rows, d columns."""

    counts: np.ndarray
    """float64 [k]"""
    means: np.ndarray
    """float64 [k, d]"""
    m2s: np.ndarray
    """float64 [k, d]"""
    norms: np.ndarray
    """float64 [n]"""
    low: float
    high: float

    def moments(self) -> RowMoments:
        """All blocks merged at once: Chan's formula for many parts."""
        weights = self.counts / self.counts.sum()
        # Around the first block's mean, so that a large common offset costs no digits.
        mean = self.means[0] + weights @ (self.means - self.means[0])
        m2 = self.m2s.sum(axis=0) + self.counts @ (self.means - mean) ** 2
        above_zero = self.norms[self.norms > 0]
        return RowMoments(
            rows=len(self.norms),
            mean=mean,
            m2=m2,
            norm_sum=float(self.norms.sum()),
            norm_squares=float(self.norms @ self.norms),
            norm_min=float(self.norms.min()),
            norm_max=float(self.norms.max()),
            low=self.low,
            high=self.high,
            norms=histogram.histogram_of(above_zero),
            zero_rows=len(self.norms) - len(above_zero),
            non_finite_rows=0,
            non_finite_values=0,
        )


def _block_sums(rows: torch.Tensor, picked: torch.Tensor | None, step: int) -> _BlockSums:
    """One visit to every block of `step` rows: to float64, extremes, norms, mean, centre, squares. Nothing
    overflows on the way: float64 holds the square of every float32."""
    n, d = len(rows) if picked is None else len(picked), rows.shape[1]
    count = -(-n // step)
    wide = torch.empty((min(step, n), d), dtype=torch.float64, device=rows.device)
    norms, means, m2s = wide.new_empty(n), wide.new_empty((count, d)), wide.new_empty((count, d))
    lows, highs = rows.new_empty(count), rows.new_empty(count)
    blocks = torch.split(rows, step) if picked is None else (rows[part] for part in torch.split(picked, step))
    views = zip(
        blocks, lows.unbind(), highs.unbind(), torch.split(norms, step), means.unbind(), m2s.unbind(), strict=True
    )
    for block, low, high, norm, mean, m2 in views:
        x = wide[: len(block)]
        x.copy_(block)
        torch.aminmax(block, out=(low, high))
        torch.linalg.vector_norm(x, dim=1, out=norm)
        torch.sum(x, dim=0, out=mean)
        mean.div_(len(block))
        x.sub_(mean)
        x.square_()
        torch.sum(x, dim=0, out=m2)
    sizes = np.full(count, float(step))
    sizes[-1] = n - step * (count - 1)
    lowest, highest = float(lows.min()), float(highs.max())  # NaN where any block holds one
    return _BlockSums(sizes, means.cpu().numpy(), m2s.cpu().numpy(), norms.cpu().numpy(), lowest, highest)


def _merge(a: RowMoments, b: RowMoments) -> RowMoments:
    """Chan's formula; the part without rows leaves the other's sums untouched, bit for bit."""
    if a.rows and b.rows and len(a.mean) != len(b.mean):
        raise ValueError(f"moments of rows of width {len(a.mean)} and {len(b.mean)} do not merge")
    mean, m2 = (a.mean, a.m2) if a.rows else (b.mean, b.m2)
    if a.rows and b.rows:
        delta, share = b.mean - a.mean, b.rows / (a.rows + b.rows)
        mean, m2 = a.mean + delta * share, a.m2 + b.m2 + delta * delta * (a.rows * share)
    return RowMoments(
        mean=mean,
        m2=m2,
        norm_min=min(a.norm_min, b.norm_min),
        norm_max=max(a.norm_max, b.norm_max),
        low=min(a.low, b.low),
        high=max(a.high, b.high),
        norms=histogram.add(a.norms, b.norms),
        **{name: getattr(a, name) + getattr(b, name) for name in ("norm_sum", "norm_squares", *COUNTS)},
    )


def _statistics(moments: RowMoments) -> RowStatistics:
    n = moments.rows
    nan = float("nan")
    median = histogram.quantile(moments.norms, moments.zero_rows, 0.5)
    quantiles = {q: histogram.quantile(moments.norms, moments.zero_rows, q) for q in QUANTILES}
    if n:  # the middle of a bin may lie outside of what was seen
        quantiles = {q: min(max(value, moments.norm_min), moments.norm_max) for q, value in quantiles.items()}
    return RowStatistics(
        count=n,
        mean=moments.mean.copy(),
        variance=moments.m2 / n if n else moments.m2.copy(),
        mean_norm=moments.norm_sum / n if n else nan,
        mean_squared_norm=moments.norm_squares / n if n else nan,
        norm_quantiles={q: min(max(v, moments.norm_min), moments.norm_max) for q, v in quantiles.items()}
        if n
        else quantiles,
        norm_min=moments.norm_min if n else nan,
        norm_max=moments.norm_max if n else nan,
        high_norm_share=histogram.count_above(moments.norms, HIGH_NORM * median) / n if n else nan,
        min=moments.low if n else nan,
        max=moments.high if n else nan,
        zero_rows=moments.zero_rows,
        non_finite_rows=moments.non_finite_rows,
        non_finite=moments.non_finite_values,
    )
