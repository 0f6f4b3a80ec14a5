"""What a direction is worth on examples that it was not made from: figures with intervals, or why there are none.

Examples count once each, whatever they weighed. Intervals come from resampling whole pairs or documents, seeded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harvest.reduce.labels import A, B

LEAST = 5
"""Pairs or documents of each group below which no figure is given."""
RESAMPLES = 1000
CONFIDENCE = 0.95
RESAMPLES_AT_ONCE = 50
"""Bounds the memory: counts of every example in so many resamples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number and where 95 % of its resamples lie."""

    value: float | None = None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.value is None:
            return "-"
        between = "" if self.low is None or self.high is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.value:.2f}{between}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Of one direction on held-out examples."""

    examples: tuple[int, int]
    """Of A and B."""
    reason: str | None = None
    """Why figures are missing; None where there are all."""
    auroc: Figure = Figure()
    """Chance that an A lies further along the vector than a B; ties count half."""
    accuracy: Figure = Figure()
    """Share on their side of the midpoint of the means that the direction was made from."""
    cohens_d: Figure = Figure()
    """Distance of the group means along the vector in pooled standard deviations."""
    explained: Figure = Figure()
    """Share of the states' total variance that lies along the vector; without an interval."""


def evaluate(
    states: np.ndarray,
    group: np.ndarray,
    unit: np.ndarray,
    *,
    vector: np.ndarray | None,
    midpoint: float | None,
    seed: int = 0,
) -> Evaluation:
    """Figures of a vector float64 [d] on states float64 [n, d] that are usable, with group int8 [n] and unit int64 [n].

    `vector` is None where the direction is undefined, `midpoint` where it was made from one group.
    """
    known = (group == A) | (group == B)
    states, group, unit = states[known], group[known], unit[known]
    examples = (int((group == A).sum()), int((group == B).sum()))
    if vector is None:
        return Evaluation(examples=examples, reason="the direction is undefined")
    units = [len(np.unique(unit[group == g])) for g in (A, B)]
    if min(units) < LEAST:
        why = f"too few held out: A {units[A]}, B {units[B]} pairs or documents; at least {LEAST} of each are needed"
        return Evaluation(examples=examples, reason=why)
    along = states @ vector
    figures = {"auroc": _auroc(along, group), "cohens_d": _cohens_d(along, group)}
    if midpoint is not None:
        figures["accuracy"] = _accuracy(along, group, midpoint)
    drawn = resampled(figures, group, unit, seed)
    total = float(states.var(axis=0).sum())
    explained = float(along.var()) / total if total else None
    return Evaluation(
        examples=examples,
        reason=None if midpoint is not None else "no midpoint: the direction was made from A alone",
        explained=Figure(value=explained),
        **{name: _figure(statistic, drawn[name], len(group)) for name, statistic in figures.items()},
    )


Statistic = Callable[[np.ndarray], np.ndarray]
"""From how often each example is drawn, float64 [r, n], to the figure of each resample, float64 [r]; NaN for none."""


def resampled(figures: dict[str, Statistic], group: np.ndarray, unit: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Every figure over RESAMPLES draws of whole units, as many as there are; draws without a group give NaN."""
    _, number = np.unique(unit, return_inverse=True)
    count = int(number.max()) + 1
    random = np.random.Generator(np.random.PCG64(seed))
    found: dict[str, list[np.ndarray]] = {name: [] for name in figures}
    for _ in range(0, RESAMPLES, RESAMPLES_AT_ONCE):
        chosen = random.integers(0, count, (RESAMPLES_AT_ONCE, count))
        chosen += np.arange(RESAMPLES_AT_ONCE)[:, None] * count
        times = np.bincount(chosen.ravel(), minlength=RESAMPLES_AT_ONCE * count).reshape(RESAMPLES_AT_ONCE, count)
        drawn = times[:, number].astype(np.float64)
        for name, statistic in figures.items():
            found[name].append(statistic(drawn))
    return {name: np.concatenate(values) for name, values in found.items()}


def auroc(along: np.ndarray, group: np.ndarray) -> float:
    """Chance that an A of float64 [n] lies above a B, ties counting half; NaN without one of either."""
    return float(_auroc(along, group)(np.ones((1, len(along))))[0])


def _auroc(along: np.ndarray, group: np.ndarray) -> Statistic:
    order = np.argsort(along, kind="stable")
    rising = along[order]
    starts = np.flatnonzero(np.diff(rising, prepend=-np.inf) != 0) if len(rising) else np.zeros(0, np.int64)
    of_a = group[order] == A

    def statistic(times: np.ndarray) -> np.ndarray:
        drawn = times[:, order]
        if not len(starts):
            return np.full(len(times), np.nan)
        a = np.add.reduceat(drawn * of_a, starts, axis=1)  # by value: ties are one
        b = np.add.reduceat(drawn * ~of_a, starts, axis=1)
        below = np.cumsum(b, axis=1) - b / 2
        with np.errstate(invalid="ignore", divide="ignore"):
            share: np.ndarray = (a * below).sum(axis=1) / (a.sum(axis=1) * b.sum(axis=1))
        return share

    return statistic


def _accuracy(along: np.ndarray, group: np.ndarray, midpoint: float) -> Statistic:
    right = np.where(along == midpoint, 0.5, (along > midpoint) == (group == A))

    def statistic(times: np.ndarray) -> np.ndarray:
        share: np.ndarray = (times * right).sum(axis=1) / times.sum(axis=1)
        return share

    return statistic


def _cohens_d(along: np.ndarray, group: np.ndarray) -> Statistic:
    centred = along - along.mean() if len(along) else along  # squares of what is far from 0 would lose digits

    def statistic(times: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            means, squares, degrees = [], 0.0, -2.0
            for g in (A, B):
                drawn = times * (group == g)
                n = drawn.sum(axis=1)
                mean = (drawn * centred).sum(axis=1) / n
                squares = squares + (drawn * (centred - mean[:, None]) ** 2).sum(axis=1)
                degrees = degrees + n
                means.append(mean)
            distance: np.ndarray = (means[A] - means[B]) / np.sqrt(squares / degrees)
        return distance

    return statistic


def _figure(statistic: Statistic, drawn: np.ndarray, n: int) -> Figure:
    value = float(statistic(np.ones((1, n)))[0])
    if not np.isfinite(value):
        return Figure()
    drawn = drawn[np.isfinite(drawn)]
    if not len(drawn):
        return Figure(value=value)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Figure(value=value, low=float(low), high=float(high))
