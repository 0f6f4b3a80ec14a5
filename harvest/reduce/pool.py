"""One row per document out of its rows: running sums that end with their document, whatever blocks it falls into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

PIECE_BYTES = 8 << 20
"""Of float64 at a time: a sort window would be four times its own size."""
SHORT = 16
"""Rows of a document, on average, below which all documents are added to at once: a call for each costs more."""

Pooled = Mapping[str, np.ndarray]
"""Pool -> float32 or float64 [k, d], k documents one after the other."""


class DocumentPool:
    """The pools of one name: `mean` (float64 sums in row order), `last` and `max`, given out as float32 or float64.

    Only the document that is still open is held, so memory does not grow with its length, and the bits do not depend
    on where blocks are cut. A value that is no number makes the mean and the maximum of its document none, too.
    """

    def __init__(self, pools: Sequence[str], width: int, dtype: type[np.floating[Any]] = np.float32) -> None:
        """`dtype` of what is given out; the sums are float64."""
        self._pools, self._width, self._dtype = tuple(pools), width, dtype
        self._document: int | None = None
        self._open: dict[str, np.ndarray] = {}
        self._rows = 0

    def update(self, rows: torch.Tensor, document: np.ndarray) -> Iterator[Pooled]:
        """The documents that have ended, a few at a time; the iterator must be used up before the next call.

        `rows` [n, d], of any float dtype; `document` int64 [n], rising: of the rows behind those of the last call.
        """
        step = max(1, PIECE_BYTES // (8 * self._width))
        for start in range(0, len(rows), step):
            yield from self._piece(rows[start : start + step], document[start : start + step])

    def finish(self) -> Iterator[Pooled]:
        """The document that was still open, if any."""
        if self._rows:
            yield {pool: self._given(pool, value[None], self._rows) for pool, value in self._open.items()}
        self._document, self._open, self._rows = None, {}, 0

    def _piece(self, rows: torch.Tensor, document: np.ndarray) -> Iterator[Pooled]:
        values: np.ndarray = rows.to(torch.float64).numpy()
        starts = np.flatnonzero(np.diff(document, prepend=document[0] - 1))
        lengths = np.diff(starts, append=len(values))
        if self._document != document[0]:
            yield from self.finish()
        counts = lengths.copy()
        counts[0] += self._rows
        found = {pool: _pooled(pool, values, starts, lengths, self._open.get(pool)) for pool in self._pools}
        self._open = {pool: value[-1].copy() for pool, value in found.items()}
        self._document, self._rows = int(document[-1]), int(counts[-1])
        if len(starts) > 1:
            yield {pool: self._given(pool, value[:-1], counts[:-1, None]) for pool, value in found.items()}

    def _given(self, pool: str, value: np.ndarray, count: int | np.ndarray) -> np.ndarray:
        given: np.ndarray = (value / count if pool == "mean" else value).astype(self._dtype)
        return given


def _pooled(
    pool: str, values: np.ndarray, starts: np.ndarray, lengths: np.ndarray, carried: np.ndarray | None
) -> np.ndarray:
    """float64 [k, d] of k stretches of values [n, d], row after row; the first goes on from `carried` [d]."""
    found: np.ndarray
    if pool == "last":
        found = values[starts + lengths - 1]
        return found
    join = np.add if pool == "mean" else np.maximum
    found, done = values[starts], 1
    with np.errstate(invalid="ignore"):  # infinities are the model's; the sums show them
        if carried is not None:
            found[0] = join(carried, found[0])
        while len(values) < SHORT * len(starts) and done < 4 * SHORT and (lengths > done).any():
            more = np.flatnonzero(lengths > done)
            found[more] = join(found[more], values[starts[more] + done])
            done += 1
        for i in np.flatnonzero(lengths > done).tolist():
            rest = values[starts[i] + done : starts[i] + lengths[i]]
            found[i] = join.reduce(np.concatenate([found[i : i + 1], rest]), axis=0)
    return found
