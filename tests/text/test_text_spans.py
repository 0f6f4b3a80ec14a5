"""Spans: every token whose characters overlap one is found, by the tokenizer's own offsets; bad ones harm no other."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textcase import byte_ids, documents_of, rows_of, tokeniser
from tiny import CHAT_TEMPLATE, byte_tokenizer

from harvest.config import load_job
from harvest.errors import DocumentError, RequestError
from harvest.text import encode
from harvest.text.encode import Encoder
from harvest.text.spans import Span, phases_of_text, token_spans

BY_SPAN = {"capture": {"positions": {"span": ["x"]}}}


def span(name: str, start: int, end: int) -> dict[str, Any]:
    return {"name": name, "start": start, "end": end}


def shard_of(values: list[Any], spans: list[Any] | None = None, column: str = "text", **settings_of: Any) -> Any:
    data = {column if column != "text" else "text": column} | settings_of.pop("data", {})
    more = {} if spans is None else {"s": spans}
    if spans is not None:
        data["spans"] = "s"
    context = settings_of.pop("context", 4096)
    return tokeniser(data=data, context=context, **settings_of).shard(rows_of(values, column, **more), file=0)


def said(shard: Any) -> list[str | None]:
    names = shard.tokens.span_names
    return [None if code < 0 else names[code] for code in shard.tokens.span.tolist()]


def chat_of(messages: Any, template: str = CHAT_TEMPLATE, **settings_of: Any) -> Any:
    tokenizer = byte_tokenizer(chat_template=template)
    data = {"messages": "m"} | settings_of.pop("data", {})
    return tokeniser(tokenizer, data=data, context=4096, **settings_of).shard(rows_of([messages], "m"), file=0)


def text_by_span(shard: Any) -> dict[str, str]:
    """Name -> the bytes of its tokens, by the byte tokenizer's own table."""
    table = {number: byte for byte in range(256) for number in [byte_ids(chr(byte), bos=False)[0]] if byte < 128}
    out: dict[str, str] = {}
    for name, token in zip(said(shard), shard.tokens.token.tolist()):
        if name is not None:
            out[name] = out.get(name, "") + chr(table[token])
    return out


