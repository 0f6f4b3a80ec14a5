"""What the model would answer: the logits of the job's answers at the end of each of a shard's sequences."""

from __future__ import annotations

import numpy as np

from harvest.records import Batch, ShardAnswers, SortWindow


class ShardLogits:
    """Of S sequences; sort windows come in order."""

    def __init__(self, asked: ShardAnswers, *, rows: int, answers: int) -> None:
        """`rows` captured in the shard; `answers`: how many tokens are asked for at each place."""
        self._asked = asked
        has = np.flatnonzero(asked.row >= 0)
        self._slot = np.full(rows, -1, np.int64)
        self._slot[asked.row[has]] = has
        self._logits = np.full((len(asked.row), answers), np.nan)

    def places(self, batch: Batch, window: SortWindow) -> np.ndarray:
        """int64 [k]: which of a batch's kept tokens the model is asked at."""
        return np.flatnonzero(self._slot[window.first_row + batch.rows] >= 0)

    def take(self, batch: Batch, window: SortWindow, places: np.ndarray, logits: np.ndarray) -> None:
        """float64 [k, answers] at these of its tokens."""
        self._logits[self._slot[window.first_row + batch.rows[places]]] = logits

    def odd_rows(self, window: SortWindow) -> np.ndarray:
        """bool [rows of the window]: a logit there is no finite number."""
        slot = self._slot[window.first_row : window.first_row + window.rows]
        odd: np.ndarray = (slot >= 0) & ~np.isfinite(self._logits[slot]).all(axis=1)
        return odd

    def known(self, sequence: np.ndarray, stop: int) -> np.ndarray:
        """bool [n]: whether nothing more will be learnt of these (-1 for none) once all rows below `stop` have come."""
        known: np.ndarray = np.append(self._asked.row, -1)[sequence] < stop
        return known

    @property
    def differences(self) -> np.ndarray:
        """float64 [S]: logit of the right answer minus that of the best other one; NaN where there is none."""
        number, right = np.arange(len(self._logits)), self._asked.right
        others = self._logits.copy()
        others[number, right] = -np.inf  # of a sequence without a right one all are NaN
        best = np.where(np.isnan(others).any(axis=1), np.nan, others.max(axis=1, initial=-np.inf))
        with np.errstate(invalid="ignore"):
            found: np.ndarray = np.where(right >= 0, self._logits[number, right] - best, np.nan)
        return found
