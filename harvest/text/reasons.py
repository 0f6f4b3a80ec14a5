"""Why a document cannot be used: the fixed words that the documents table, the counts and the errors share."""

from __future__ import annotations

from collections.abc import Sequence

NULL = "null"
EMPTY = "empty"
NOT_VALID = "not valid"
NOT_TEXT = "not text"
BROKEN_UNICODE = "broken unicode"
NOT_IDS = "not a list of ids"
BEYOND_VOCABULARY = "ids beyond the vocabulary"
NOT_MESSAGES = "not chat messages"
PARTS_NOT_TEXT = "message parts that are not text"
PARTS_UNKNOWN = "message parts that the chat template does not handle"
REFUSED = "refused by the chat template"
TEXT_MISSING = "message text missing from the rendering"
NOT_LOCATED = "message text that cannot be located in the rendering"
SPANS_NOT_VALID = "spans not valid"
TRUNCATED = "truncated"
"""Of a stored document: what lies beyond the context was left out."""
NON_FINITE = "non-finite values"
"""Of a stored document: some of its rows hold a NaN or an infinity, as the model computed them."""

_NO_EXAMPLE = "no example of direction "


def longer_than(tokens: int) -> str:
    """`tokens.long = "fail"` met a document beyond the context."""
    return f"longer than {tokens} tokens"


def too_short(position: int) -> str:
    """`capture.positions` asks for a token that the document does not have."""
    return f"too short for position {position}"


def without_span(names: Sequence[str]) -> str:
    """`capture.positions` asks for spans that cover no token of the document."""
    return f"no token in span {' or '.join(names)}"


def of_column(reason: str, column: str) -> str:
    """Of a document of two sequences, for the one that cannot be used."""
    return f"{reason} in {column!r}"


def no_example(direction: str) -> str:
    """A document that a direction cannot use."""
    return f"{_NO_EXAMPLE}{direction!r}"


def remedy(reason: str) -> str:
    """What to do about documents that end a run for that reason."""
    if reason.startswith(_NO_EXAMPLE):
        return "data.on_bad = 'skip' leaves such documents out of the direction, and counts them"
    return "data.on_bad = 'skip' leaves such documents out and lists them"


class UnusableError(Exception):
    """One document cannot be used; caught within this folder, where the policy decides what that means."""

    def __init__(self, reason: str, detail: str = "", *, harmless: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        """One of the words above."""
        self.detail = detail
        """What was seen, for the message of a failure."""
        self.harmless = harmless
        """Never a failure, only skipped: there was nothing in it to store."""


def require_text(text: str) -> None:
    """Raises UnusableError for half a surrogate pair, which no tokenizer takes and UTF-8 cannot hold."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnusableError(BROKEN_UNICODE, f"lone surrogate at character {error.start}") from None
