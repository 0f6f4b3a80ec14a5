"""Directions out of the examples themselves, in float64 and dataset order: whitened, pca, leace and logistic.

Sums over examples p_i = w_i / sum w, within a group around its mean. The sign always points from B to A.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from threadpoolctl import threadpool_limits

from harvest.reduce.direction import EXAMPLES, Direction, Eraser, defined, refuse_unmatched, undefined
from harvest.reduce.examples import Examples
from harvest.reduce.labels import A
from harvest.reduce.logistic import logistic
from harvest.reduce.weighted import norm

LEAST_SHRINKAGE = 1e-6
"""Keeps the covariance invertible where the estimate says that none is needed."""
TIE = 1e-10
"""Components whose variances differ by less, relative to the larger, have no direction of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A mode's vector, of any length and along the difference of the means, or why there is none."""

    vector: np.ndarray | None = None
    why: str = ""
    found: Mapping[str, float] = field(default_factory=dict)
    eraser: Eraser | None = None


def fit(examples: Examples, mode: str, unmatched: str = "error") -> Direction:
    """The direction of one of EXAMPLES. Raises RequestError for `pca` as `paired_rejection` does.

    whitened: S^-1 (mean A - mean B), S the covariance within the groups, shrunk towards its mean variance by the share
    of Ledoit and Wolf (2004). pca: first component of the pairs' differences, not centred; without pairs, of all rows
    around the middle of the two means, each group weighing half. leace: Belrose et al. (2023); the vector is what it
    removes. logistic: scikit-learn's, see logistic.py.
    """
    assert mode in EXAMPLES, mode
    counts = examples.counts
    why = examples.obstacle
    if why is not None:
        return undefined(mode, why, counts)
    if mode == "pca" and examples.paired:
        refuse_unmatched(mode, counts.unmatched, unmatched)
    # One thread: the number of threads would show in the bits, and two on a busy machine were 10 to 100 times slower
    with threadpool_limits(limits=1):
        found = _FITS[mode](examples)
    if found.vector is None:
        return undefined(mode, found.why, counts)
    a, b = examples.sums
    unit = found.vector / norm(found.vector)
    raw = unit * abs(float(unit @ (a.mean - b.mean)))  # of leace, which removes the means' difference, that itself
    if not norm(raw):
        return undefined(mode, "the groups have the same mean along it", counts)
    given = defined(mode, raw, counts, a=a, b=b)
    return replace(given, fit=dict(found.found), eraser=found.eraser)


def whitened(examples: Examples) -> Fit:
    """Regularised linear discriminant."""
    a, b = examples.sums
    share = examples.weight / examples.weight.sum()
    away = examples.states - np.where((examples.group == A)[:, None], a.mean, b.mean)
    within = (away * share[:, None]).T @ away
    mean_variance = float(np.trace(within)) / len(within)
    if not mean_variance:
        return Fit(why="no spread within the groups to whiten by")
    shrinkage = ledoit_wolf(away, share, within)
    shrunk = (1 - shrinkage) * within
    shrunk[np.diag_indices_from(shrunk)] += shrinkage * mean_variance
    return Fit(vector=np.linalg.solve(shrunk, a.mean - b.mean), found={"shrinkage": shrinkage})


def ledoit_wolf(away: np.ndarray, share: np.ndarray, covariance: np.ndarray) -> float:
    """The shrinkage that Ledoit and Wolf (2004) estimate, between LEAST_SHRINKAGE and 1.

    `away` float64 [n, d] around the mean, `share` [n] adding up to 1, `covariance` [d, d] their weighted covariance.
    """
    mean_variance = float(np.trace(covariance)) / len(covariance)
    squared = float(np.einsum("ij,ij->", covariance, covariance))
    distance = squared - len(covariance) * mean_variance**2
    lengths = np.einsum("ij,ij->i", away, away)
    along = np.einsum("ij,ij->i", away @ covariance, away)
    error = float((share**2 * (lengths**2 - 2 * along + squared)).sum())
    return min(1.0, max(LEAST_SHRINKAGE, error / distance)) if distance > 0 else 1.0


def pca(examples: Examples) -> Fit:
    """First principal component of what tells the groups apart."""
    a, b = examples.sums
    if examples.paired:
        if not len(examples.a):
            return Fit(why="no complete pair")
        away = examples.states[examples.a] - examples.states[examples.b]
        share = (examples.weight[examples.a] + examples.weight[examples.b]) / 2
    else:
        away = examples.states - (a.mean + b.mean) / 2
        share = examples.weight / np.where(examples.group == A, a.weight, b.weight)
    if not share.sum():
        return Fit(why=f"the {len(share)} pairs weigh nothing")
    variances, components = spectrum(away, share / share.sum())
    if len(variances) > 1 and variances[0] - variances[1] <= TIE * variances[0]:
        return Fit(why="its two largest components have the same variance")
    vector = components[0]
    along = float(vector @ (a.mean - b.mean))
    # The component is known to about the root of float64's step where variances differ but little
    if abs(along) <= 1e-8 * norm(a.mean - b.mean):
        return Fit(why="the groups have the same mean along it")
    return Fit(vector=vector * np.sign(along), found={"share": float(variances[0] / variances.sum())})


def spectrum(away: np.ndarray, share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Variances [k], falling, and components [k, d] of rows float64 [n, d] around zero with shares [n]."""
    if len(away) < away.shape[1]:
        _, scales, components = np.linalg.svd(away * np.sqrt(share)[:, None], full_matrices=False)
        return scales**2, components
    # 8,192 rows of 576 values: 0.1 s, against 0.8 s for the singular values
    variances, vectors = np.linalg.eigh((away * share[:, None]).T @ away)
    return variances[::-1], vectors.T[::-1]


def leace(examples: Examples) -> Fit:
    """Least-squares concept erasure: P = W^+ u u^T W with W = C^-1/2 and u along W (mean A - mean B)."""
    a, b = examples.sums
    share = examples.weight / examples.weight.sum()
    mean = (a.mean * a.weight + b.mean * b.weight) / (a.weight + b.weight)
    variances, components = spectrum(examples.states - mean, share)
    # As in the pseudo-inverse of a covariance: what is below its rounding is not there
    kept = variances > variances[0] * max(examples.states.shape) * np.finfo(np.float64).eps
    variances, components = variances[kept], components[kept]
    inside = components @ (a.mean - b.mean)
    whitened_gap = inside / variances
    left = components.T @ inside
    right = components.T @ whitened_gap / float(inside @ whitened_gap)
    eraser = Eraser(left=left[:, None], right=right[None], mean=mean)
    return Fit(vector=left, found={"rank": float(len(variances))}, eraser=eraser)


def _logistic(examples: Examples) -> Fit:
    vector, found, why = logistic(examples)
    return Fit(vector=vector, found=found, why=why)


_FITS: Mapping[str, Callable[[Examples], Fit]] = {
    "whitened": whitened,
    "pca": pca,
    "leace": leace,
    "logistic": _logistic,
}
