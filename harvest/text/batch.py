"""Batches: windows sorted by length within a bounded stretch of rows, so that little is padded and order is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from harvest.records import Batch, SortWindow, Window

PADDING_ID = 0
"""Any id of the vocabulary: what follows a window cannot reach it."""


def sort_windows(
    windows: Sequence[Window], *, tokens_per_batch: int, rows_per_window: int, length_step: int = 8
) -> Iterator[SortWindow]:
    """Yields consecutive stretches of the shard's windows, each cut into batches of similar length.

    A stretch holds at most `rows_per_window` rows, or one window that has more; a batch at most
    `tokens_per_batch` tokens, padding counted, or one window that has more. Lengths are padded to
    multiples of `length_step`, which leaves few shapes, but never beyond the longest window of the shard.
    The result depends on the arguments alone.
    """
    longest = max((len(window.ids) for window in windows), default=0)
    for stretch in _stretches(windows, rows_per_window):
        first = stretch[0].row
        batches = [
            _batch(group, first, min(longest, _up(len(group[0].ids), length_step)))
            for group in _groups(stretch, tokens_per_batch, length_step, longest)
        ]
        yield SortWindow(first_row=first, rows=sum(len(window.keep) for window in stretch), batches=batches)


def _stretches(windows: Sequence[Window], rows_per_window: int) -> Iterator[Sequence[Window]]:
    start, rows = 0, 0
    for number, window in enumerate(windows):
        if number > start and rows + len(window.keep) > rows_per_window:
            yield windows[start:number]
            start, rows = number, 0
        rows += len(window.keep)
    if start < len(windows):
        yield windows[start:]


def _groups(
    stretch: Sequence[Window], tokens_per_batch: int, length_step: int, longest: int
) -> Iterator[Sequence[Window]]:
    """Longest first, so that the first batch already shows whether memory suffices."""
    ordered = sorted(stretch, key=lambda window: -len(window.ids))
    start = 0
    while start < len(ordered):
        padded = min(longest, _up(len(ordered[start].ids), length_step))
        size = max(1, tokens_per_batch // padded)
        yield ordered[start : start + size]
        start += size


def _up(length: int, step: int) -> int:
    return -(-length // step) * step


def _batch(group: Sequence[Window], first_row: int, length: int) -> Batch:
    input_ids = np.full((len(group), length), PADDING_ID, dtype=np.int64)
    for row_of_batch, window in zip(input_ids, group):
        row_of_batch[: len(window.ids)] = window.ids
    source = np.concatenate([b * length + window.keep.astype(np.int64) for b, window in enumerate(group)])
    rows = np.concatenate([np.arange(len(w.keep), dtype=np.int64) + (w.row - first_row) for w in group])
    return Batch(
        input_ids=input_ids,
        lengths=np.array([len(window.ids) for window in group], dtype=np.int64),
        source=source,
        rows=rows,
        spans=_spans(source, rows),
        documents=np.array([window.document for window in group], dtype=np.int64),
    )


def _spans(source: np.ndarray, rows: np.ndarray) -> list[tuple[int, int, int]]:
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(rows) != 1)) + 1
    firsts = np.concatenate([[0], breaks])
    counts = np.diff(np.append(firsts, len(source)))
    return list(zip(source[firsts].tolist(), rows[firsts].tolist(), counts.tolist()))
