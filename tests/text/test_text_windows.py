"""Windows, positions and exclusions: every token in one place, whatever is selected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textcase import documents_of, rows_of, tokeniser

from harvest.errors import DocumentError

IDS = {"ids": "ids"}


def shard_of(values: Any, *, tokens: Any = None, capture: Any = None, context: int = 8, **more: Any) -> Any:
    data = IDS | more.pop("data", {})
    tool = tokeniser(None, data=data, tokens=tokens, capture=capture, context=context, bos_id=0, **more)
    return tool.shard(rows_of(values, "ids"), file=0)


def keys(shard: Any) -> list[tuple[int, int]]:
    return list(zip(shard.tokens.document.tolist(), shard.tokens.position.tolist()))


def test_rows_of_other_lengths_than_the_context_are_cut_there_and_lose_nothing() -> None:
    values = [list(range(10, 15)), list(range(20, 28)), list(range(30, 43))]
    shard = shard_of(values)
    assert [window.ids.tolist() for window in shard.windows] == [
        values[0],
        values[1],
        values[2][:8],
        values[2][8:],
    ]
    assert shard.tokens.chunk.tolist() == [0] * 5 + [0] * 8 + [0] * 8 + [1] * 5
    assert shard.tokens.position.tolist() == [*range(5), *range(8), *range(13)]
    cut = shard_of(values, tokens={"long": "truncate"})
    assert (cut.tokens_run, cut.dropped_tokens) == (21, 5)
    assert [(d.tokens, d.rows, d.reason) for d in cut.documents] == [(5, 5, None), (8, 8, None), (13, 8, "truncated")]


def test_a_bos_of_every_window_takes_a_place_but_no_row_and_costs_no_token() -> None:
    content = list(range(100, 120))
    shard = shard_of([content], tokens={"bos": "window"})
    assert [window.ids.tolist() for window in shard.windows] == [
        [0, *content[:7]],
        [0, *content[7:14]],
        [0, *content[14:]],
    ]
    assert documents_of(shard) == {0: [0, *content]}
    assert shard.tokens.position.tolist() == list(range(21))
    assert shard.tokens.chunk.tolist() == [0] * 8 + [1] * 7 + [2] * 6
    assert [window.keep.tolist() for window in shard.windows] == [list(range(8)), list(range(1, 8)), list(range(1, 7))]
    assert (shard.tokens_run, shard.forward_tokens) == (21, 23)


def test_a_chunk_is_the_slice_of_the_document_that_its_number_says() -> None:
    ids = list(range(50, 62))
    shard = shard_of([ids], context=4)
    assert [window.ids.tolist() for window in shard.windows] == [ids[4 * c : 4 * c + 4] for c in range(3)]
    assert shard.tokens.chunk.tolist() == [p // 4 for p in range(12)]


def test_a_long_document_among_short_ones_is_cut_chunked_or_refused_and_the_others_stay() -> None:
    values = [[5], list(range(65)), [6, 7], list(range(200))]
    chunked = shard_of(values, context=64)
    assert max(len(window.ids) for window in chunked.windows) == 64
    assert [d.rows for d in chunked.documents] == [1, 65, 2, 200]
    cut = shard_of(values, tokens={"long": "truncate"}, context=64)
    assert documents_of(cut) == {0: [5], 1: list(range(64)), 2: [6, 7], 3: list(range(64))}
    skipped = shard_of(values, tokens={"long": "fail"}, data={"on_bad": "skip"}, context=64)
    assert [d.reason for d in skipped.documents] == [None, "longer than 64 tokens", None, "longer than 64 tokens"]
    assert [d.tokens for d in skipped.documents] == [1, 65, 2, 200]
    assert shard_of([list(range(64))], tokens={"long": "fail"}, context=64).tokens_run == 64
    with pytest.raises(DocumentError, match=r"document 1 .*: longer than 64 tokens"):
        shard_of(values, tokens={"long": "fail"}, context=64)


def test_documents_of_no_one_and_several_windows_keep_their_own_numbers() -> None:
    shard = shard_of([[], [1], list(range(10)), [], list(range(20, 28))], context=4)
    assert [(w.document, len(w.ids)) for w in shard.windows] == [(1, 1), (2, 4), (2, 4), (2, 2), (4, 4), (4, 4)]
    assert [(d.document, d.status, d.rows) for d in shard.documents] == [
        (0, "skipped", 0),
        (1, "stored", 1),
        (2, "stored", 10),
        (3, "skipped", 0),
        (4, "stored", 8),
    ]


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ("first", [(0, 0), (1, 0), (2, 0)]),
        ("last", [(0, 1), (1, 4), (2, 8)]),
        ([-1], [(0, 1), (1, 4), (2, 8)]),
        ([-1, 0, 1], [(0, 0), (0, 1), (1, 0), (1, 1), (1, 4), (2, 0), (2, 1), (2, 8)]),
        ([-4], [(1, 1), (2, 5)]),
        ([5], [(2, 5)]),
        ({"every": 4}, [(0, 0), (1, 0), (1, 4), (2, 0), (2, 4), (2, 8)]),
    ],
)
def test_positions_count_in_the_whole_document_whatever_the_window(positions: Any, expected: list[Any]) -> None:
    values = [[10, 11], list(range(20, 25)), list(range(30, 39))]
    for context in (3, 4, 64):
        shard = shard_of(values, capture={"positions": positions}, context=context)
        assert keys(shard) == expected
        assert shard.tokens.token.tolist() == [values[document][position] for document, position in expected]
    short = [d.document for d in shard.documents if d.status == "skipped"]
    assert short == sorted({0, 1, 2} - {document for document, _ in expected})
    assert all(d.reason == f"too short for position {positions[0]}" for d in shard.documents if d.status == "skipped")


def test_under_truncation_the_last_token_is_the_last_that_runs() -> None:
    shard = shard_of([list(range(20))], tokens={"long": "truncate"}, capture={"positions": "last"}, context=8)
    assert keys(shard) == [(0, 7)]


def test_windows_without_a_kept_row_are_not_run() -> None:
    shard = shard_of([list(range(100, 120))], capture={"positions": "last"})
    assert [window.ids.tolist() for window in shard.windows] == [list(range(116, 120))]
    assert shard.forward_tokens == 4
    assert shard.tokens_run == 20


def test_every_bos_is_left_out_wherever_it_stands_and_nothing_shifts() -> None:
    values = [[0, 5, 6, 0, 7], [0], [8, 9]]
    shard = shard_of(values, capture={"exclude": ["bos"]})
    assert keys(shard) == [(0, 1), (0, 2), (0, 4), (2, 0), (2, 1)]
    assert [(d.status, d.rows) for d in shard.documents] == [("stored", 3), ("stored", 0), ("stored", 2)]
    assert shard.windows[0].ids.tolist() == values[0]


def test_special_tokens_and_single_ids_are_left_out_and_an_excluded_last_token_has_no_row() -> None:
    values = [[0, 5, 1], [5, 6]]
    special = {"exclude": ["special"]}
    assert keys(shard_of(values, capture=special, special_ids=(0, 1))) == [(0, 1), (1, 0), (1, 1)]
    assert keys(shard_of(values, capture={"exclude": [5]})) == [(0, 0), (0, 2), (1, 1)]
    assert keys(shard_of(values, capture=special | {"positions": "last"}, special_ids=(0, 1))) == [(1, 1)]


def test_a_sample_of_positions_depends_on_document_and_position_alone() -> None:
    values = [list(range(200)) for _ in range(20)]
    chosen = set(keys(shard_of(values, capture={"positions": {"sample": 0.2}}, context=16)))
    assert chosen == set(keys(shard_of(values, capture={"positions": {"sample": 0.2}}, context=200)))
    assert chosen >= set(keys(shard_of(values, capture={"positions": {"sample": 0.1}}, context=16)))
    assert abs(len(chosen) - 0.2 * 4000) < 4 * (4000 * 0.2 * 0.8) ** 0.5
    per_document = [sum(1 for d, _ in chosen if d == document) for document in range(20)]
    assert len(set(per_document)) > 1
    per_position = np.bincount([p for _, p in chosen], minlength=200)
    assert per_position.max() < 14


def scalar_mix(value: int) -> int:
    """splitmix64's finaliser in plain integers."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def test_the_sample_of_positions_is_the_same_hash_on_every_machine_and_release() -> None:
    values = [list(range(30)), list(range(40))]
    shard = shard_of(values, capture={"positions": {"sample": 0.2}})
    expected = [(d, p) for d in (0, 1) for p in range(len(values[d])) if scalar_mix(scalar_mix(d) ^ p) / 2**64 < 0.2]
    assert keys(shard) == expected
    assert [p for d, p in expected if d == 0] == PINNED


