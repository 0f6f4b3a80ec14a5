"""The token that speaks for an answer: the first of what goes on a text, told from the other answers'."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import byte_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from harvest.errors import RequestError
from harvest.settings.tables import DataSettings
from harvest.text.answers import RightAnswers, answer_tokens


def found(tokenizer: Any, answers: dict[str, str], size: int = 10_000_000, literal: bool = True) -> dict[str, int]:
    return answer_tokens(tokenizer, answers, literal=literal, size=size)


def metaspace() -> PreTrainedTokenizerFast:
    """Words with the space before them, which is put before a text's first word, too (as in Llama 2)."""
    words = ["\u2581", "\u2581yes", "\u2581no", "yes", "no", "\n", ":", ".", "\u2581\n", "\u2581:", "<unk>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = [("\u2581", "yes"), ("\u2581", "no"), ("\u2581", "\n"), ("\u2581", ":")]
    vocabulary |= {letter: len(vocabulary) + i for i, letter in enumerate("yesno") if letter not in vocabulary}
    merges = [("y", "e"), ("ye", "s"), ("n", "o"), *merges]
    vocabulary |= {"ye": max(vocabulary.values()) + 1}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_it_is_the_first_token_without_a_bos() -> None:
    tokenizer = byte_tokenizer()
    assert found(tokenizer, {"1": "yes", "0": " no"}) == {
        "1": tokenizer.convert_tokens_to_ids("y"),
        "0": tokenizer.convert_tokens_to_ids("\u0120"),
    }


def test_it_is_encoded_as_what_goes_on_a_text_not_as_its_beginning() -> None:
    tokenizer = metaspace()
    begins = tokenizer("yes", add_special_tokens=False)["input_ids"][0]
    assert tokenizer.convert_ids_to_tokens([begins]) == ["\u2581yes"]
    goes_on = found(tokenizer, {"1": "yes", "0": " no"})
    assert tokenizer.convert_ids_to_tokens(list(goes_on.values())) == ["yes", "\u2581no"]


def test_text_that_spells_a_special_token_is_text_unless_it_is_parsed() -> None:
    tokenizer = byte_tokenizer()
    assert found(tokenizer, {"1": "<eos>", "0": "no"})["1"] == tokenizer.convert_tokens_to_ids("<")
    assert found(tokenizer, {"1": "<eos>", "0": "no"}, literal=False)["1"] == tokenizer.eos_token_id


def test_several_values_may_have_the_same_answer() -> None:
    assert len(set(found(byte_tokenizer(), {"a": "yes", "b": "no", "c": "yes"}).values())) == 2


@pytest.mark.parametrize(
    ("tokenizer", "size", "words"),
    [
        (byte_tokenizer(), 10_000, "answers.0 = 'you': begins with the token 'y' like 'yes'"),
        (byte_tokenizer(), 50, "answers.1 = 'yes': its first token"),
        (None, 10_000, "answers: need a fast tokenizer"),
    ],
    ids=str,
)
def test_answers_that_cannot_be_told_apart_are_refused(tokenizer: Any, size: int, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        found(tokenizer, {"1": "yes", "0": "you"}, size)
    assert words in str(caught.value)


def test_which_answer_is_right_is_said_by_the_column_or_by_the_sequence() -> None:
    by_column = RightAnswers(DataSettings(path="d"), "label", {"1": 0, "true": 1})
    assert [by_column({"label": value}, 0) for value in ("1", 1, True, None, "7")] == [0, 0, 1, -1, -1]
    by_sequence = RightAnswers(DataSettings(path="d", contrast=("good", "bad")), None, {"good": 1, "bad": 0})
    assert [by_sequence({}, variant) for variant in (0, 1)] == [1, 0]