def turn(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


# ---- spans of a column -------------------------------------------------------------------------------------------


def test_the_tokens_of_a_text_span_are_stored_every_byte_of_a_character_and_no_other() -> None:
    shard = shard_of(["abécd", "abcdef"], [[span("x", 2, 4)], [span("y", 0, 1), span("x", 5, 6)]], **BY_SPAN)
    assert documents_of(shard) == {0: byte_ids("éc", bos=False), 1: byte_ids("f", bos=False)}
    assert shard.tokens.position.tolist() == [3, 4, 5, 6]  # <bos> a b, then the two bytes of é
    assert said(shard) == ["x"] * 4


def test_the_column_names_the_innermost_span_and_is_null_outside() -> None:
    spans = [span("all", 0, 6), span("mid", 1, 4), span("in", 2, 3), span("same", 2, 3), span("nothing", 5, 5)]
    shard = shard_of(["abcdef"], [spans])
    assert said(shard) == [None, "all", "mid", "in", "mid", "all", "all"]
    assert shard.tokens.span_names == ("all", "in", "mid")


def test_a_document_without_spans_is_null_throughout_and_without_the_asked_one_skipped_and_counted() -> None:
    values, spans = ["ab", "cd", "ef"], [None, [span("y", 0, 1)], [span("x", 1, 2)]]
    assert said(shard_of(values, spans)) == [None, None, None, None, "y", None, None, None, "x"]
    shard = shard_of(values, spans, **BY_SPAN)
    assert [(d.status, d.reason, d.rows) for d in shard.documents] == [
        ("skipped", "no token in span x", 0),
        ("skipped", "no token in span x", 0),
        ("stored", None, 1),
    ]


@pytest.mark.parametrize(
    "spans",
    [
        7,
        [7],
        [{"name": "x", "start": 0}],
        [span("", 0, 1)],
        [{"name": 3, "start": 0, "end": 1}],
        [span("x", -1, 1)],
        [span("x", 2, 1)],
        [span("x", 0, 4)],
        [{"name": "x", "start": 0.0, "end": 1}],
        [{"name": "x", "start": True, "end": 2}],
        "[not json",
    ],
)
def test_bad_spans_make_their_document_unusable_and_no_other(spans: Any) -> None:
    values, both = ["abc", "ok"], [spans, [span("x", 0, 1)]]
    with pytest.raises(DocumentError, match="spans not valid"):
        shard_of(values, both)
    shard = shard_of(values, both, data={"on_bad": "skip"})
    assert [(d.status, d.reason) for d in shard.documents] == [("skipped", "spans not valid"), ("stored", None)]
    assert said(shard) == [None, "x", None]


def test_one_span_and_json_text_are_read_as_a_list_is() -> None:
    given_spans = [[span("x", 1, 2)], span("x", 1, 2), json.dumps([span("x", 1, 2)]), json.dumps(span("x", 1, 2)), ""]
    shard = shard_of(["ab"] * 5, given_spans)
    assert said(shard) == [None, None, "x"] * 4 + [None] * 3


def test_the_column_of_spans_is_kept_only_when_asked() -> None:
    assert "s" not in shard_of(["ab"], [[span("x", 0, 1)]]).documents[0].kept
    kept = shard_of(["ab"], [[span("x", 0, 1)]], data={"keep": ["s"]}).documents[0].kept
    assert kept == {"s": [span("x", 0, 1)]}


@pytest.mark.parametrize("bos", ["auto", "always", "window", "never"])
def test_spans_of_ids_count_the_ids_as_given_whatever_becomes_of_their_bos(bos: str) -> None:
    shard = shard_of([[0, 0, 5, 6, 7]], [[span("x", 1, 4)]], column="ids", tokens={"bos": bos}, **BY_SPAN)
    assert documents_of(shard)[0] == ([0, 5, 6] if bos in ("auto", "never") else [5, 6])
    added = shard_of([[5, 6, 7]], [[span("x", 1, 2)]], column="ids", tokens={"bos": bos}, **BY_SPAN)
    assert added.tokens.token.tolist() == [6]
    assert added.tokens.position.tolist() == [1 if bos in ("auto", "never") else 2]


@pytest.mark.parametrize("bos", ["auto", "always", "window", "never"])
def test_spans_of_text_stay_on_their_characters_under_every_bos_policy(bos: str) -> None:
    shard = shard_of(["abcd"], [[span("x", 1, 3)]], tokens={"bos": bos}, **BY_SPAN)
    assert documents_of(shard)[0] == byte_ids("bc", bos=False)


def test_windows_and_truncation_leave_a_span_where_it_is() -> None:
    text, spans = "abcdefghij", [span("x", 5, 10)]
    shard = shard_of([text], [spans], context=4, tokens={"bos": "window"}, **BY_SPAN)
    assert documents_of(shard)[0] == byte_ids("fghij", bos=False)
    shard = shard_of([text, text], [spans, [span("x", 8, 9)]], context=8, tokens={"long": "truncate"}, **BY_SPAN)
    assert documents_of(shard) == {0: byte_ids("fg", bos=False)}
    assert shard.documents[1].reason == "no token in span x"


def test_excluded_tokens_leave_their_span_without_shifting_it() -> None:
    capture = {"positions": {"span": ["x"]}, "exclude": [byte_ids("b", bos=False)[0]]}
    shard = shard_of(["abc"], [[span("x", 0, 3)]], capture=capture)
    assert documents_of(shard)[0] == byte_ids("ac", bos=False)


@given(
    text=st.text("ab é\n的<eos>", max_size=40),
    cuts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=5),
    literal=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_every_token_is_in_exactly_the_spans_that_its_characters_overlap(
    text: str, cuts: list[tuple[int, int]], literal: bool
) -> None:
    if not text:
        return
    spans = [span(f"s{i}", *sorted((a % (len(text) + 1), b % (len(text) + 1)))) for i, (a, b) in enumerate(cuts)]
    parse = {"special_in_text": "literal" if literal else "parse"}
    plain = byte_tokenizer()(text, return_offsets_mapping=True, split_special_tokens=literal)
    for asked in ["s0", "s3"]:
        capture = {"positions": {"span": [asked]}}
        shard = shard_of([text], [spans], tokens=parse, capture=capture)
        wanted = [s for s in spans if s["name"] == asked]
        expected = [
            i
            for i, (a, b) in enumerate(plain["offset_mapping"])
            if b > a and any(a < s["end"] and b > s["start"] and s["end"] > s["start"] for s in wanted)
        ]
        assert shard.tokens.position.tolist() == expected
        assert shard.tokens.token.tolist() == [plain["input_ids"][i] for i in expected]


@given(
    widths=st.lists(st.integers(0, 3), max_size=12),
    cuts=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=4),
)
def test_searching_only_near_a_span_finds_what_comparing_every_token_finds(
    widths: list[int], cuts: list[tuple[int, int]]
) -> None:
    ends = np.cumsum([0, *widths])
    offsets = np.stack([ends[:-1], ends[1:]], axis=1)
    offsets = np.concatenate([[[0, 0]], offsets, [[0, 0]]])  # tokens of the tokenizer's own, without a place
    spans = [Span(name=f"s{i}", start=min(c), end=max(c)) for i, c in enumerate(cuts)]
    for asked in [s.name for s in spans]:
        (wanted,) = [s for s in spans if s.name == asked]
        expected = [
            bool(b > a and a < wanted.end and b > wanted.start and wanted.end > wanted.start) for a, b in offsets
        ]
        assert token_spans(spans, offsets, [asked]).chosen.tolist() == expected


