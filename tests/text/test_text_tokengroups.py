"""Texts of tokens: one token each, known and once; spaces count."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from harvest.errors import RequestError
from harvest.settings.direction import DirectionSettings
from harvest.text.tokengroups import group_ids


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words that puts its own tokens around a text."""
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "good": 2, "bad": 3, "great": 4}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", cls_token="[CLS]")


def settings(positive: list[Any], negative: list[Any], **more: Any) -> DirectionSettings:
    groups = {"positive": {"tokens": positive}, "negative": {"tokens": negative}}
    return DirectionSettings.model_validate({"name": "d", **groups, **more})


def test_ids_come_in_the_order_given() -> None:
    assert group_ids(settings(["great", "good"], ["bad"]), words(), 5) == ((4, 2), (3,))
    assert group_ids(settings([4, "good"], [1]), words(), 5) == ((4, 2), (1,))


@pytest.mark.parametrize(
    ("positive", "words_of_it"),
    [
        (["awful"], "positive.tokens: 'awful' is unknown to the tokenizer"),
        (["good good"], "'good good' is 2 tokens ('good' + 'good'); allowed are texts of one token"),
        ([" "], "' ' is 0 tokens"),
        (["good", " good"], "' good' is token 2, and so is 'good' in positive; allowed is each token once"),
    ],
)
def test_a_text_that_is_no_single_known_token_is_refused_by_name(positive: list[str], words_of_it: str) -> None:
    with pytest.raises(RequestError) as caught:
        group_ids(settings(positive, ["bad"]), words(), 5)
    assert words_of_it in str(caught.value)
    assert str(caught.value).startswith("direction 'd': ")


def test_a_token_beyond_the_table_is_refused() -> None:
    with pytest.raises(RequestError, match="'great' is token 4; the embedding has rows for 0 to 3"):
        group_ids(settings(["great"], ["bad"]), words(), 4)
