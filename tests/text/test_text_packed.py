"""Packed batches: every kept row once, several windows in a row, each at positions of its own from 0."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from textcase import kept, lengths_of_windows, windows_of

from harvest.records import Batch, SortWindow
from harvest.text.batch import batching_of, pack_windows, sort_windows, unpadded


def pieces(batch: Batch, line: int) -> list[list[int]]:
    """The ids of one row of a batch, cut wherever the positions begin anew; padding is the last piece, if any."""
    assert batch.position_ids is not None
    assert batch.position_ids.shape == batch.input_ids.shape
    starts = [t for t, position in enumerate(batch.position_ids[line].tolist()) if position == 0]
    ids = batch.input_ids[line].tolist()
    found = [ids[a:b] for a, b in zip(starts, [*starts[1:], len(ids)])]
    assert batch.position_ids[line].tolist() == [p for piece in found for p in range(len(piece))]
    return found


@given(
    lengths=lengths_of_windows,
    capture=kept,
    tokens=st.integers(1, 80),
    rows=st.integers(1, 90),
    step=st.integers(1, 9),
)
@settings(max_examples=200, deadline=None)
def test_every_kept_token_is_once_in_a_batch_at_its_own_row_document_and_position(
    lengths: list[int], capture: Any, tokens: int, rows: int, step: int
) -> None:
    windows = windows_of(lengths, **capture)
    out: list[int] = []
    for stretch in pack_windows(windows, tokens_per_batch=tokens, rows_per_window=rows, length_step=step):
        assert stretch.first_row == len(out)
        assert stretch.rows <= rows or sum(len(pieces(b, n)) for b in stretch.batches for n in range(len(b.lengths)))
        block = np.full(stretch.rows, -1)
        for batch in stretch.batches:
            assert np.all(block[batch.rows] == -1)
            assert len(set(batch.rows.tolist())) == len(batch.rows) == len(batch.source) == len(batch.documents)
            block[batch.rows] = batch.input_ids.reshape(-1)[batch.source]
            assert batch.position_ids is not None
            values = block[batch.rows] - 1
            assert batch.documents.tolist() == (values // 300).tolist()
            assert batch.position_ids.reshape(-1)[batch.source].tolist() == (values % 300).tolist()
            told = [(s + i, r + i) for s, r, count in batch.spans for i in range(count)]
            assert told == list(zip(batch.source.tolist(), batch.rows.tolist()))
        out += block.tolist()
    assert out == [int(t) for w in windows for t in w.ids[w.keep]]


@given(lengths=lengths_of_windows, tokens=st.integers(1, 80), step=st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_rows_are_whole_windows_behind_one_another_and_no_longer_than_the_longest(
    lengths: list[int], tokens: int, step: int
) -> None:
    windows, longest = windows_of(lengths), max(lengths, default=0)
    found: list[list[int]] = []
    for stretch in pack_windows(windows, tokens_per_batch=tokens, rows_per_window=10**6, length_step=step):
        for batch in stretch.batches:
            count, length = batch.input_ids.shape
            assert count * length <= tokens or count == 1
            assert length <= longest
            assert length % step == 0 or length == longest
            assert length - max(batch.lengths) < step
            for line in range(count):
                inside = pieces(batch, line)
                if batch.lengths[line] < length:
                    assert inside.pop() == [0] * (length - batch.lengths[line])
                assert sum(map(len, inside)) == batch.lengths[line]
                found += inside
    assert sorted(found) == sorted(window.ids.tolist() for window in windows)


def test_two_documents_share_a_row_and_the_padding_is_a_piece_of_its_own() -> None:  # E24
    (stretch,) = pack_windows(windows_of([3, 8, 2]), tokens_per_batch=16, rows_per_window=100, length_step=1)
    (batch,) = stretch.batches
    assert batch.input_ids.tolist() == [
        [301, 302, 303, 304, 305, 306, 307, 308],
        [1, 2, 3, 601, 602, 0, 0, 0],
    ]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch.lengths.tolist() == [8, 5]
    assert batch.source.tolist() == [*range(8), 8, 9, 10, 11, 12]
    assert batch.rows.tolist() == [*range(3, 11), 0, 1, 2, 11, 12]
    assert batch.documents.tolist() == [1] * 8 + [0] * 3 + [2] * 2
    arrays = (batch.input_ids, batch.position_ids, batch.lengths, batch.source, batch.rows, batch.documents)
    assert {str(array.dtype) for array in arrays} == {"int64"}


def test_packing_computes_fewer_tokens_than_sorting() -> None:
    lengths = np.random.default_rng(0).integers(5, 257, 100).tolist()

    def computed(stretches: Any) -> int:
        return sum(batch.input_ids.size for stretch in stretches for batch in stretch.batches)

    settings = {"tokens_per_batch": 2048, "rows_per_window": 10**6}
    packed = computed(pack_windows(windows_of(lengths), **settings))
    assert sum(lengths) <= packed < 1.06 * sum(lengths)
    assert packed < computed(sort_windows(windows_of(lengths), **settings))


def test_the_batches_depend_on_the_windows_alone() -> None:
    def told(stretches: Any) -> list[Any]:
        return [(s.first_row, [(b.input_ids.tolist(), b.rows.tolist()) for b in s.batches]) for s in stretches]

    settings = {"tokens_per_batch": 64, "rows_per_window": 40}
    windows = windows_of([5, 9, 9, 2, 30, 1, 1, 17, 5, 5])
    first = told(pack_windows(windows, **settings))
    list(pack_windows(windows_of([3, 3, 3]), **settings))
    assert told(pack_windows(windows, **settings)) == first


def test_nothing_to_run_gives_no_batches() -> None:
    empty: list[SortWindow] = []
    for batching in map(batching_of, ("sorted", "packed", "concatenated")):
        assert list(batching([], tokens_per_batch=8, rows_per_window=8)) == empty


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=25),
    st.sampled_from([{}, {"positions": "last"}, {"positions": {"every": 3}}]),
    st.sampled_from(["sorted", "packed"]),
    st.data(),
)
def test_windows_run_again_fill_their_lines_and_are_those_that_had_company(
    lengths: list[int], capture: dict[str, Any], batching: str, data: st.DataObject
) -> None:
    windows = windows_of(lengths, **capture)
    for stretch in batching_of(batching)(windows, tokens_per_batch=64, rows_per_window=100):
        wanted = np.array(data.draw(st.lists(st.booleans(), min_size=stretch.rows, max_size=stretch.rows)))
        token = np.zeros(stretch.rows, int)
        company = np.zeros(stretch.rows, bool)
        for batch in stretch.batches:
            token[batch.rows] = batch.input_ids.reshape(-1)[batch.source]
            company[batch.rows] = [len(windows[n].ids) < batch.input_ids.shape[1] for n in batch.documents]
        expected = {n for n, row in zip((token - 1) // 300, range(stretch.rows)) if wanted[row] and company[row]}
        seen: list[int] = []
        for batch in unpadded(stretch.batches, wanted):
            assert batch.input_ids.size <= max(one.input_ids.size for one in stretch.batches)
            assert batch.position_ids is None
            assert (batch.lengths == batch.input_ids.shape[1]).all()
            for line in batch.input_ids:
                number = (int(line[0]) - 1) // 300
                assert line.tolist() == windows[number].ids.tolist()
                seen.append(number)
            np.testing.assert_array_equal(batch.input_ids.reshape(-1)[batch.source], token[batch.rows])
            spans = [(s + i, r + i) for s, r, count in batch.spans for i in range(count)]
            assert spans == list(zip(batch.source.tolist(), batch.rows.tolist()))
        assert sorted(seen) == sorted(expected)
