"""Batches: every kept row once, in bounded shapes, the same whatever was asked before."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from textcase import kept, lengths_of_windows, windows_of

from harvest.records import SortWindow
from harvest.text.batch import sort_windows


def gathered(stretches: list[SortWindow]) -> list[int]:
    """Row by row, the token that the batches put there; each row must be written exactly once."""
    out: list[int] = []
    for stretch in stretches:
        assert stretch.first_row == len(out)
        block = np.full(stretch.rows, -1)
        for batch in stretch.batches:
            assert np.all(block[batch.rows] == -1)
            assert len(set(batch.rows.tolist())) == len(batch.rows) == len(batch.source)
            block[batch.rows] = batch.input_ids.reshape(-1)[batch.source]
        out += block.tolist()
    return out


@given(
    lengths=lengths_of_windows,
    capture=kept,
    tokens=st.integers(1, 80),
    rows=st.integers(1, 90),
    step=st.integers(1, 9),
)
@settings(max_examples=200, deadline=None)
def test_batches_cover_each_kept_row_exactly_once_whatever_their_size(
    lengths: list[int], capture: Any, tokens: int, rows: int, step: int
) -> None:
    windows = windows_of(lengths, **capture)
    stretches = list(sort_windows(windows, tokens_per_batch=tokens, rows_per_window=rows, length_step=step))
    assert gathered(stretches) == [int(t) for w in windows for t in w.ids[w.keep]]
    longest = max(lengths, default=0)
    for stretch in stretches:
        assert stretch.rows <= rows or sum(len(b.lengths) for b in stretch.batches) == 1
        for batch in stretch.batches:
            count, length = batch.input_ids.shape
            assert count * length <= tokens or count == 1
            assert length <= longest
            assert length % step == 0 or length == longest
            assert length - max(batch.lengths) < step


@given(lengths=lengths_of_windows, capture=kept, tokens=st.integers(1, 80), rows=st.integers(1, 90))
@settings(max_examples=100, deadline=None)
def test_spans_are_the_same_copies_as_rows_and_as_long_as_can_be(
    lengths: list[int], capture: Any, tokens: int, rows: int
) -> None:
    for stretch in sort_windows(windows_of(lengths, **capture), tokens_per_batch=tokens, rows_per_window=rows):
        for batch in stretch.batches:
            told = [(s + i, r + i) for s, r, count in batch.spans for i in range(count)]
            assert told == list(zip(batch.source.tolist(), batch.rows.tolist()))
            for (s, r, count), (next_s, next_r, _) in zip(batch.spans, batch.spans[1:]):
                assert (next_s, next_r) != (s + count, r + count)
            assert all(type(number) is int for span in batch.spans for number in span)


def test_a_batch_holds_its_windows_padded_on_the_right_with_real_ids() -> None:
    (stretch,) = sort_windows(windows_of([2, 5, 3]), tokens_per_batch=15, rows_per_window=100, length_step=1)
    (batch,) = stretch.batches
    assert batch.input_ids.tolist() == [[301, 302, 303, 304, 305], [601, 602, 603, 0, 0], [1, 2, 0, 0, 0]]
    assert batch.lengths.tolist() == [5, 3, 2]
    assert batch.documents.tolist() == [1, 1, 1, 1, 1, 2, 2, 2, 0, 0]
    assert batch.position_ids is None
    assert batch.source.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 10, 11]
    assert batch.rows.tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert batch.spans == [(0, 2, 8), (10, 0, 2)]
    assert {str(a.dtype) for a in (batch.input_ids, batch.lengths, batch.source, batch.rows, batch.documents)} == {
        "int64"
    }


def test_windows_of_one_length_stay_in_order_and_copy_as_one_run() -> None:
    (stretch,) = sort_windows(windows_of([8] * 6), tokens_per_batch=24, rows_per_window=1000)
    assert [batch.spans for batch in stretch.batches] == [[(0, 0, 24)], [(0, 24, 24)]]


def test_stretches_are_consecutive_and_a_window_with_more_rows_stands_alone() -> None:
    stretches = list(sort_windows(windows_of([5, 5, 20, 3, 3, 3]), tokens_per_batch=64, rows_per_window=10))
    assert [(s.first_row, s.rows) for s in stretches] == [(0, 10), (10, 20), (30, 9)]
    assert [sorted({d for b in s.batches for d in b.documents.tolist()}) for s in stretches] == [[0, 1], [2], [3, 4, 5]]


def test_nothing_to_run_gives_no_batches() -> None:
    assert list(sort_windows([], tokens_per_batch=8, rows_per_window=8)) == []


def test_sorting_wastes_far_less_padding_than_dataset_order() -> None:
    lengths = np.random.default_rng(0).integers(20, 257, 200).tolist()
    stretches = list(sort_windows(windows_of(lengths), tokens_per_batch=2048, rows_per_window=10**6))
    computed = sum(batch.input_ids.size for stretch in stretches for batch in stretch.batches)
    assert sum(lengths) / computed > 0.9
    in_order = sum(len(part) * max(part) for part in (lengths[i : i + 8] for i in range(0, 200, 8)))
    assert sum(lengths) / in_order < 0.7
