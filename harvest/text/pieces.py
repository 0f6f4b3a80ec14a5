"""What each token id spells, in bytes, so that a text is found however it was cut into tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

SPECIAL = b"\xff"
"""Of a special token, and of an id without one: no byte of any text."""
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def pieces_of(tokenizer: Any) -> list[bytes]:
    """Token id -> the bytes that it adds to a text; `tokenizer`: of transformers, with the `tokenizers` backend."""
    vocabulary = tokenizer.get_vocab()
    special = {*tokenizer.all_special_ids}
    special |= {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    pieces = [SPECIAL] * (max(vocabulary.values(), default=-1) + 1)
    spell = _spelling(tokenizer)
    for token, i in vocabulary.items():
        if i not in special:
            pieces[i] = spell(token)
    return pieces


def _spelling(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = {} if backend is None else json.loads(backend.to_str()).get("decoder") or {}
    kinds = [decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", []))]
    added = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    if "ByteLevel" in kinds:
        values = _byte_values()
        return lambda token: (
            token.encode()
            if token in added or not all(sign in values for sign in token)
            else bytes(values[sign] for sign in token)
        )
    if "WordPiece" in kinds:
        return lambda token: token[2:].encode() if token.startswith("##") else f" {token}".encode()
    return lambda token: (
        bytes([int(found[1], 16)]) if (found := BYTE.fullmatch(token)) else token.replace("\u2581", " ").encode()
    )


def _byte_values() -> dict[str, int]:
    """How byte-level tokenizers write bytes: printable ones as themselves, the others from U+0100 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    values = {chr(value): value for value in printable}
    others: Sequence[int] = [value for value in range(256) if value not in set(printable)]
    return values | {chr(256 + number): value for number, value in enumerate(others)}
