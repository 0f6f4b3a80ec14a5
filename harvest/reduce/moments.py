"""Moments of every name in one pass: mean, variance, norms and extremes in float64, with and without special tokens.

Rows with a NaN or an infinity are left out of everything and counted. Deviations are taken from the mean of small
blocks and merged by Chan's formula: a mean of 1,000 costs the variance no digits, as E[x^2] - mean^2 would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from harvest import glance
from harvest.reduce import histogram
from harvest.reduce.base import Block
from harvest.reduce.histogram import Histogram
from harvest.reduce.sums import NOTHING, RowSums, merge, sums_of

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
HIGH_NORM = 10.0
"""A row counts as one of high norm beyond this many medians."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentsState:
    """Rows of ordinary and of special tokens are summed apart, so that either can be asked for."""

    ordinary: RowSums
    special: RowSums

    @property
    def non_finite_values(self) -> int:
        """NaN and infinite values seen."""
        return self.ordinary.non_finite_values + self.special.non_finite_values

    @property
    def zero_rows(self) -> int:
        """Rows seen that are zero throughout."""
        return self.ordinary.zero_rows + self.special.zero_rows


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RowStatistics:
    """What is known of a set of rows. With no finite row every number that is not a count is NaN."""

    count: int
    """Finite rows; all that follows but the last two is over these."""
    mean: np.ndarray
    """float64 [d]"""
    variance: np.ndarray
    """float64 [d], of the population (divided by count)."""
    mean_norm: float
    """Mean length of a row."""
    mean_squared_norm: float
    """Mean of the squared lengths."""
    norm_quantiles: Mapping[float, float]
    """Share -> norm, within 0.8 %: from a histogram with fixed bins."""
    norm_min: float
    """Length of the shortest row."""
    norm_max: float
    """Length of the longest."""
    high_norm_share: float
    """Share of rows with a norm beyond ten medians (attention sinks)."""
    min: float
    """Smallest single value."""
    max: float
    """Largest single value."""
    zero_rows: int
    """Rows that are zero throughout."""
    non_finite_rows: int
    """Rows left out for a NaN or an infinity in them."""
    non_finite: int
    """NaN and infinite values."""

    def __repr__(self) -> str:
        """A line; the figures and vectors are in the fields."""
        rows = f"{self.count} rows of width {len(self.mean)}" if self.count else "no finite rows"
        norms = f", norms {self.norm_min:.4g} to {self.norm_max:.4g}, mean {self.mean_norm:.4g}" if self.count else ""
        odd = (("rows of zeros", self.zero_rows), ("rows left out", self.non_finite_rows))
        return f"{type(self).__name__}({rows}{norms}{''.join(f', {n} {what}' for what, n in odd if n)})"

    def _repr_html_(self) -> str:
        return glance.html(type(self).__name__, _side_by_side([self]), note=f"width {len(self.mean)}")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class NameStatistics(RowStatistics):
    """Statistics of a name over all its rows, and over those of ordinary tokens alone."""

    ordinary: RowStatistics
    """Without special tokens."""
    _covariance: Callable[[], np.ndarray] | None = field(default=None, compare=False)

    @property
    def covariance(self) -> np.ndarray | None:
        """float64 [d, d] over all finite rows, of the population; None where the job does not ask for it
        (`statistics.covariance`). Read from the run each time, as it may be large."""
        return None if self._covariance is None else self._covariance()

    @property
    def all(self) -> RowStatistics:
        """With special tokens: itself."""
        return self

    def _repr_html_(self) -> str:
        head, note = ("", "all rows", "without special tokens"), f"width {len(self.mean)}"
        return glance.html("NameStatistics", _side_by_side([self, self.ordinary]), head=head, note=note)


def _side_by_side(statistics: Sequence[RowStatistics]) -> list[tuple[str, ...]]:
    """What each figure is, and its value in each of them."""
    figures = ("mean_norm", "norm_min", "norm_max", "high_norm_share", "min", "max")
    counts = ("zero_rows", "non_finite_rows", "non_finite")
    return [
        ("rows", *(f"{one.count:,}" for one in statistics)),
        *((name.replace("_", " "), *(glance.figure(getattr(one, name)) for one in statistics)) for name in figures),
        ("median norm", *(glance.figure(one.norm_quantiles[0.5]) for one in statistics)),
        *((name.replace("_", " "), *(f"{getattr(one, name):,}" for one in statistics)) for name in counts),
    ]


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
        ordinary = sums_of(block.rows, np.flatnonzero(~block.special))
        special = sums_of(block.rows, np.flatnonzero(block.special))
        return self.merge(state, MomentsState(ordinary=ordinary, special=special))

    def merge(self, first: MomentsState, second: MomentsState) -> MomentsState:
        """The state of both."""
        return MomentsState(
            ordinary=merge(first.ordinary, second.ordinary), special=merge(first.special, second.special)
        )

    def finalise(self, state: MomentsState) -> NameStatistics:
        """Statistics of the name."""
        everything = _statistics(merge(state.ordinary, state.special))
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
            parts[part] = RowSums(
                mean=arrays[f"{part}.mean"],
                m2=arrays[f"{part}.m2"],
                norms=Histogram(first=int(arrays[f"{part}.first"][0]), counts=arrays[f"{part}.norms"]),
                **dict(zip(FLOATS, arrays[f"{part}.floats"].tolist(), strict=True)),
                **dict(zip(COUNTS, arrays[f"{part}.counts"].tolist(), strict=True)),
            )
        return MomentsState(**parts)


REDUCTION = Moments()


def _statistics(moments: RowSums) -> RowStatistics:
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