PINNED = [1, 4, 18, 25, 27]


documents = st.lists(st.lists(st.integers(0, 299), max_size=30), max_size=8)
selections = st.one_of(
    st.sampled_from(["all", "first", "last"]),
    st.lists(st.integers(-6, 6), min_size=1, max_size=3),
    st.fixed_dictionaries({"every": st.integers(1, 7)}),
    st.fixed_dictionaries({"sample": st.floats(0.05, 1)}),
)


@given(
    values=documents,
    context=st.integers(2, 12),
    bos=st.sampled_from(["auto", "window", "always"]),
    long=st.sampled_from(["chunk", "truncate"]),
)
@settings(max_examples=150, deadline=None)
def test_every_token_of_every_document_is_in_exactly_one_window_in_order(
    values: list[list[int]], context: int, bos: str, long: str
) -> None:
    shard = shard_of(values, tokens={"bos": bos, "long": long}, context=context)
    whole = {}
    for document, ids in enumerate(values):
        if ids and bos != "auto":
            while ids and ids[0] == 0:
                ids = ids[1:]
            ids = [0, *ids]
        if ids:
            whole[document] = ids[:context] if long == "truncate" else ids
    assert documents_of(shard) == whole
    run: dict[int, list[int]] = {}
    for window in shard.windows:
        assert len(window.ids) <= context
        own = bos == "window" and window.document in run
        assert not own or window.ids[0] == 0
        assert window.keep.tolist() == list(range(own, len(window.ids)))
        run.setdefault(window.document, []).extend(window.ids[own:].tolist())
    assert run == whole
    assert shard.tokens_run == sum(map(len, whole.values()))
    assert shard.tokens_run + shard.dropped_tokens == sum(d.tokens for d in shard.documents)


