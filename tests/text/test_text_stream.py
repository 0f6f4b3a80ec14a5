"""The stream of `tokens.batching = "concatenated"`: documents and separators in order, cut into full rows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textcase import byte_ids, rows_of, tokeniser
from tiny import BOS, EOS, byte_tokenizer

from harvest.errors import RequestError
from harvest.records import ShardText

BOTH = {"bos_id": 0, "eos_id": 1}


def shard_of(
    values: list[list[int]], *, context: int = 8, tokens: Any = None, capture: Any = None, **more: Any
) -> ShardText:
    tool = tokeniser(
        None,
        data={"ids": "i"},
        tokens={"batching": "concatenated", **(tokens or {})},
        capture=capture,
        context=context,
        **BOTH,
        **more,
    )
    return tool.shard(rows_of(values, "i"), file=0)


def table(shard: ShardText) -> list[tuple[int, int, int, bool]]:
    """(document, position, token, special) of every row."""
    t = shard.tokens
    return list(zip(t.document.tolist(), t.position.tolist(), t.token.tolist(), t.special.tolist()))


DOCUMENTS = [[5, 6, 7], [8, 9], [20], [30, 31, 32, 33, 34]]


def test_each_document_is_followed_by_one_separator_that_is_a_row_of_it() -> None:
    shard = shard_of(DOCUMENTS)
    assert [w.ids.tolist() for w in shard.windows] == [[5, 6, 7, 1, 8, 9, 1, 20], [1, 30, 31, 32, 33, 34, 1]]
    expected = [
        row
        for document, ids in enumerate(DOCUMENTS)
        for row in [*((document, p, i, False) for p, i in enumerate(ids)), (document, len(ids), EOS, True)]
    ]
    assert table(shard) == expected
    assert shard.tokens.chunk.tolist() == [0] * 7 + [0, 1] + [0] * 6
    assert [d.tokens for d in shard.documents] == [3, 2, 1, 5]
    assert [d.rows for d in shard.documents] == [4, 3, 2, 6]
    assert (shard.forward_tokens, shard.tokens_run, shard.dropped_tokens) == (15, 11, 0)


@pytest.mark.parametrize(("separator", "token"), [("eos", [EOS]), ("bos", [BOS]), ("none", [])])
def test_the_separator_is_the_token_asked_for(separator: str, token: list[int]) -> None:
    shard = shard_of(DOCUMENTS, tokens={"separator": separator})
    joined = [i for window in shard.windows for i in window.ids.tolist()]
    assert joined == [i for ids in DOCUMENTS for i in ids + token]


selections = st.one_of(
    st.sampled_from(["all", "first", "last"]),
    st.lists(st.integers(-3, 3), min_size=1, max_size=3),
    st.fixed_dictionaries({"every": st.integers(1, 7)}),
    st.fixed_dictionaries({"sample": st.floats(0.05, 1)}),
)


@given(
    values=st.lists(st.lists(st.integers(0, 40), max_size=20), max_size=8),
    context=st.integers(2, 12),
    bos=st.sampled_from(["auto", "always", "window"]),
    separator=st.sampled_from(["eos", "bos", "none"]),
    positions=selections,
    exclude=st.sampled_from([[], ["bos"], ["special"], [7, 1]]),
)
@settings(max_examples=300, deadline=None)
def test_the_stream_is_cut_into_full_rows_and_every_kept_token_has_its_own_row(
    values: list[list[int]], context: int, bos: str, separator: str, positions: Any, exclude: list[Any]
) -> None:
    shard = shard_of(
        values,
        context=context,
        tokens={"bos": bos, "separator": separator},
        capture={"positions": positions, "exclude": exclude},
        special_ids=(BOS, EOS),
    )
    whole: dict[int, list[int]] = {}
    for document, ids in enumerate(values):
        if not ids:
            continue
        if bos != "auto":
            while ids and ids[0] == BOS:
                ids = ids[1:]
            ids = [BOS, *ids]
        if isinstance(positions, list) and any(not -len(ids) <= p < len(ids) for p in positions):
            continue
        whole[document] = ids
    end = {"eos": [EOS], "bos": [BOS], "none": []}[separator]
    stream = [(d, p, i) for d, ids in whole.items() for p, i in enumerate(ids + end)]
    cuts: list[list[tuple[int, int, int]]] = []
    at = 0
    while at < len(stream):
        own = bos == "window" and stream[at][2] != BOS
        cuts.append(stream[at : at + context - own])
        at += context - own
    left_out = {"bos": {BOS}, "special": {BOS, EOS}}
    gone = {i for item in exclude for i in left_out.get(item, {item})}

    def wanted(document: int, position: int) -> bool:
        length = len(whole[document])
        if isinstance(positions, dict):
            return position % positions["every"] == 0 if "every" in positions else (document, position) in sampled
        if positions == "all":
            return True
        return position in [p % length for p in {"first": [0], "last": [-1]}.get(str(positions), positions)]

    sampled = {(d, p) for d, p, _, _ in table(shard)} if isinstance(positions, dict) and "sample" in positions else {}
    expected = [[key for key in cut if wanted(*key[:2]) and key[2] not in gone] for cut in cuts]
    assert [row[:3] for row in table(shard)] == [key for cut in expected for key in cut]
    full = [(cut, rows) for cut, rows in zip(cuts, expected) if rows]
    assert len(full) == len(shard.windows)
    row = 0
    for (cut, rows), window in zip(full, shard.windows):
        own = bos == "window" and cut[0][2] != BOS
        assert window.ids.tolist() == [BOS] * own + [i for _, _, i in cut]
        assert (window.row, window.document) == (row, rows[0][0])
        assert window.documents is not None
        assert window.documents.tolist() == [d for d, _, _ in rows]
        assert window.ids[window.keep].tolist() == [i for _, _, i in rows]
        assert len(window.ids) == context or cut is cuts[-1]
        row += len(rows)
    assert shard.forward_tokens == sum(len(window.ids) for window in shard.windows)
    assert shard.tokens_run == sum(map(len, whole.values()))
    first = {d: min(n for n, cut in enumerate(cuts) for e, _, _ in cut if e == d) for d in whole}
    chunk = [n - first[d] for n, rows in enumerate(expected) for d, _, _ in rows]
    assert shard.tokens.chunk.tolist() == chunk


def test_bos_is_left_out_wherever_it_stands_in_the_stream() -> None:  # E30
    tool = tokeniser(tokens={"batching": "concatenated"}, capture={"exclude": ["bos"]}, context=8)
    shard = tool.shard(rows_of(["ab", "cd", "ef"]), file=0)
    joined = [i for text in ("ab", "cd", "ef") for i in [*byte_ids(text), EOS]]
    assert [i for window in shard.windows for i in window.ids.tolist()] == joined
    assert BOS not in shard.tokens.token
    assert len(shard.tokens) == len(joined) - joined.count(BOS) == 9
    assert shard.tokens.position.tolist() == [1, 2, 3] * 3


def test_the_separator_goes_with_the_special_tokens_even_where_only_the_job_makes_it_one() -> None:
    shard = shard_of(DOCUMENTS, capture={"exclude": ["special"]})
    assert [row[2] for row in table(shard)] == [i for ids in DOCUMENTS for i in ids]


def test_truncation_and_refusal_of_long_documents_go_by_the_document() -> None:
    assert [w.ids.tolist() for w in shard_of(DOCUMENTS, context=4, tokens={"long": "truncate"}).windows] == [
        [5, 6, 7, 1],
        [8, 9, 1, 20],
        [1, 30, 31, 32],
        [33, 1],
    ]
    assert [w.ids.tolist() for w in shard_of(DOCUMENTS, context=4).windows][-1] == [33, 34, 1]


@pytest.mark.parametrize(("separator", "allowed"), [("eos", "'bos', 'none'"), ("bos", "'none'")])
def test_a_separator_that_nobody_names_is_refused_with_those_that_there_are(separator: str, allowed: str) -> None:
    tokens = {"batching": "concatenated", "separator": separator}
    bos = {"bos_id": 0} if separator == "eos" else {}
    with pytest.raises(RequestError, match=rf"tokens\.separator = '{separator}': .*allowed here are {allowed}"):
        tokeniser(None, data={"ids": "i"}, tokens=tokens, **bos)
    tokeniser(None, data={"ids": "i"}, tokens=tokens | {"batching": "sorted"})  # then there is nothing to join


def test_the_tokenizers_own_eos_comes_before_the_models() -> None:
    tool = tokeniser(byte_tokenizer(), tokens={"batching": "concatenated"}, eos_id=44)
    assert tool.shard(rows_of(["a"]), file=0).tokens.token.tolist() == [BOS, 66, EOS]


def test_what_documents_feed_to_the_model_counts_their_separators() -> None:
    tool = tokeniser(None, data={"ids": "i"}, tokens={"batching": "concatenated"}, **BOTH)
    assert tool.sizes(rows_of(DOCUMENTS, "i"), 10) == [(4, 4), (3, 3), (2, 2), (6, 6)]
