"""Chat messages: the template's tokens are control, the contents are text, and nothing of them is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textcase import byte_ids, documents_of, rows_of, tokeniser
from tiny import CHAT_TEMPLATE, byte_tokenizer

from harvest.errors import DocumentError, RequestError
from harvest.text.chat import FIXED_DATE

CHAT = {"messages": "m"}
PARTS_TEMPLATE = (
    "{% for m in messages %}<bos>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endif %}{% endfor %}"
)


def turn(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


def shard_of(values: list[Any], template: str = CHAT_TEMPLATE, **settings_of: Any) -> Any:
    data = CHAT | settings_of.pop("data", {})
    tokenizer = byte_tokenizer(chat_template=template)
    return tokeniser(tokenizer, data=data, context=4096, **settings_of).shard(rows_of(values, "m"), file=0)


def ids_of(value: Any, template: str = CHAT_TEMPLATE, **settings_of: Any) -> list[int]:
    return documents_of(shard_of([value], template, **settings_of))[0]


def reason_of(value: Any, template: str = CHAT_TEMPLATE, **settings_of: Any) -> str | None:
    shard = shard_of([value, [turn("ok")]], template, data={"on_bad": "skip"}, **settings_of)
    assert shard.documents[1].status == "stored"
    return shard.documents[0].reason


def test_a_template_that_writes_bos_gets_no_second_one_and_plain_text_still_gets_its_own() -> None:
    template = "<bos>{{ messages[0]['content'] }}"
    for bos in ("auto", "always", "window", "never"):
        assert ids_of([turn("hi")], template, tokens={"bos": bos}) == byte_ids("hi")
    bare = "{{ messages[0]['content'] }}"
    assert ids_of([turn("hi")], bare) == byte_ids("hi", bos=False)
    assert ids_of([turn("hi")], bare, tokens={"bos": "always"}) == byte_ids("hi")
    tokenizer = byte_tokenizer(chat_template=template)
    assert documents_of(tokeniser(tokenizer).shard(rows_of(["hi"]), file=0)) == {0: byte_ids("hi")}


def test_a_chat_is_the_templates_rendering_with_the_control_tokens_parsed() -> None:
    chat = [turn("be kind", "system"), turn("hi"), turn("hello", "assistant")]
    tokenizer = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    expected = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert ids_of(chat) == expected
    assert expected.count(0) == expected.count(1) == 3


def test_a_generation_prompt_follows_the_users_turn_unless_told_otherwise() -> None:
    user, done = [turn("hi")], [turn("hi"), turn("yes", "assistant")]
    prompt = [0, *byte_ids("assistant\n", bos=False)]
    with_prompt = {
        wanted: [ids_of(chat, chat={"generation_prompt": wanted})[-len(prompt) :] == prompt for chat in (user, done)]
        for wanted in ("auto", True, False)
    }
    assert with_prompt == {"auto": [True, False], True: [True, True], False: [False, False]}


def test_a_plain_string_is_one_user_turn() -> None:
    assert ids_of("hi") == ids_of([turn("hi")])


def test_a_system_text_comes_first_unless_the_chat_has_its_own() -> None:
    system = {"system": "be kind"}
    assert ids_of([turn("hi")], chat=system) == ids_of([turn("be kind", "system"), turn("hi")])
    own = [turn("be brief", "system"), turn("hi")]
    assert ids_of(own, chat=system) == ids_of(own)


def test_template_arguments_reach_the_template() -> None:
    template = "{{ messages[0]['content'] }}{% if loud %}!{% endif %}"
    assert ids_of([turn("hi")], template, chat={"kwargs": {"loud": True}}) == byte_ids("hi!", bos=False)


@pytest.mark.parametrize("key", ["tokenize", "add_generation_prompt", "return_tensors", "truncation"])
def test_template_arguments_cannot_change_what_rendering_is(key: str) -> None:
    with pytest.raises(RequestError, match=f"chat.kwargs.{key}"):
        shard_of([], chat={"kwargs": {key: True}})


def test_todays_date_is_always_the_same_one() -> None:
    asks = "\n{{ strftime_now('%d %b %Y, %A %-d.%m.%y %H:%M') }} {{ messages[0]['content'] }}"
    seen = FIXED_DATE.strftime("\n%d %b %Y, %A %-d.%m.%y %H:%M hi")
    assert ids_of([turn("hi")], asks) == byte_ids(seen, bos=False)
    variable = (
        "{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif -%}"
        "{{ date_string }} {{ messages[0]['content'] }}"
    )
    assert ids_of([turn("hi")], variable) == byte_ids(FIXED_DATE.strftime("%d %b %Y hi"), bos=False)
    given_date = {"kwargs": {"date_string": "1 May"}}
    assert ids_of([turn("hi")], variable, chat=given_date) == byte_ids("1 May hi", bos=False)


def test_the_fixed_date_leaves_the_whitespace_of_a_template_alone() -> None:
    for start in ("", "\n", "  ", "\n\n", "  {% if true %}x{% endif %}\n", "{%- if true %}x{% endif %}\n"):
        template = start + "{{ messages[0]['content'] }}{% if false %}{{ strftime_now('%d') }}{% endif %}"
        tokenizer = byte_tokenizer(chat_template=template)
        rendered = tokenizer.apply_chat_template([turn("hi")], tokenize=False)
        assert ids_of([turn("hi")], template) == byte_ids(rendered, bos=False)


# special tokens in contents


def test_a_message_that_spells_a_control_token_stays_text_and_the_templates_own_stay_control() -> None:
    chat = [turn("a<eos>b"), turn("<bos><bos>", "assistant")]
    tokens = [
        *(0, *byte_ids("user\na<eos>b", bos=False), 1),
        *(0, *byte_ids("assistant\n<bos><bos>", bos=False), 1),
    ]
    assert ids_of(chat) == tokens
    parsed = ids_of(chat, tokens={"special_in_text": "parse"})
    assert parsed == [0, *byte_ids("user\na", bos=False), 1, 67, 1, 0, *byte_ids("assistant\n", bos=False), 0, 0, 1]


def test_contents_that_a_template_trims_splits_or_repeats_stay_text_too() -> None:
    template = "{% for m in messages %}<bos>{{ m['content'] | trim }}<eos>{{ m['content'].split('|')[-1] }}{% endfor %}"
    assert ids_of([turn("  x|<eos> ")], template) == [
        0,
        *byte_ids("x|<eos>", bos=False),
        1,
        *byte_ids("<eos> ", bos=False),
    ]


def test_private_use_characters_in_messages_cannot_pose_as_control_tokens() -> None:
    marks = "".join(chr(code) for code in (0x10F000, 0x10FFEF, 0x100000, 0x100001))
    for text in (f"<eos>{marks}", f"\U0010f000\U00100000<bos>\U0010ffef\U00100000{marks}"):
        assert ids_of([turn(text)], "<bos>{{ messages[0]['content'] }}<eos>") == [*byte_ids(text), 1]


PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=20)
TURNS = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), PLAIN), min_size=1, max_size=4)


@given(turns=TURNS)
@settings(max_examples=80, deadline=None)
def test_the_careful_path_equals_the_plain_one_where_no_content_spells_a_special_token(turns: Any) -> None:
    from harvest.text.encode import Encoder

    tokenizer = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    rendered = tokenizer.apply_chat_template([turn(text, role) for role, text in turns], tokenize=False)
    expected = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert Encoder(tokenizer).encode_marked(rendered, str).tolist() == expected


@given(turns=st.lists(st.text(st.sampled_from("<>beos/ "), max_size=12), min_size=1, max_size=3))
@settings(max_examples=80, deadline=None)
def test_only_the_template_makes_control_tokens_whatever_messages_spell(turns: list[str]) -> None:
    ids = ids_of([turn(text, "assistant") for text in turns], tokens={"bos": "never"})
    expected = []
    for text in turns:
        expected += [0, *byte_ids(f"assistant\n{text}", bos=False), 1]
    assert ids == expected


def test_a_tokenizer_with_a_prefix_space_and_greedy_special_tokens_is_encoded_as_a_whole() -> None:
    """Where pieces encoded one by one would each get a space at their start."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {
        w: i
        for i, w in enumerate(["<s>", "</s>", "<unk>", "\u2581hi", "hi", "\u2581", "<", "/", "s", ">", "\u2581you"])
    }
    backend = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>", fuse_unk=True, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    backend.add_special_tokens([AddedToken("<s>", rstrip=True), AddedToken("</s>", lstrip=True, special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}hi you<s> {{ m['content'] }} </s>{% endfor %}"
    plain = tokenizer("hi you<s> hi you </s>", add_special_tokens=False)["input_ids"]
    assert plain == [3, 10, 0, 4, 10, 1]
    tool = tokeniser(tokenizer, data=CHAT, chat={"generation_prompt": False})
    shard = tool.shard(rows_of([[turn("hi you")], [turn("hi you </s> you")]], "m"), file=0)
    spelled = [words[c] for c in "\u2581</s>"]
    assert documents_of(shard) == {0: plain, 1: [3, 10, 0, 4, 10, *spelled, 10, 1]}


