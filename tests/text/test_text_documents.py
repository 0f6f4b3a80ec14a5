"""Which documents are stored, skipped or refused, and that no document harms another."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textcase import byte_ids, digest_of, documents_of, rows_of, tokeniser
from tiny import byte_tokenizer

from harvest.errors import DocumentError, RequestError
from harvest.records import SourceRow

IDS = {"data": {"ids": "ids"}}


def outcomes(shard: Any) -> list[tuple[int, str, str | None]]:
    return [(row.document, row.status, row.reason) for row in shard.documents]


def test_text_gives_the_tokenizers_own_ids_with_positions_and_the_document_id_of_its_file() -> None:
    tokenizer = byte_tokenizer()
    texts = ["ab", "  \n", "é€😀", "c"]
    shard = tokeniser(tokenizer).shard(rows_of(texts, first=7), file=3)
    expected = {3 * 2**40 + 7 + i: tokenizer(text)["input_ids"] for i, text in enumerate(texts)}
    assert documents_of(shard) == expected == {3 * 2**40 + 7 + i: byte_ids(t) for i, t in enumerate(texts)}
    assert shard.tokens.position.tolist() == [p for ids in expected.values() for p in range(len(ids))]
    assert shard.tokens.special.tolist() == [i in (0, 1) for ids in expected.values() for i in ids]
    assert (
        [d.tokens for d in shard.documents] == [d.rows for d in shard.documents] == [len(i) for i in expected.values()]
    )
    assert shard.ended
    assert shard.cursor == {"row": 4}
    assert not shard.cut


def test_a_null_a_broken_and_an_empty_text_are_listed_and_move_no_other_id() -> None:
    bad = SourceRow(row=4, values={}, error="x.jsonl line 5: not valid JSON")
    rows = rows_of(["ab", None, "a\ud800b", "", bad, 7, "cd"])
    shard = tokeniser(data={"on_bad": "skip"}).shard(rows, file=0)
    assert outcomes(shard) == [
        (0, "stored", None),
        (1, "skipped", "null"),
        (2, "skipped", "broken unicode"),
        (3, "skipped", "empty"),
        (4, "skipped", "not valid"),
        (5, "skipped", "not text"),
        (6, "stored", None),
    ]
    assert documents_of(shard) == {0: byte_ids("ab"), 6: byte_ids("cd")}
    assert [d.rows for d in shard.documents] == [3, 0, 0, 0, 0, 0, 3]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "document 1 (reviews.csv, row 1, column 'text'): null"),
        ("a\ud800b", "broken unicode"),
        (3.5, "not text"),
        (SourceRow(row=1, values={}, error="x.jsonl line 2: torn"), "document 1 (x.jsonl line 2: torn): not valid"),
    ],
)
def test_an_unusable_document_fails_by_default_and_is_named_with_its_place(value: Any, words: str) -> None:
    with pytest.raises(DocumentError) as caught:
        tokeniser().shard(rows_of(["ab", value, "cd"]), file=0, name="reviews.csv")
    assert words in str(caught.value)
    assert caught.value.document == 1
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("on_bad", ["fail", "skip"])
@pytest.mark.parametrize("kind", ["text", "ids", "messages"])
def test_only_empty_documents_end_cleanly_with_no_rows_under_either_policy(on_bad: str, kind: str) -> None:
    tokenizer = byte_tokenizer(chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    values: list[Any] = {"text": ["", ""], "ids": [[], ()], "messages": [[], ""]}[kind]
    shard = tokeniser(tokenizer, data={kind: "c", "on_bad": on_bad}).shard(rows_of(values, "c"), file=0)
    assert outcomes(shard) == [(0, "skipped", "empty"), (1, "skipped", "empty")]
    assert len(shard.tokens) == len(shard.windows) == shard.forward_tokens == 0
    assert shard.tokens.document.dtype == np.int64


@pytest.mark.parametrize("bos", ["auto", "always", "never"])
def test_a_text_that_a_tokenizer_dissolves_is_empty_and_one_of_blanks_is_not(bos: str) -> None:
    from tokenizers import normalizers

    tokenizer = byte_tokenizer(eos_at_end=True)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    shard = tokeniser(tokenizer, tokens={"bos": bos}).shard(rows_of(["\u200b\u200b", "   "]), file=0)
    assert outcomes(shard) == [(0, "skipped", "empty"), (1, "stored", None)]


def test_no_documents_at_all_are_a_shard_of_nothing() -> None:
    shard = tokeniser().shard(rows_of([]), file=0)
    assert (shard.documents, shard.windows, len(shard.tokens), shard.ended, shard.cut) == ([], [], 0, True, False)


def test_flat_id_lists_stay_three_documents_each_from_position_zero() -> None:
    shard = tokeniser(None, **IDS).shard(rows_of([[5], [9], [17, 23]], "ids"), file=0)
    assert documents_of(shard) == {0: [5], 1: [9], 2: [17, 23]}
    assert shard.tokens.position.tolist() == [0, 0, 0, 1]
    assert not shard.tokens.special.any()


def test_ids_of_every_integer_kind_are_taken_as_they_are() -> None:
    values = [[5, 299], (5, 299), np.array([5, 299], np.uint16), [np.int64(5), 299]]
    shard = tokeniser(None, **IDS).shard(rows_of(values, "ids"), file=0)
    assert documents_of(shard) == {number: [5, 299] for number in range(4)}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([5, 300], "ids beyond the vocabulary"),
        ([-1, 5], "ids beyond the vocabulary"),
        ([2**70], "ids beyond the vocabulary"),
        ([2**63], "ids beyond the vocabulary"),
        ([2**32 + 5], "ids beyond the vocabulary"),
        ([5, None], "not a list of ids"),
        ([5.0], "not a list of ids"),
        ([True], "not a list of ids"),
        ([1, True], "not a list of ids"),
        (["5"], "not a list of ids"),
        ([[5]], "not a list of ids"),
        ("[5]", "not a list of ids"),
        (5, "not a list of ids"),
        (np.array([[5]]), "not a list of ids"),
        (np.array([0.5]), "not a list of ids"),
        (None, "null"),
    ],
)
def test_wrong_ids_are_refused_by_their_reason_and_spoil_no_neighbour(value: Any, reason: str) -> None:
    shard = tokeniser(None, data={"ids": "ids", "on_bad": "skip"}).shard(rows_of([[1], value, [2]], "ids"), file=0)
    assert outcomes(shard) == [(0, "stored", None), (1, "skipped", reason), (2, "stored", None)]
    with pytest.raises(DocumentError, match=reason):
        tokeniser(None, **IDS).shard(rows_of([[1], value, [2]], "ids"), file=0)


def test_a_token_that_the_model_has_no_embedding_for_is_found_in_text_too() -> None:
    with pytest.raises(DocumentError, match="id 67, allowed are 0 to 66"):
        tokeniser(vocab_size=67).shard(rows_of(["a", "b"]), file=0)


def test_the_same_ids_come_out_of_text_of_a_list_of_ids_and_of_one_document_alone() -> None:
    texts = ["ab", "hello there", "c"]
    for bos in ("auto", "never", "always", "window"):
        together = documents_of(tokeniser(tokens={"bos": bos}).shard(rows_of(texts), file=0))
        for number, text in enumerate(texts):
            alone = documents_of(tokeniser(tokens={"bos": bos}).shard(rows_of([text], first=number), file=0))
            given_ids = byte_ids(text, bos=bos != "never")
            by_ids = tokeniser(None, data={"ids": "i"}, tokens={"bos": bos}, bos_id=0).shard(
                rows_of([given_ids], "i", first=number), file=0
            )
            assert alone == documents_of(by_ids) == {number: together[number]} == {number: given_ids}


def test_kept_columns_come_with_the_document_as_read() -> None:
    rows = rows_of(["ab", ""], label=[1, None], more=[{"x": [1]}, "y"])
    shard = tokeniser(data={"keep": ["label", "more"]}).shard(rows, file=0)
    assert [d.kept for d in shard.documents] == [{"label": 1, "more": {"x": [1]}}, {"label": None, "more": "y"}]
    shard = tokeniser(data={"keep": ["text"]}).shard(rows_of(["ab"]), file=0)
    assert shard.documents[0].kept == {"text": "ab"}


# BOS and special tokens


def test_bos_policy_gives_exactly_one_always_and_none_never() -> None:
    bare, own = byte_tokenizer(bos=False), byte_tokenizer(bos=True)
    ids = {
        (name, bos): documents_of(tokeniser(t, tokens={"bos": bos}).shard(rows_of(["ab"]), file=0))[0]
        for name, t in (("bare", bare), ("own", own))
        for bos in ("auto", "always", "window", "never")
    }
    assert ids["bare", "auto"] == ids["bare", "never"] == ids["own", "never"] == [66, 67]
    assert ids["own", "auto"] == [0, 66, 67]
    assert {tuple(ids[n, b]) for n in ("bare", "own") for b in ("always", "window")} == {(0, 66, 67)}


def test_always_never_leaves_two_where_text_or_ids_begin_with_one_already() -> None:
    parse = {"bos": "always", "special_in_text": "parse"}
    assert documents_of(tokeniser(tokens=parse).shard(rows_of(["<bos>ab"]), file=0)) == {0: [0, 66, 67]}
    always = tokeniser(None, data={"ids": "i"}, tokens={"bos": "always"}, bos_id=0)
    shard = always.shard(rows_of([[0, 5], [5], [0, 0, 5, 0], [0]], "i"), file=0)
    assert documents_of(shard) == {0: [0, 5], 1: [0, 5], 2: [0, 5, 0], 3: [0]}


def test_text_that_spells_a_special_token_is_ordinary_text_unless_asked_otherwise() -> None:
    tokenizer = byte_tokenizer()
    before = tokenizer.backend_tokenizer.to_str()
    shard = tokeniser(tokenizer).shard(rows_of(["a<eos>b"]), file=0)
    assert documents_of(shard) == {0: byte_ids("a<eos>b")}
    assert shard.tokens.special.tolist() == [True] + [False] * 7
    parsed = tokeniser(tokenizer, tokens={"special_in_text": "parse"}).shard(rows_of(["a<eos>b"]), file=0)
    assert documents_of(parsed) == {0: [0, 66, 1, 67]}
    assert parsed.tokens.special.tolist() == [True, False, True, False]
    assert tokenizer.backend_tokenizer.to_str() == before
    assert tokenizer("a<eos>b")["input_ids"] == [0, 66, 1, 67]


def test_truncation_and_padding_in_the_tokenizers_file_cut_and_pad_nothing_and_stay_its_own() -> None:
    tokenizer = byte_tokenizer(pad=True)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=6, pad_id=1, pad_token="<eos>")
    before = tokenizer.backend_tokenizer.to_str()
    shard = tokeniser(tokenizer).shard(rows_of(["abcdefg", "a"]), file=0)
    assert documents_of(shard) == {0: byte_ids("abcdefg"), 1: byte_ids("a")}
    assert tokenizer.backend_tokenizer.to_str() == before


def test_without_a_tokenizer_the_models_ids_say_what_is_special() -> None:
    shard = tokeniser(None, **IDS, special_ids=(0, 1, 900)).shard(rows_of([[0, 5, 1]], "ids"), file=0)
    assert shard.tokens.special.tolist() == [True, False, True]


# limits


def test_a_limit_counts_skipped_documents_and_reads_no_row_further() -> None:
    rows = rows_of(["ab", "", "cd", None])
    shard = tokeniser().shard(rows, file=0, limit=3)
    assert [d.document for d in shard.documents] == [0, 1, 2]
    assert (shard.cut, shard.ended, shard.cursor, rows.read) == (True, False, None, 3)
    assert shard.source_digest == digest_of([0, 1, 2])
    whole = tokeniser().shard(rows_of(["ab", "", "cd"]), file=0, limit=4)
    assert (whole.cut, whole.ended) == (False, True)


def test_a_limit_of_nothing_reads_nothing() -> None:
    rows = rows_of(["ab"])
    shard = tokeniser().shard(rows, file=0, limit=0)
    assert (shard.documents, shard.cut, rows.read, shard.source_digest) == ([], True, 0, digest_of([]))


@pytest.mark.parametrize(("budget", "kept"), [(2, 0), (3, 1), (5, 1), (6, 3), (8, 3), (9, 4), (100, 4)])
def test_max_tokens_takes_documents_in_order_while_the_sum_stays_within(budget: int, kept: int) -> None:
    shard = tokeniser().shard(rows_of(["ab", "cd", "", "ef"]), file=0, max_tokens=budget)
    assert [d.document for d in shard.documents] == list(range(kept))
    assert shard.cut == (kept < 4)
    assert shard.tokens_run == sum(d.tokens for d in shard.documents) <= budget
    assert shard.source_digest == digest_of(range(kept))


def test_a_bad_document_behind_the_cut_is_not_this_shards_failure() -> None:
    shard = tokeniser().shard(rows_of(["ab", "cd", None]), file=0, max_tokens=3)
    assert len(shard.documents) == 1


@given(
    lengths=st.lists(st.integers(0, 9), max_size=12),
    budget=st.integers(0, 40),
    long=st.sampled_from(["chunk", "truncate"]),
)
@settings(max_examples=60, deadline=None)
def test_a_budget_spent_shard_by_shard_stores_what_one_shard_would(lengths: list[int], budget: int, long: str) -> None:
    texts = ["x" * length for length in lengths]
    tool = tokeniser(tokens={"long": long, "bos": "never"}, context=4)
    whole = tool.shard(rows_of(texts), file=0, max_tokens=budget)
    half, left, parts = len(texts) // 2, budget, []
    for start, piece in ((0, texts[:half]), (half, texts[half:])):
        part = tool.shard(rows_of(piece, first=start), file=0, max_tokens=left)
        parts += part.documents
        left -= part.tokens_run
        if part.cut:
            break
    assert parts == list(whole.documents)


def test_groups_of_documents_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["ab", "", "c" * 40, "d", "ef", "g"] * 3
    whole = tokeniser().shard(rows_of(texts), file=0, max_tokens=60)
    monkeypatch.setattr("harvest.text.documents.GROUP_DOCUMENTS", 2)
    monkeypatch.setattr("harvest.text.documents.GROUP_CHARACTERS", 30)
    grouped = tokeniser().shard(rows_of(texts), file=0, max_tokens=60)
    assert grouped.documents == whole.documents
    assert documents_of(grouped) == documents_of(whole)
    assert grouped.source_digest == whole.source_digest


def test_the_plan_counts_what_would_be_fed_and_refuses_nothing() -> None:
    tool = tokeniser(tokens={"bos": "window"}, capture={"positions": "last"}, context=4)
    rows = rows_of(["ab", None, "abcdefgh", "", "zz"])
    assert tool.sizes(rows, 4) == [(3, 1), (0, 0), (3, 1), (0, 0)]
    assert rows.read == 4
    assert tokeniser(tokens={"bos": "window"}, context=4).count(rows_of(["abcdefgh"]), 256) == [4 + 4 + 3]


# requests that cannot work


@pytest.mark.parametrize(
    ("tokenizer", "settings_of", "words"),
    [
        (None, {}, "tokens.tokenizer: the model has none, and data.text = 'text'"),
        (None, {"data": {"messages": "m"}}, "data.messages = 'm'"),
        ("byte", {"data": {"messages": "m"}}, "data.messages = 'm': the tokenizer has no chat template"),
        (None, {"data": {"ids": "i"}, "tokens": {"bos": "always"}}, "tokens.bos = 'always'"),
        (None, {"data": {"ids": "i"}, "tokens": {"bos": "window"}}, "tokens.bos = 'window'"),
        ("byte", {"tokens": {"bos": "window"}, "context": 1}, "tokens.context = 1"),
        ("byte", {"capture": {"exclude": [300]}}, "capture.exclude = 300: allowed are token ids from 0 to 299"),
        (None, {"data": {"ids": "i"}, "capture": {"exclude": ["bos"]}}, "capture.exclude = 'bos'"),
        (None, {"data": {"ids": "i"}, "capture": {"exclude": ["special"]}}, "capture.exclude = 'special'"),
        (object(), {}, "not a fast tokenizer"),
    ],
)
def test_a_request_that_can_never_work_names_its_setting(tokenizer: Any, settings_of: Any, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        tokeniser(FakeSlow() if type(tokenizer) is object else tokenizer, **settings_of)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


class FakeSlow:
    """A tokenizer written in Python."""

    is_fast = False
    bos_token_id = 0
    all_special_ids = (0,)
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}


def test_token_ids_need_no_fast_tokenizer_and_take_what_is_special_from_any() -> None:
    shard = tokeniser(FakeSlow(), **IDS).shard(rows_of([[0, 5]], "ids"), file=0)
    assert shard.tokens.special.tolist() == [True, False]


def test_a_bos_policy_needs_a_bos_token_of_the_tokenizer() -> None:
    tokenizer = byte_tokenizer(bos=False)
    tokenizer.bos_token = None
    with pytest.raises(RequestError, match=r"tokens\.bos = 'always'"):
        tokeniser(tokenizer, tokens={"bos": "always"})
