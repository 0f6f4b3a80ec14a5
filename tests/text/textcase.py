"""Rows, settings and a tokeniser for the tests of this folder; a source of rows that keeps its own books."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hypothesis import strategies as st
from tiny import byte_tokenizer

from harvest.config import Job
from harvest.records import ShardText, SourceRow, Window
from harvest.text.tokenise import Tokeniser

VOCABULARY = 300


class ListRows:
    """Rows of a list; `read` counts how far it was read, the digest is of the row numbers yielded."""

    def __init__(self, rows: Iterable[SourceRow]) -> None:
        self._rows = list(rows)
        self.read = 0
        self.ended = False
        self.cursor: Mapping[str, Any] | None = {"row": 0}

    def __iter__(self) -> Iterator[SourceRow]:
        for row in self._rows:
            self.read += 1
            self.cursor = {"row": self.read}
            yield row
        self.ended = True

    @property
    def digest(self) -> str:
        return digest_of([row.row for row in self._rows[: self.read]])


def digest_of(rows: Iterable[int]) -> str:
    return hashlib.sha256(repr(list(rows)).encode()).hexdigest()


def rows_of(values: Iterable[Any], column: str = "text", first: int = 0, **more: Any) -> ListRows:
    """One row per value; a SourceRow stays as it is, a list in `more` gives a further column."""
    out = []
    for number, value in enumerate(values):
        if isinstance(value, SourceRow):
            out.append(value)
        else:
            others = {key: column_values[number] for key, column_values in more.items()}
            out.append(SourceRow(row=first + number, values={column: value} | others))
    return ListRows(out)


def tokeniser(
    tokenizer: Any = "byte",
    *,
    data: Mapping[str, Any] | None = None,
    chat: Mapping[str, Any] | None = None,
    tokens: Mapping[str, Any] | None = None,
    capture: Mapping[str, Any] | None = None,
    context: int = 64,
    vocab_size: int = VOCABULARY,
    **more: Any,
) -> Tokeniser:
    job = Job.model_validate(
        {
            "model": {"name": "m"},
            "data": {"path": "d"} | dict(data or {}),
            "run": {"path": "r"},
            "chat": dict(chat or {}),
            "tokens": dict(tokens or {}),
            "capture": dict(capture or {}),
        }
    )
    return Tokeniser(
        byte_tokenizer() if tokenizer == "byte" else tokenizer,
        data=job.data,
        chat=job.chat,
        tokens=job.tokens,
        capture=job.capture,
        context=context,
        vocab_size=vocab_size,
        **more,
    )


def documents_of(shard: ShardText) -> dict[int, list[int]]:
    """Document -> its stored token ids, in row order."""
    out: dict[int, list[int]] = {}
    for document, token in zip(shard.tokens.document.tolist(), shard.tokens.token.tolist()):
        out.setdefault(document, []).append(token)
    return out


def byte_ids(text: str, bos: bool = True) -> list[int]:
    """T-BYTE by hand: the byte symbols sorted by code point come after <bos> and <eos>."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbol = {byte: byte for byte in printable} | {byte: 256 + n for n, byte in enumerate(others)}
    order = {code: n + 2 for n, code in enumerate(sorted(symbol.values()))}
    return [0] * bos + [order[symbol[byte]] for byte in text.encode()]


def windows_of(lengths: list[int], **capture: Any) -> list[Window]:
    """One window per length; each token names its window and place: 1 + 300 * window + position."""
    values = [[1 + 300 * n + p for p in range(length)] for n, length in enumerate(lengths)]
    tool = tokeniser(None, data={"ids": "i"}, capture=capture, context=300, vocab_size=10**6)
    return list(tool.shard(rows_of(values, "i"), file=0).windows)


lengths_of_windows = st.lists(st.integers(1, 30), max_size=25)
kept = st.sampled_from([{}, {"positions": "last"}, {"positions": {"every": 3}}, {"exclude": [1, 2, 301, 905]}])