# what cannot be rendered


def test_a_template_that_deletes_earlier_thinking_is_an_error_that_names_the_document() -> None:
    template = "{% for m in messages %}{{ m['content'].split('</think>')[-1] }}\n{% endfor %}"
    chat = [turn("why"), turn("<think>because</think>so", "assistant")]
    with pytest.raises(DocumentError, match=r"document 0 .*message text missing from the rendering"):
        shard_of([chat], template)
    assert reason_of(chat, template) == "message text missing from the rendering"


@pytest.mark.parametrize(
    ("chat", "template"),
    [
        (
            [turn("ab", "system"), turn("cd")],
            "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}",
        ),
        ([turn("ab"), turn("cd")], "{% for m in messages[::-1] %}{{ m['content'] }}{% endfor %}"),
        ([turn("answer", "assistant", reasoning_content="thought")], "{{ messages[0]['content'] }}"),
        ([turn("a" * 30)], "{{ messages[0]['content'][:20] }}"),
    ],
)
def test_text_that_is_dropped_moved_or_cut_is_missing(chat: Any, template: str) -> None:
    shard = shard_of([chat], template, data={"on_bad": "skip"})
    assert shard.documents[0].reason == "message text missing from the rendering"


def test_blanks_around_a_message_may_be_trimmed() -> None:
    assert ids_of([turn("  hi\n")], "<bos>{{ messages[0]['content'] | trim }}") == byte_ids("hi")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (5, "not chat messages"),
        ({"role": "user", "content": "hi"}, "not chat messages"),
        (["hi"], "not chat messages"),
        ([{"from": "human", "value": "hi"}], "not chat messages"),
        ([{"role": "user"}], "not chat messages"),
        ([turn(None)], "not chat messages"),
        ([turn(5)], "not chat messages"),
        ([turn("a\ud800b")], "broken unicode"),
        ("a\ud800b", "broken unicode"),
        ([], "empty"),
        ("", "empty"),
        (None, "null"),
        ([turn([{"type": "image"}])], "message parts that are not text"),
        ([turn([{"type": "text", "text": "hi"}])], "message parts that the chat template does not handle"),
    ],
)
def test_what_is_no_chat_is_skipped_with_its_reason(value: Any, reason: str) -> None:
    assert reason_of(value) == reason


