"""Logistic regression by scikit-learn, its regularisation chosen by cross-validation that never splits a pair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from harvest.errors import RequestError
from harvest.reduce.examples import Examples
from harvest.reduce.labels import A, B

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Values of scikit-learn's C that are tried; ties go to the smaller."""
FOLDS = 5
ITERATIONS = 2000
TOLERANCE = 1e-8
"""At scikit-learn's own 1e-4 the direction is off by 1e-3; this costs a third more time."""


def logistic(examples: Examples) -> tuple[np.ndarray | None, dict[str, float], str]:
    """(coefficients float64 [d] in the units of the states, what was found, why there are none).

    Columns are standardised first: the penalty would else fall on all but the massive ones. The C that is chosen has
    the least weighted log loss over `FOLDS` folds of whole pairs or documents. RequestError without scikit-learn.
    """
    regression = _regression()
    with threadpool_limits(limits=1):  # again: scikit-learn has brought libraries of its own
        return _fit(examples, regression)


def _fit(examples: Examples, regression: Any) -> tuple[np.ndarray | None, dict[str, float], str]:
    share = examples.weight / examples.weight.sum()
    centre = share @ examples.states
    scale = np.sqrt(share @ (examples.states - centre) ** 2)
    columns = (examples.states - centre) / np.where(scale > 0, scale, 1.0)
    folds = list(fold_indices(examples, FOLDS))
    if not folds:
        return None, {}, "too few examples to choose a regularisation: both groups need two pairs or documents"
    target = (examples.group == A).astype(np.int64)
    losses = []
    for strength in STRENGTHS:
        loss = weight = 0.0
        for fit, judge in folds:
            model = regression(C=strength, max_iter=ITERATIONS, tol=TOLERANCE).fit(
                columns[fit], target[fit], sample_weight=examples.weight[fit]
            )
            margin = model.decision_function(columns[judge]) * np.where(target[judge], 1, -1)
            loss += float(examples.weight[judge] @ np.logaddexp(0, -margin))
            weight += float(examples.weight[judge].sum())
        losses.append(loss / weight)
    best = STRENGTHS[int(np.argmin(losses))]
    model = regression(C=best, max_iter=ITERATIONS, tol=TOLERANCE).fit(columns, target, sample_weight=examples.weight)
    vector = np.where(scale > 0, model.coef_[0] / np.where(scale > 0, scale, 1.0), 0.0)
    if not vector.any():
        return None, {}, "every coefficient is zero"
    intercept = float(model.intercept_[0] - vector @ centre)
    return vector, {"C": best, "intercept": intercept, "log_loss": min(losses)}, ""


def fold_indices(examples: Examples, folds: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(the others, a fold) as rising indices: whole units, dealt out in dataset order; both sides hold both groups.

    At most `folds`, fewer where a group has fewer units of some weight; none where a group has only one.
    """
    heavy = examples.weight > 0
    of_group = [np.unique(examples.unit[heavy & (examples.group == group)]) for group in (A, B)]
    count = min(folds, *(len(units) for units in of_group))
    if count < 2:
        return
    # The rarer group is dealt first, so that every fold has some of it; units of both groups are dealt once
    number: dict[int, int] = {}
    for units in sorted(of_group, key=len):
        first = _first_places(examples.unit, units)
        new = [unit for unit in units[np.argsort(first)].tolist() if unit not in number]
        for i, unit in enumerate(new):
            number[unit] = i % count
    fold = np.array([number.get(unit, -1) for unit in examples.unit.tolist()])
    for i in range(count):
        judge = fold == i
        groups = [set(examples.group[heavy & part].tolist()) for part in (judge, ~judge)]
        if groups == [{A, B}, {A, B}]:
            yield np.flatnonzero(~judge), np.flatnonzero(judge)


def _first_places(unit: np.ndarray, units: np.ndarray) -> np.ndarray:
    found, first = np.unique(unit, return_index=True)
    places: np.ndarray = first[np.searchsorted(found, units)]
    return places


def _regression() -> Any:
    try:
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise RequestError(
            "mode = 'logistic': needs scikit-learn, which is not installed; pip install 'harvest[logistic]'"
        ) from None
    return LogisticRegression
