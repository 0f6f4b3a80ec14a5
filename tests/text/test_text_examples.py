"""Examples of directions before any forward: labels out of cells, and the tokens where states are read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textcase import rows_of, tokeniser

from harvest.errors import DocumentError
from harvest.records import ShardExamples, ShardText, SourceRow
from harvest.settings.direction import DirectionSettings
from harvest.text.examples import group_of, label_of


def asked(**more: Any) -> DirectionSettings:
    positive = {"name": "d", "column": "label", "positive": ["1"], "negative": ["0"]}
    return DirectionSettings.model_validate({**positive, **more})


def shard_of(texts: list[str | None], labels: list[Any], direction: DirectionSettings, **more: Any) -> ShardText:
    columns = {key: more.pop(key) for key in [*more] if key in ("w", "pid", "split")}
    data = {"on_bad": more.pop("on_bad", "fail")}
    tool = tokeniser(data=data, tokens={"bos": "never"}, directions=[direction], **more)
    return tool.shard(rows_of(texts, label=labels, **columns), file=0)


def examples(*arguments: Any, **more: Any) -> ShardExamples:
    (found,) = shard_of(*arguments, **more).examples["d"]
    return found


@pytest.mark.parametrize(
    ("cell", "group"),
    [("1", 0), (1, 0), (np.int64(1), 0), (True, -1), ("true", -1), ("0", 1), (0, 1), ("2", -1), (None, -1), ("", -1)],
)
def test_a_cell_is_in_the_group_that_its_text_says(cell: Any, group: int) -> None:
    assert group_of(asked(), {"label": cell}) == group


@pytest.mark.parametrize(("cell", "group"), [(True, 0), ("true", 0), (False, 1), (None, -1), ("", 1)])
def test_booleans_read_true_and_the_rest_is_everyone_with_a_cell(cell: Any, group: int) -> None:
    assert group_of(asked(positive=[True], negative="rest"), {"label": cell}) == group


@pytest.mark.parametrize("cell", [-1, "x", None, float("nan"), float("inf"), [1]])
def test_what_is_no_weight_puts_a_document_in_no_group_and_says_so(cell: Any) -> None:
    label = label_of(asked(weight="column:w"), {"label": "1", "w": cell})
    assert label.group == -1
    assert label.trouble is not None
    assert "is no weight (a number of at least 0)" in label.trouble.detail


def test_weights_pairs_and_parts_come_from_their_columns() -> None:
    direction = asked(weight="column:w", pair="column:pid", holdout="column:split")
    label = label_of(direction, {"label": 1, "w": "0.5", "pid": 7, "split": "test"})
    assert (label.group, label.weight, label.pair, label.held_out) == (0, 0.5, "7", True)
    assert label_of(direction, {"label": 1, "w": 0, "pid": "7", "split": None}).held_out is False
    assert label_of(direction, {"label": 1, "w": 0, "pid": None, "split": "test"}).trouble is not None


words = st.text(alphabet="abc", min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(words, st.sampled_from(["0", "1", "2"])), min_size=1, max_size=8),
    st.integers(-12, 11),
    st.integers(2, 64),
)
def test_a_token_is_read_where_it_lies_in_its_document_whatever_the_windows(
    rows: list[tuple[str, str]], index: int, context: int
) -> None:
    direction = asked(read=index)
    shard = shard_of([t for t, _ in rows], [g for _, g in rows], direction, on_bad="skip", context=context)
    (found,) = shard.examples["d"]
    known = [(i, text, group) for i, (text, group) in enumerate(rows) if group != "2"]
    assert found.document.tolist() == [i for i, _, _ in known]
    assert found.group.tolist() == [1 - int(group) for _, _, group in known]
    assert found.unknown == len(rows) - len(known)
    first_row = np.cumsum([0, *(len(text) for text, _ in rows)])  # a byte is a token, and all are captured
    there = [(n, i, text) for n, (i, text, _) in enumerate(known) if -len(text) <= index < len(text)]
    assert found.owner.tolist() == [n for n, _, _ in there]
    assert found.rows.tolist() == [first_row[i] + index % len(text) for _, i, text in there]
    positions = {n: index % len(text) for n, _, text in there}
    assert found.position.tolist() == [positions.get(n, -1) for n in range(len(known))]


@settings(deadline=None, max_examples=40)
@given(st.lists(words, min_size=1, max_size=6), st.integers(-6, 5), st.integers(-6, 5))
def test_a_state_on_its_context_has_two_rows_in_the_order_of_the_document(texts: list[str], at: int, on: int) -> None:
    if at == on:
        return
    found = examples(texts, ["1"] * len(texts), asked(read={"at": at, "on": on}), on_bad="skip")
    starts = np.cumsum([0, *map(len, texts)])
    expected, owners = [], []
    for number, text in enumerate(texts):
        places = [place if place >= 0 else len(text) + place for place in (at, on)]
        if all(0 <= place < len(text) for place in places) and places[0] != places[1]:
            expected += sorted(starts[number] + place for place in places)
            owners += [number] * 2
            assert found.context_first is not None
            assert found.context_first[number] == (places[1] < places[0])
    assert found.rows.tolist() == expected
    assert found.owner.tolist() == owners


def test_means_and_every_token_leave_excluded_ones_out() -> None:
    capture = {"exclude": [66]}  # "a"
    found = examples(["ab", "aa", "bcb"], ["1", "0", "0"], asked(read="mean"), capture=capture)
    assert found.owner.tolist() == [0, 2, 2, 2]
    assert found.document.tolist() == [0, 1, 2]  # the second has no row: no state, but it is there
    every = examples(["ab", "aa", "bcb"], ["1", "0", "0"], asked(read="all"), capture=capture)
    assert every.document.tolist() == [0, 2, 2, 2]
    assert every.owner.tolist() == [0, 1, 2, 3]


def test_a_skipped_document_keeps_its_pair_from_being_made_and_no_other() -> None:
    direction = asked(pair="column:pid", modes=["paired_rejection"])
    found = examples(["ab", "", "cd"], ["1", "0", "0"], direction, pid=[1, 1, 2])
    assert found.pair == ("1", "1", "2")
    assert found.owner.tolist() == [0, 2]
    unpaired = examples(["ab", "", "cd"], ["1", "0", "0"], asked())
    assert unpaired.document.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("texts", "labels", "read", "words_of_it"),
    [
        (["ab", "cd"], ["1", "7"], "last", "label = '7' is in no group"),
        (["ab", "cd"], ["1", None], "last", "label is empty is in no group"),
        (["ab", "c"], ["1", "0"], -2, "read: position -2 of 1 tokens"),
        (["ab", "c"], ["1", "0"], {"at": -1, "on": 0}, "position -1 on position 0 of 1 tokens"),
    ],
)
def test_a_document_in_doubt_is_refused_by_number_and_row(
    texts: list[str | None], labels: list[Any], read: Any, words_of_it: str
) -> None:
    with pytest.raises(DocumentError) as caught:
        shard_of(texts, labels, asked(read=read))
    assert caught.value.document == 1
    assert words_of_it in str(caught.value)
    assert "'d'" in str(caught.value)


def test_an_unreadable_row_is_skipped_before_it_is_looked_at() -> None:
    rows = rows_of(["ab", SourceRow(row=1, values={}, error="line 2: not valid JSON"), "cd"], label=["1", None, "0"])
    tool = tokeniser(data={"on_bad": "skip"}, directions=[asked()])
    (found,) = tool.shard(rows, file=3).examples["d"]
    assert (found.document % 2**40).tolist() == [0, 2]
    assert found.unknown == 0