def test_a_template_that_refuses_a_role_is_a_reason_and_its_words_are_told() -> None:
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no\nsystem') }}{% endif %}"
        "{{ messages[0]['content'] }}"
    )
    assert reason_of([turn("x", "system")], template) == "refused by the chat template"
    with pytest.raises(DocumentError, match="no system") as caught:
        shard_of([[turn("x", "system")]], template)
    assert "\n" not in str(caught.value)


def test_a_template_that_is_no_jinja_is_a_wrong_request() -> None:
    with pytest.raises(RequestError, match="chat template is not valid"):
        shard_of([], "{% for %}")


def test_text_parts_are_joined_where_the_template_handles_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ids_of([turn(parts)], PARTS_TEMPLATE) == byte_ids("ab")


def test_null_fields_of_a_table_are_not_seen_by_the_template() -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% if 'name' in m %}!{% endif %}{% endfor %}"
    assert ids_of([turn("hi", name=None)], template) == byte_ids("hi", bos=False)


def test_positions_from_the_end_of_a_chat_are_read_behind_the_templates_suffix() -> None:
    template = "{{ messages[0]['content'] }}<eos><eos><eos>"
    values = ["ab", "abcde", "abcdefghi"]
    for context in (64, 4):
        tool = tokeniser(
            byte_tokenizer(chat_template=template), data=CHAT, capture={"positions": [-1, -4]}, context=context
        )
        shard = tool.shard(rows_of(values, "m"), file=0)
        assert shard.tokens.position.tolist() == [p for text in values for p in (len(text) - 1, len(text) + 2)]
        assert shard.tokens.token.tolist() == [t for text in values for t in (byte_ids(text)[-1], 1)]
    short = tokeniser(
        byte_tokenizer(chat_template="{{ messages[0]['content'] }}"), data=CHAT, capture={"positions": [-4]}
    )
    assert [d.reason for d in short.shard(rows_of(values, "m"), file=0).documents] == [
        "too short for position -4",
        None,
        None,
    ]
