"""Examples made ready for the modes that need the rows themselves: float64, in dataset order, without unusable ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from harvest.reduce.concepts import COARSEST
from harvest.reduce.direction import Counts, lack, same
from harvest.reduce.labels import UNKNOWN, A, B, Labels
from harvest.reduce.weighted import WeightedRows, usable, weighted


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """n usable examples of width d; `ready` makes it."""

    states: np.ndarray
    """float64 [n, d]"""
    group: np.ndarray
    """int8 [n]: 0 is A, 1 is B."""
    weight: np.ndarray
    """float64 [n]"""
    unit: np.ndarray
    """int64 [n]: equal for examples of one pair or document, which are never split between fitting and judging."""
    a: np.ndarray
    """int64 [k]: the A of every complete pair."""
    b: np.ndarray
    """int64 [k]: its B."""
    paired: bool
    counts: Counts
    resolution: float
    """Rounding step of the states' dtype, relative to 1."""
    index: np.ndarray
    """int64 [n], rising: which of those given to `ready` each is."""

    def __len__(self) -> int:
        return len(self.states)

    @property
    def sums(self) -> tuple[WeightedRows, WeightedRows]:
        """Of A and of B."""
        rows = torch.from_numpy(self.states)
        index = [np.flatnonzero(self.group == group) for group in (A, B)]
        return weighted(rows, index[A], self.weight[index[A]]), weighted(rows, index[B], self.weight[index[B]])

    @property
    def obstacle(self) -> str | None:
        """Why the groups cannot be told apart by their means; None where they can."""
        sums = self.sums
        for letter, group in zip("AB", sums):
            if not group.weight:
                return lack(letter, group, self.counts)
        return same(*sums, self.resolution)

    def take(self, index: np.ndarray, group: np.ndarray | None = None) -> Examples:
        """The examples at rising int64 indices, with other groups where they are given (int8, one per index).

        Pairs of which a member is missing are pairs no more; where groups change, they change within whole pairs.
        """
        place = np.full(len(self), -1, np.int64)
        place[index] = np.arange(len(index))
        a, b = place[self.a], place[self.b]
        both = (a >= 0) & (b >= 0)
        a, b = a[both], b[both]
        chosen = self.group[index] if group is None else group
        turned = chosen[a] == B
        return Examples(
            states=self.states[index],
            group=chosen,
            weight=self.weight[index],
            unit=self.unit[index],
            a=np.where(turned, b, a),
            b=np.where(turned, a, b),
            paired=self.paired,
            counts=self.counts,
            resolution=self.resolution,
            index=self.index[index],
        )


def ready(states: torch.Tensor, labels: Labels, unit: np.ndarray | Sequence[int] | None = None) -> Examples:
    """Usable examples out of read states [n, d]; a pair with a member that cannot be used is left out whole.

    `unit` [n]: which examples belong together; without it those of a pair do, else each stands for itself.
    """
    finite, known = usable(states), labels.group != UNKNOWN
    good = finite if labels.right is None else finite & labels.right
    kept = good & known
    dropped = ~(good[labels.a] & good[labels.b])
    kept[labels.a[dropped]] = kept[labels.b[dropped]] = False
    index = np.flatnonzero(kept)
    place = np.full(len(labels), -1, np.int64)
    place[index] = np.arange(len(index))
    group = labels.group[index]
    excluded, wrong = ([int((out & (labels.group == g)).sum()) for g in (A, B)] for out in (~finite, finite & ~good))
    alone = labels.group[labels.alone[good[labels.alone]]].tolist()
    counts = Counts(
        rows=(int((group == A).sum()), int((group == B).sum())),
        weights=(float(labels.weight[index][group == A].sum()), float(labels.weight[index][group == B].sum())),
        pairs=int((~dropped).sum()),
        unmatched=(alone.count(A), alone.count(B)),
        excluded=(excluded[A], excluded[B]),
        wrong=(wrong[A], wrong[B]),
        dropped_pairs=int(dropped.sum()),
        unknown=int((~known).sum()),
    )
    return Examples(
        states=states[torch.from_numpy(index)].to(torch.float64).numpy(),
        group=group,
        weight=labels.weight[index],
        unit=(_units(labels) if unit is None else np.asarray(unit).astype(np.int64))[index],
        a=place[labels.a[~dropped]],
        b=place[labels.b[~dropped]],
        paired=labels.pair is not None,
        counts=counts,
        resolution=min(torch.finfo(states.dtype).eps, COARSEST),
        index=index,
    )


def _units(labels: Labels) -> np.ndarray:
    if labels.pair is None:
        return np.arange(len(labels))
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in labels.pair], np.int64)