# ---- long texts --------------------------------------------------------------------------------------------------


@given(words=st.lists(st.sampled_from(["the", "cat", "sat.", "1", "\n", "é", "mat,", "的是。我在"]), max_size=60))
@settings(max_examples=40, deadline=None)
def test_a_text_in_pieces_has_the_places_of_the_whole_text(words: list[str]) -> None:
    text = " ".join(words)
    tokenizer = byte_tokenizer(eos_at_end=True)
    plain = tokenizer(text, return_offsets_mapping=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "PIECE_CHARACTERS", 40)
        patch.setattr(encode, "CHECK_CHARACTERS", 16)
        (found,) = Encoder(tokenizer).encode_placed([text], add_special=True, literal=True)
    assert found[:, 0].tolist() == plain["input_ids"]
    own = [(a, b) for a, b in found[:, 1:].tolist() if b > a]
    assert own == [(a, b) for a, b in plain["offset_mapping"] if b > a]
    assert len(own) == len(found) - 2


# ---- phases of a text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "phases"),
    [
        ("Q <think> hm </think> A", {"prompt": "Q", "reasoning": "hm", "answer": "A"}),
        ("hm</think>\n\nA b", {"reasoning": "hm", "answer": "A b"}),
        ("<think>a</think>b</think>c", {"reasoning": "a</think>b", "answer": "c"}),
        ("hm</think> write <think> first", {"reasoning": "hm", "answer": "write <think> first"}),
        ("no thoughts", {}),
        ("only <think> opened", {}),
    ],
)
def test_a_text_with_the_mark_of_thinking_tells_its_phases(text: str, phases: dict[str, str]) -> None:
    assert {s.name: text[s.start : s.end] for s in phases_of_text(text)} == phases


