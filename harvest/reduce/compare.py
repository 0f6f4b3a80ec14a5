"""Directions beside each other: agreement of modes, the best name by training examples alone, the shuffled control."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from harvest.reduce.concepts import Concepts
from harvest.reduce.direction import SUMS, Direction, of_sums
from harvest.reduce.evaluate import auroc
from harvest.reduce.examples import Examples
from harvest.reduce.fitted import fit
from harvest.reduce.labels import A, B, make_labels
from harvest.reduce.logistic import FOLDS, fold_indices

SHUFFLES = 20
UNTURNED = ("single_group", "paired_rejection")
"""Modes that swapped labels do not turn round: both lean towards the mean of all rows, whatever the labels say, so that
shuffled ones need not land at 0.5 and prove nothing."""


def cosines(directions: Mapping[str, Direction]) -> dict[tuple[str, str], float]:
    """(one, other) -> cosine of their vectors, for every two that are defined, in the order given."""
    defined = [(name, d.vector) for name, d in directions.items() if d.vector is not None]
    return {(one, other): float(u @ v) for i, (one, u) in enumerate(defined) for other, v in defined[i + 1 :]}


def refit(examples: Examples, mode: str) -> Direction:
    """The direction of any mode out of the examples alone; examples without a partner are left to the mode."""
    if mode not in SUMS:
        return fit(examples, mode, unmatched="count")
    pairs = None
    if examples.paired:
        # Pairs by their place; an example without a partner gets a key of its own
        pairs = -1 - np.arange(len(examples))
        pairs[examples.a] = pairs[examples.b] = np.arange(len(examples.a))
    labels = make_labels(examples.group, examples.weight, pairs, rows=len(examples))
    sums = Concepts()
    state = sums.update(sums.zero(), torch.from_numpy(examples.states), labels)
    return of_sums(state, mode, unmatched="count")


def cross_validated(training: Examples, mode: str) -> float | None:
    """Mean AUROC over folds of the training examples, each judged by a direction made from the others.

    None where the folds cannot be made or no direction is defined. No held-out example is looked at.
    """
    found = []
    for others, fold in fold_indices(training, FOLDS):
        direction = refit(training.take(others), mode)
        if direction.vector is not None:
            found.append(auroc(training.states[fold] @ direction.vector, training.group[fold]))
    return float(np.mean(found)) if found else None


def best_name(scores: Mapping[str, float | None]) -> str | None:
    """The name with the highest score, the first of equals; None where none has one."""
    known = {name: score for name, score in scores.items() if score is not None}
    return max(known, key=lambda name: known[name]) if known else None


def shuffled_control(
    training: Examples, held_out: Examples, mode: str, *, seed: int = 0, shuffles: int = SHUFFLES
) -> tuple[float, float] | None:
    """(mean, standard error) of the held-out AUROC of directions made with shuffled labels: 0.5 unless labels leak.

    None for a mode of UNTURNED, where no shuffle gives a direction, and where a group held out is empty.
    """
    if mode in UNTURNED:
        return None
    random = np.random.Generator(np.random.PCG64(seed))
    found = []
    for _ in range(shuffles):
        mixed = training.take(np.arange(len(training)), shuffled(training, random))
        direction = refit(mixed, mode)
        if direction.vector is not None:
            found.append(auroc(held_out.states @ direction.vector, held_out.group))
    if not found or not np.isfinite(found).all():
        return None
    return float(np.mean(found)), float(np.std(found) / np.sqrt(len(found)))


def shuffled(examples: Examples, random: np.random.Generator) -> np.ndarray:
    """int8 [n]: groups dealt anew. Units of both groups are turned or not, the others exchange theirs."""
    unit = examples.unit
    units, number = np.unique(unit, return_inverse=True)
    has = [np.bincount(number[examples.group == g], minlength=len(units)) > 0 for g in (A, B)]
    both = has[A] & has[B]
    turned = both & (random.random(len(units)) < 0.5)
    group = np.where(turned[number], 1 - examples.group, examples.group)
    single = np.flatnonzero(~both)
    dealt = np.zeros(len(units), np.int8)
    dealt[single] = random.permutation(np.where(has[A][single], A, B))
    found: np.ndarray = np.where(both[number], group, dealt[number]).astype(np.int8)
    return found