@given(values=documents, context=st.integers(2, 12), positions=selections, excluded=st.lists(st.integers(0, 299)))
@settings(max_examples=150, deadline=None)
def test_rows_are_dense_in_order_and_stand_where_their_window_says(
    values: list[list[int]], context: int, positions: Any, excluded: list[int]
) -> None:
    capture = {"positions": positions, "exclude": excluded}
    shard = shard_of(values, tokens={"bos": "window"}, capture=capture, context=context)
    table = shard.tokens
    row = 0
    for window in shard.windows:
        assert window.row == row
        assert len(window.keep) > 0
        assert np.all(np.diff(window.keep) > 0)
        here = slice(row, row + len(window.keep))
        assert set(table.document[here].tolist()) == {window.document}
        assert len(set(table.chunk[here].tolist())) == 1
        assert table.token[here].tolist() == window.ids[window.keep].tolist()
        row += len(window.keep)
    assert row == len(table) == sum(d.rows for d in shard.documents)
    assert keys(shard) == sorted(set(keys(shard)))
    assert not set(table.token.tolist()) & set(excluded)
    assert [d.rows for d in shard.documents] == [table.document.tolist().count(d.document) for d in shard.documents]


def test_columns_have_the_promised_types() -> None:
    table = shard_of([[5, 6]]).tokens
    kinds = {name: str(getattr(table, name).dtype) for name in ("document", "position", "token", "chunk", "special")}
    assert kinds == {"document": "int64", "position": "int32", "token": "int32", "chunk": "int32", "special": "bool"}
    window = shard_of([[5, 6]]).windows[0]
    assert (str(window.ids.dtype), str(window.keep.dtype)) == ("int32", "int32")
