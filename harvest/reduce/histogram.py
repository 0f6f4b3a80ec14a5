"""A histogram of positive numbers whose bin edges never depend on the data, so that counts just add up.

Bins are the upper bits of the float64 pattern: 64 to every factor of two, over the whole range of float64. A bin is
at most 1/64 wide relative to its lower edge, so its middle is within 0.8 % of everything in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BITS_BELOW = 46
"""Of the 52 bits of a float64's fraction, those that a bin does not look at; 6 are left: 64 bins to an octave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts of the bins from the first used one to the last."""

    first: int
    """Number of the first bin in `counts`; 0 when there is none."""
    counts: np.ndarray
    """int64 [k]"""


EMPTY = Histogram(first=0, counts=np.zeros(0, np.int64))


def histogram_of(values: np.ndarray) -> Histogram:
    """The histogram of positive finite float64 values [n]."""
    if len(values) == 0:
        return EMPTY
    bins = values.view(np.int64) >> BITS_BELOW
    first = int(bins.min())
    return Histogram(first=first, counts=np.bincount(bins - first).astype(np.int64))


def add(one: Histogram, two: Histogram) -> Histogram:
    """Counts of both; exact, so the order never matters."""
    if not len(one.counts) or not len(two.counts):
        return one if len(one.counts) else two
    first = min(one.first, two.first)
    stop = max(one.first + len(one.counts), two.first + len(two.counts))
    counts = np.zeros(stop - first, np.int64)
    for part in (one, two):
        counts[part.first - first : part.first - first + len(part.counts)] += part.counts
    return Histogram(first=first, counts=counts)


def quantile(histogram: Histogram, zeros: int, share: float) -> float:
    """The value that at least `share` of `zeros` zeros and the counted values do not exceed, within 0.8 %."""
    total = zeros + int(histogram.counts.sum())
    if total == 0:
        return float("nan")
    rank = max(1, int(np.ceil(share * total)))
    if rank <= zeros:
        return 0.0
    at = int(np.searchsorted(np.cumsum(histogram.counts), rank - zeros))
    return float(np.mean(_edges(histogram.first + at)))


def count_above(histogram: Histogram, bound: float) -> int:
    """Values in bins that lie wholly above the bound (positive, or 0 for all)."""
    at = (int(np.float64(bound).view(np.int64)) >> BITS_BELOW) + 1 - histogram.first
    return int(histogram.counts[max(0, at) :].sum())


def _edges(number: int) -> np.ndarray:
    return np.array([number << BITS_BELOW, (number + 1) << BITS_BELOW], np.int64).view(np.float64)
