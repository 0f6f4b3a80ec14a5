"""Batches: windows sorted by length or packed within a bounded stretch of rows; little is padded, order is kept.

A row of a batch, and what fills it, is called a line here: one window, or several that are kept apart by their
positions. Legend: B lines of a batch, T their padded length.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from harvest.records import Batch, SortWindow, Window

PADDING_ID = 0
"""Any id of the vocabulary: what follows a window cannot reach it."""
LENGTH_STEP = 8
"""Lengths of batches are multiples of this, which leaves few shapes."""

Line = Sequence[Window]
Batching = Callable[..., Iterator[SortWindow]]


def sort_windows(
    windows: Sequence[Window],
    *,
    tokens_per_batch: int,
    rows_per_window: int,
    length_step: int = LENGTH_STEP,
    switches: Sequence[int] = (),
) -> Iterator[SortWindow]:
    """Yields consecutive stretches of the shard's windows, each cut into batches of similar length.

    A stretch holds at most `rows_per_window` rows, or one window that has more; a batch at most
    `tokens_per_batch` tokens, padding counted, or one window that has more. Lengths are padded to
    multiples of `length_step`, but never beyond the longest window of the shard, nor past a length of `switches`
    (rising), beyond which the model computes otherwise: the windows of a batch are all on one side of each.
    The result depends on the arguments alone.
    """
    longest = _longest(windows)
    for stretch in _stretches(windows, rows_per_window):
        lines = [[window] for window in stretch]
        yield _sort_window(stretch, lines, tokens_per_batch, length_step, [*switches, longest], packed=False)


def pack_windows(
    windows: Sequence[Window], *, tokens_per_batch: int, rows_per_window: int, length_step: int = LENGTH_STEP
) -> Iterator[SortWindow]:
    """As `sort_windows`, with several windows in a line as long as they fit: a line is no longer than the shard's
    longest window, so that no position is beyond what `sorted` asks for and attention costs no more per token.

    Every batch has `position_ids`, from 0 in each window and in the padding: whoever runs it keeps them apart.
    """
    longest = _longest(windows)
    for stretch in _stretches(windows, rows_per_window):
        yield _sort_window(stretch, _packed(stretch, longest), tokens_per_batch, length_step, [longest], packed=True)


def single_windows(windows: Sequence[Window], *, tokens_per_batch: int, rows_per_window: int) -> Iterator[SortWindow]:
    """As `sort_windows`, with every window in a batch of its own, unpadded; `tokens_per_batch` is not asked."""
    return sort_windows(windows, tokens_per_batch=1, rows_per_window=rows_per_window, length_step=1)


def batching_of(name: str, switches: Sequence[int] = ()) -> Batching:
    """How windows become batches under `tokens.batching`; those of `concatenated` are cut from a stream.

    `packed` is not for models with `switches`, which the plan refuses; `single` is what `auto` stands for where the
    windows of a forward see one another whatever keeps them apart.
    """
    if name == "single":
        return single_windows
    return pack_windows if name == "packed" else functools.partial(sort_windows, switches=switches)


def unpadded(batches: Sequence[Batch], wanted: np.ndarray) -> Iterator[Batch]:
    """The windows with a row of `wanted` (bool, of the sort window) once more, each in a line that it fills by itself.

    Windows that had that already are left out: nothing stood beside them. No batch has more tokens than those given.
    """
    tokens = max((batch.input_ids.size for batch in batches), default=0)
    alike: dict[int, list[Batch]] = {}
    for one in _alone(batches, wanted):
        alike.setdefault(one.input_ids.size, []).append(one)
    for length, ones in alike.items():
        lines = max(1, tokens // length)
        for at in range(0, len(ones), lines):
            yield _stacked(ones[at : at + lines], length)


def _alone(batches: Iterable[Batch], wanted: np.ndarray) -> Iterator[Batch]:
    for batch in batches:
        length = batch.input_ids.shape[1]
        for line in np.unique(batch.source[wanted[batch.rows]] // length).tolist():
            for start, stop in _pieces(batch, line):
                first = line * length + start
                inside = (batch.source >= first) & (batch.source < line * length + stop)
                if stop - start < length and wanted[batch.rows[inside]].any():
                    yield Batch(
                        input_ids=batch.input_ids[line : line + 1, start:stop],
                        lengths=np.array([stop - start], dtype=np.int64),
                        source=batch.source[inside] - first,
                        rows=batch.rows[inside],
                        spans=(),
                        documents=batch.documents[inside],
                    )


def _stacked(ones: Sequence[Batch], length: int) -> Batch:
    """Batches of one full line each as one batch."""
    source = np.concatenate([one.source + line * length for line, one in enumerate(ones)])
    rows = np.concatenate([one.rows for one in ones])
    return Batch(
        input_ids=np.concatenate([one.input_ids for one in ones]),
        lengths=np.concatenate([one.lengths for one in ones]),
        source=source,
        rows=rows,
        spans=_spans(source, rows),
        documents=np.concatenate([one.documents for one in ones]),
    )


def _pieces(batch: Batch, line: int) -> Iterator[tuple[int, int]]:
    """Where the windows of a line begin and end."""
    stop = int(batch.lengths[line])
    starts = [0] if batch.position_ids is None else np.flatnonzero(batch.position_ids[line, :stop] == 0).tolist()
    yield from zip(starts, [*starts[1:], stop])


def _longest(windows: Sequence[Window]) -> int:
    return max((len(window.ids) for window in windows), default=0)


def _stretches(windows: Sequence[Window], rows_per_window: int) -> Iterator[Sequence[Window]]:
    start, rows = 0, 0
    for number, window in enumerate(windows):
        if number > start and rows + len(window.keep) > rows_per_window:
            yield windows[start:number]
            start, rows = number, 0
        rows += len(window.keep)
    if start < len(windows):
        yield windows[start:]


def _packed(stretch: Sequence[Window], room: int) -> list[list[Window]]:
    """Lines of at most `room` tokens: longest window first, each where the least is left over."""
    lines: list[list[Window]] = []
    left: list[tuple[int, int]] = []  # (tokens that still fit, line), sorted
    for window in sorted(stretch, key=lambda window: -len(window.ids)):
        size = len(window.ids)
        at = bisect_left(left, (size, -1))
        if at == len(left):
            free, line = room, len(lines)
            lines.append([])
        else:
            free, line = left.pop(at)
        lines[line].append(window)
        insort(left, (free - size, line))
    return lines


def _sort_window(
    stretch: Sequence[Window], lines: Sequence[Line], tokens: int, step: int, limits: Sequence[int], *, packed: bool
) -> SortWindow:
    first = stretch[0].row
    batches = [_batch(group, first, length, packed=packed) for group, length in _groups(lines, tokens, step, limits)]
    return SortWindow(first_row=first, rows=sum(len(window.keep) for window in stretch), batches=batches)


def _groups(
    lines: Sequence[Line], tokens: int, step: int, limits: Sequence[int]
) -> Iterator[tuple[Sequence[Line], int]]:
    """(lines, padded length); longest first, so that the first batch already shows whether memory suffices.

    No padding and no group goes past a length of `limits`, of which the last is the longest line's.
    """
    ordered = sorted(lines, key=lambda line: -_tokens(line))
    start = 0
    while start < len(ordered):
        length = _tokens(ordered[start])
        padded = min(_up(length, step), *(limit for limit in limits if limit >= length))
        least = max((limit for limit in limits if limit < length), default=0)
        group = ordered[start : start + max(1, tokens // padded)]
        group = [line for line in group if _tokens(line) > least]
        yield group, padded
        start += len(group)


def _tokens(line: Line) -> int:
    return sum(len(window.ids) for window in line)


def _up(length: int, step: int) -> int:
    return -(-length // step) * step


def _batch(group: Sequence[Line], first_row: int, length: int, *, packed: bool) -> Batch:
    input_ids = np.full((len(group), length), PADDING_ID, dtype=np.int64)
    position_ids = np.zeros((len(group), length), dtype=np.int64) if packed else None
    lengths, source = [], []
    for b, line in enumerate(group):
        at = 0
        for window in line:
            stop = at + len(window.ids)
            input_ids[b, at:stop] = window.ids
            source.append(window.keep.astype(np.int64) + (b * length + at))
            if position_ids is not None:
                position_ids[b, at:stop] = np.arange(stop - at)
            at = stop
        if position_ids is not None:
            position_ids[b, at:] = np.arange(length - at)
        lengths.append(at)
    kept = [window for line in group for window in line]
    rows = np.concatenate([np.arange(len(w.keep), dtype=np.int64) + (w.row - first_row) for w in kept])
    return Batch(
        input_ids=input_ids,
        lengths=np.array(lengths, dtype=np.int64),
        source=np.concatenate(source),
        rows=rows,
        spans=_spans(np.concatenate(source), rows),
        documents=np.concatenate([_documents(window) for window in kept]),
        position_ids=position_ids,
    )


def _documents(window: Window) -> np.ndarray:
    """int64 [k]: the document of each kept position."""
    return np.full(len(window.keep), window.document) if window.documents is None else window.documents


def _spans(source: np.ndarray, rows: np.ndarray) -> list[tuple[int, int, int]]:
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(rows) != 1)) + 1
    firsts = np.concatenate([[0], breaks])
    counts = np.diff(np.append(firsts, len(source)))
    return list(zip(source[firsts].tolist(), rows[firsts].tolist(), counts.tolist()))
