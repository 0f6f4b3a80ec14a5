"""Groups of tokens by their texts: each text is one token of the vocabulary, and each token is in one group once."""

from __future__ import annotations

from typing import Any

from harvest.errors import RequestError
from harvest.settings.direction import DirectionSettings


def group_ids(settings: DirectionSettings, tokenizer: Any, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of A and of B in the order given; `rows`: how many tokens the embedding has.

    A text is encoded as it stands, without the tokens that a tokenizer puts around one. Raises RequestError for a text
    that is no or several tokens or unknown, for an id beyond the table, a token that comes twice, and groups of
    different size where they are paired.
    """
    seen: dict[int, str] = {}
    groups: list[tuple[int, ...]] = []
    for setting, tokens in zip(("positive", "negative"), settings.tokens):
        ids = []
        for token in tokens:
            asked = f"direction {settings.name!r}: {setting}.tokens: {token!r}"
            found = _id_of(token, tokenizer, rows, asked)
            if found in seen:
                raise RequestError(f"{asked} is token {found}, and so is {seen[found]}; allowed is each token once")
            seen[found] = f"{token!r} in {setting}"
            ids.append(found)
        groups.append(tuple(ids))
    a, b = groups
    if settings.pair == "order" and len(a) != len(b):
        raise RequestError(
            f"direction {settings.name!r}: pair = 'order' of {len(a)} tokens in positive and {len(b)} in negative; "
            "allowed are as many of each"
        )
    return a, b


def _id_of(token: str | int, tokenizer: Any, rows: int, asked: str) -> int:
    if isinstance(token, str):
        if tokenizer is None:
            raise RequestError(f"{asked}: the model has no tokenizer; allowed are token ids")
        ids = tokenizer(token, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            shown = " + ".join(map(repr, tokenizer.convert_ids_to_tokens(ids)))
            raise RequestError(f"{asked} is {len(ids)} tokens ({shown}); allowed are texts of one token, and token ids")
        token = int(ids[0])
        if token == tokenizer.unk_token_id:
            raise RequestError(f"{asked} is unknown to the tokenizer; allowed are texts of one token, and token ids")
    if not 0 <= token < rows:
        raise RequestError(f"{asked} is token {token}; the embedding has rows for 0 to {rows - 1}")
    return token