def test_phases_of_a_text_can_be_asked_for_and_give_way_to_spans_of_the_column() -> None:
    answer = {"capture": {"positions": {"span": ["answer"]}}}
    shard = shard_of(["q<think>r</think>ab", "plain"], **answer)
    assert documents_of(shard) == {0: byte_ids("ab", bos=False)}
    assert shard.documents[1].reason == "no token in span answer"
    shard = shard_of(["q<think>r</think>ab"], [[span("answer", 0, 1)]], **answer)
    assert documents_of(shard) == {0: byte_ids("q", bos=False)}


def test_a_span_that_no_document_can_have_is_a_wrong_request() -> None:
    with pytest.raises(RequestError, match=r"'x' is no span of data\.text alone; .*allowed are prompt, reasoning"):
        shard_of(["a"], **BY_SPAN)
    with pytest.raises(RequestError, match=r"data\.ids alone"):
        shard_of([[1]], column="ids", capture={"positions": {"span": ["answer"]}})
    job = {"model": {"name": "m"}, "run": {"path": "r"}}
    with pytest.raises(RequestError, match="spans: allowed with text and ids"):
        load_job(job | {"data": {"path": "d", "messages": "m", "spans": "s"}})
    with pytest.raises(RequestError, match=r"capture\.positions"):
        load_job(job | {"data": {"path": "d"}, "capture": {"positions": {"span": []}}})


# ---- chats -------------------------------------------------------------------------------------------------------


def test_messages_are_spans_by_role_and_control_tokens_are_in_none() -> None:
    shard = chat_of([turn("be kind", "system"), turn("hi you"), turn("hello", "assistant")])
    assert text_by_span(shard) == {"system": "be kind", "user": "hi you", "assistant": "hello"}
    for role, text in [("system", "be kind"), ("user", "hi you"), ("assistant", "hello"), ("answer", "hello")]:
        picked = chat_of(
            [turn("be kind", "system"), turn("hi you"), turn("hello", "assistant")],
            capture={"positions": {"span": [role]}},
        )
        assert documents_of(picked)[0] == byte_ids(text, bos=False)


@pytest.mark.parametrize("content", ["user", "s", "e", "assistant\n", " u ", "<bos>", "r\nr"])
def test_a_text_that_occurs_elsewhere_in_the_rendering_is_found_in_its_own_place(content: str) -> None:
    messages = [turn(content), turn(content, "assistant"), turn(content), turn(content, "assistant")]
    shard = chat_of(messages)
    plain = chat_of([turn("@"), turn("@", "assistant"), turn("@"), turn("@", "assistant")])
    length = len(byte_ids(content.strip(), bos=False))
    lead = len(content) - len(content.lstrip())
    seen = [(p, n) for p, n in zip(shard.tokens.position.tolist(), said(shard)) if n]
    starts = [p for p, n in zip(plain.tokens.position.tolist(), said(plain)) if n]
    grown = len(byte_ids(content, bos=False)) - 1
    expected = [(p + k * grown + lead + i) for k, p in enumerate(starts) for i in range(length)]
    assert [p for p, _ in seen] == expected
    assert [n for _, n in seen] == [r for r in ("user", "assistant") * 2 for _ in range(length)]


def test_the_prompt_is_all_before_the_last_answer_or_everything_without_one() -> None:
    by_prompt = {"positions": {"span": ["prompt"]}}
    tokenizer = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    messages = [turn("hi"), turn("yes", "assistant")]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    before = tokenizer(rendered[: rendered.index("yes")], add_special_tokens=False)["input_ids"]
    assert documents_of(chat_of(messages, capture=by_prompt))[0] == before
    whole = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert documents_of(chat_of(messages[:1], capture=by_prompt))[0] == ids


def test_thinking_within_a_message_splits_it_into_reasoning_and_answer() -> None:
    shard = chat_of([turn("q"), turn("<think>\nhm\n</think>\n\nfour", "assistant")])
    assert text_by_span(shard) == {
        "user": "q",
        "reasoning": "hm",
        "answer": "four",
        "assistant": "<think>\n\n</think>\n\n",
    }


