"""States seen from a context: of two rows of a document, what the one has along the other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from harvest.reduce.pool import Pooled
from harvest.reduce.weighted import norms


class Projection:
    """(s.c / c.c) c of every example, whose rows s and c come one after the other, in the order of the document.

    In float64, with c taken at length 1 first, so that no small c is swallowed. A context of zeros has no direction:
    its example is NaN, as is one with a NaN in either row.
    """

    def __init__(self, width: int, context_first: np.ndarray) -> None:
        """`context_first` bool [examples]: whether c is the first row of each example that has rows."""
        self._context_first, self._given = context_first, 0
        self._open = torch.zeros(0, width, dtype=torch.float64)
        """The first row of an example whose second one is still to come."""

    def update(self, rows: torch.Tensor, document: np.ndarray) -> Iterator[Pooled]:
        """The examples float64 [k, d] that are complete with these rows [n, d] of any float dtype."""
        del document  # two rows make an example, wherever blocks are cut
        every = torch.cat([self._open, rows.to(torch.float64)])
        count = len(every) // 2
        self._open = every[2 * count :].clone()
        first = self._context_first[self._given : self._given + count, None]
        self._given += count
        if count:
            one, other = (every[side : 2 * count : 2].numpy() for side in (0, 1))
            yield {"projection": along(np.where(first, other, one), np.where(first, one, other))}

    def finish(self) -> Iterator[Pooled]:
        """Nothing: both rows of an example are in one document."""
        return iter(())


def along(states: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    """float64 [n, d]: what every state float64 [n, d] has along its context; NaN where that is zero."""
    length = norms(contexts)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        unit = contexts / np.where(length > 0, length, np.nan)
        found: np.ndarray = np.einsum("ij,ij->i", states, unit)[:, None] * unit
    return found
