"""Long texts: encoded in pieces only where that changes no id."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textcase import byte_ids, documents_of, rows_of, tokeniser
from tiny import byte_tokenizer

from harvest.errors import RequestError
from harvest.text import encode
from harvest.text.encode import Encoder


def merging_tokenizer(**prefix: Any) -> Any:
    """Byte-level BPE trained on the spot, so that neighbours merge; with `prefix` words get a space before them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix), use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat and the other cat too, then that"] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PIECE_CHARACTERS", 40)
    monkeypatch.setattr(encode, "CHECK_CHARACTERS", 16)


MERGING = merging_tokenizer()
WORDS = st.lists(
    st.sampled_from(["the", "cat", "sat.", "1", "\n", "  ", "<eos>", "é", "mat,", "\n\ncat", "的是。我在"]),
    max_size=60,
)


@pytest.mark.parametrize("literal", [True, False])
@given(words=WORDS)
@settings(max_examples=60, deadline=None)
def test_pieces_give_the_ids_of_the_whole_text(literal: bool, words: list[str]) -> None:
    text = " ".join(words)
    expected = MERGING(text, split_special_tokens=literal)["input_ids"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "PIECE_CHARACTERS", 40)
        patch.setattr(encode, "CHECK_CHARACTERS", 16)
        ids = Encoder(MERGING).encode([text], add_special=True, literal=literal)[0]
    assert ids.tolist() == expected


@pytest.mark.usefixtures("short_pieces")
def test_a_long_text_really_is_cut_and_one_whose_tokenizer_minds_is_not() -> None:
    text = "the cat sat on the mat and the other cat too, " * 20
    pieces = list(encode._pieces(text, lambda t: encode._ids(MERGING.backend_tokenizer, [t], False)[0]))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) < 60

    lines = "cat;\n" * 100
    assert len(list(encode._pieces(lines, lambda t: encode._ids(MERGING.backend_tokenizer, [t], False)[0]))) > 5
    chinese = "的是我在。他们" * 40
    assert len(list(encode._pieces(chinese, lambda t: encode._ids(MERGING.backend_tokenizer, [t], False)[0]))) > 5

    minds = merging_tokenizer(prefix=True)
    # " cat" and "cat" are the same word to this one, so a cut before a space is harmless and the ids agree
    assert (
        Encoder(minds).encode([text], add_special=False, literal=True)[0].tolist()
        == (minds(text, add_special_tokens=False)["input_ids"])
    )
    from tokenizers import normalizers

    minds.backend_tokenizer.normalizer = normalizers.Prepend("_")
    whole = list(encode._pieces(text, lambda t: encode._ids(minds.backend_tokenizer, [t], False)[0]))
    assert whole == [text]


def test_the_backend_never_sees_more_of_a_huge_text_than_a_piece_and_its_neighbours_are_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def spy(backend: Any, texts: Any, add_special: bool) -> Any:
        seen.extend(map(len, texts))
        return plain(backend, texts, add_special)

    plain = encode._ids
    monkeypatch.setattr(encode, "_ids", spy)
    tool = tokeniser(tokens={"long": "truncate"}, context=16)
    shard = tool.shard(rows_of(["ab", "word " * 800_000, "cd"]), file=0)
    assert [d.tokens for d in shard.documents] == [3, 4_000_001, 3]
    assert documents_of(shard) == {0: byte_ids("ab"), 1: byte_ids("word word word "), 2: byte_ids("cd")}
    assert max(seen) < encode.PIECE_CHARACTERS + 100
    assert sum(seen) < 4_100_000


def test_a_tokenizer_that_cannot_be_copied_is_a_wrong_request_only_when_a_copy_is_needed() -> None:
    from tokenizers import pre_tokenizers

    class Own:
        """A part written in Python, which the backend cannot write down."""

        def pre_tokenize(self, text: Any) -> None:
            text.split(lambda _, piece: [piece])

    tokenizer = byte_tokenizer(chat_template="<bos>{{ messages[0]['content'] }}")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), pre_tokenizers.PreTokenizer.custom(Own())]
    )
    tool = tokeniser(tokenizer, data={"messages": "m"})
    assert documents_of(tool.shard(rows_of(["hi"], "m"), file=0)) == {0: byte_ids("hi")}
    with pytest.raises(RequestError, match=re.escape("tokens.special_in_text = 'literal'")):
        tool.shard(rows_of(["<bos>"], "m"), file=0)