THINKING_TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% if m['reasoning_content'] %}{% set r = m['reasoning_content'] %}"
    "{% elif '</think>' in m['content'] %}{% set r = m['content'].split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% endif %}{% set c = m['content'].split('</think>')[-1].strip() %}"
    "{% if loop.last %}<think>\n{{ r }}\n</think>\n\n{% endif %}{{ c }}"
    "{% else %}{{ m['content'] }}{% endif %}<eos>{% endfor %}"
)
"""As Qwen 3's: it takes the thinking out of the last answer and puts it back, and drops that of earlier turns."""


def test_a_template_that_takes_thinking_apart_and_puts_it_back_still_tells_where_it_is() -> None:
    inside = chat_of([turn("q"), turn("<think>\nhm\n</think>\n\nfour", "assistant")], THINKING_TEMPLATE)
    beside = chat_of([turn("q"), turn("four", "assistant", reasoning_content="four?")], THINKING_TEMPLATE)
    assert text_by_span(inside)["answer"] == text_by_span(beside)["answer"] == "four"
    assert (text_by_span(inside)["reasoning"], text_by_span(beside)["reasoning"]) == ("hm", "four?")


def test_a_template_that_deletes_text_makes_the_chat_unusable() -> None:
    messages = [turn("q"), turn("<think>x</think>a", "assistant"), turn("p"), turn("b", "assistant")]
    shard = chat_of(messages, THINKING_TEMPLATE, data={"on_bad": "skip"})
    assert [d.reason for d in shard.documents] == ["message text missing from the rendering"]


def test_a_text_whose_place_is_in_doubt_has_no_span_and_is_refused_where_rows_are_chosen_by_span() -> None:
    counting = "{{ messages[0]['content'] }}{{ messages[0]['content'] | length }}{{ messages[0]['content'][:2] }}"
    assert said(chat_of([turn("ab")], counting)) == [None] * 5
    skipped = chat_of([turn("ab")], counting, data={"on_bad": "skip"}, capture={"positions": {"span": ["user"]}})
    assert skipped.documents[0].reason == "message text that cannot be located in the rendering"


def test_a_text_said_twice_by_the_template_is_in_its_span_both_times() -> None:
    shard = chat_of([turn("ab")], "{{ messages[0]['content'] }}-{{ messages[0]['content'] }}")
    assert said(shard) == ["user", "user", None, "user", "user"]


def test_parts_of_a_message_are_one_span_and_special_words_in_contents_keep_their_place() -> None:
    template = "{% for m in messages %}<bos>{% for p in m['content'] %}{{ p['text'] }}|{% endfor %}{% endfor %}"
    shard = chat_of([turn([{"type": "text", "text": "<eos>a"}, {"type": "text", "text": "é<bos>"}])], template)
    assert said(shard) == [None, *["user"] * len(byte_ids("<eos>a|é<bos>", bos=False)), None]
    assert shard.tokens.token.tolist() == [0, *byte_ids("<eos>a|é<bos>|", bos=False)]


@given(
    turns=st.lists(
        st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text("aeu <bos>é\n", min_size=1, max_size=12)),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=80, deadline=None)
def test_the_tokens_in_role_spans_are_those_of_the_messages_texts(turns: list[tuple[str, str]]) -> None:
    if turns[-1][0] == "user":
        turns = [*turns, ("system", "z")]
    shard = chat_of([turn(text, role) for role, text in turns])
    expected: list[str | None] = []
    for role, text in turns:
        bare = text.strip()
        before = text[: len(text) - len(text.lstrip())] if bare else text
        after = text[len(before) + len(bare) :]
        expected += [None] * (1 + len(role) + 1 + len(before.encode()))
        expected += [role] * len(bare.encode()) + [None] * (len(after.encode()) + 1)
    assert said(shard) == expected


def test_a_job_without_spans_has_no_column_and_one_of_chats_has() -> None:
    assert shard_of(["ab"]).tokens.span is None
    assert shard_of(["ab"], [None]).tokens.span is not None
    assert chat_of([turn("a")]).tokens.span is not None
