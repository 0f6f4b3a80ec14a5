"""Windows: consecutive slices of a document's tokens, and which of their rows are stored, known before any forward.

Shapes: N tokens of all documents together, D documents, n stored rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harvest.records import TokenColumns, Window
from harvest.text.reasons import UnusableError, too_short
from harvest.text.spans import TokenSpans

Positions = str | tuple[int, ...] | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRules:
    """How documents are cut and which of their tokens are stored."""

    context: int
    """Longest window, its own BOS included."""
    window_bos: int | None
    """Token that opens every window after a document's first; None: they begin with the text itself."""
    positions: Positions
    """`capture.positions`."""
    special: np.ndarray
    """bool [vocabulary]: special tokens."""
    excluded: np.ndarray
    """bool [vocabulary]: tokens that get no row."""

    @property
    def later(self) -> int:
        """Document tokens of a window after the first."""
        return self.context - (self.window_bos is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The windows of some documents and the rows that come out of them."""

    windows: Sequence[Window]
    """In document order; those without a kept position are left out."""
    tokens: TokenColumns
    """In row order."""
    rows: np.ndarray
    """int64 [D]: rows of each document."""


def require_positions(positions: Positions, length: int) -> None:
    """Raises UnusableError for a document too short for one of the asked positions.

    Positions count in the tokens that run: with `tokens.long = "truncate"` -1 is the last token kept, since
    the ones behind it are never computed.
    """
    if isinstance(positions, tuple):
        for position in positions:
            if not -length <= position < length:
                raise UnusableError(too_short(position), f"{length} tokens", harmless=True)


def lay_out(
    documents: Sequence[int],
    ids: Sequence[np.ndarray],
    rules: WindowRules,
    spans: Sequence[TokenSpans] | None = None,
) -> Layout:
    """Cuts every document into windows and numbers the rows, in order and without gaps.

    `documents`: ids; `ids`: int32 [T] each, the tokens that run; `spans`: of each where they are used. Context 8
    with a BOS of its own for every later window cuts 21 tokens (a BOS and 20 more) as 8 + 7 + 6.
    """
    lengths = np.array([len(array) for array in ids], dtype=np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    starts = bounds[:-1]
    token = np.concatenate([np.empty(0, np.int32), *ids])
    position = (np.arange(len(token)) - np.repeat(starts, lengths)).astype(np.int32)
    document = np.array(documents, dtype=np.int64)
    if isinstance(rules.positions, Mapping) and "span" in rules.positions:
        keep = np.concatenate([np.empty(0, bool), *(of_document.chosen for of_document in spans or ())])
    else:
        keep = _selected(rules.positions, document, lengths, starts, position)
    keep = keep & ~rules.excluded[token]
    kept = np.flatnonzero(keep)
    before = np.concatenate([[0], np.cumsum(keep)])
    span, span_names = (None, ()) if spans is None else _numbered(spans, kept)
    columns = TokenColumns(
        document=document[np.searchsorted(bounds, kept, side="right") - 1],
        position=position[kept],
        token=token[kept],
        chunk=(np.maximum(position[kept] - rules.context, -1) // rules.later + 1).astype(np.int32),
        special=rules.special[token[kept]],
        span=span,
        span_names=span_names,
    )
    windows = _windows(document, lengths, starts, token, kept, before, rules)
    return Layout(windows=windows, tokens=columns, rows=before[bounds[1:]] - before[starts])


def _numbered(spans: Sequence[TokenSpans], kept: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """int32 [n], the innermost span of each row counted in the names that some row has, sorted; -1 outside all."""
    all_names = sorted({name for of_document in spans for name in of_document.names})
    number = {name: i for i, name in enumerate(all_names)}
    found = [np.empty(0, np.int32)]
    for of_document in spans:
        table = np.array([*(number[name] for name in of_document.names), -1], np.int32)  # -1 finds the last entry
        found.append(table[of_document.innermost])
    codes = np.concatenate(found)[kept]
    used = np.unique(codes[codes >= 0])
    codes = np.where(codes < 0, -1, np.searchsorted(used, codes)).astype(np.int32)
    return codes, tuple(all_names[i] for i in used.tolist())


def _windows(
    document: np.ndarray,
    lengths: np.ndarray,
    starts: np.ndarray,
    token: np.ndarray,
    kept: np.ndarray,
    before: np.ndarray,
    rules: WindowRules,
) -> list[Window]:
    """`before` [N + 1]: rows before each token; `kept` [n]: the token of each row."""
    count = (np.maximum(lengths - rules.context, 0) + rules.later - 1) // rules.later + (lengths > 0)
    owner = np.repeat(np.arange(len(lengths)), count)
    chunk = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    first = starts[owner] + np.where(chunk == 0, 0, rules.context + (chunk - 1) * rules.later)
    stop = np.minimum(starts[owner] + rules.context + chunk * rules.later, (starts + lengths)[owner])
    own_bos = np.array([] if rules.window_bos is None else [rules.window_bos], dtype=np.int32)
    windows = []
    for a, b, c, number in zip(first.tolist(), stop.tolist(), chunk.tolist(), document[owner].tolist()):
        row, end = int(before[a]), int(before[b])
        if row == end:
            continue
        lead = own_bos if c else own_bos[:0]
        windows.append(
            Window(
                ids=np.concatenate([lead, token[a:b]]) if len(lead) else token[a:b],
                keep=(kept[row:end] - a + len(lead)).astype(np.int32),
                row=row,
                document=number,
            )
        )
    return windows


def _selected(
    positions: Positions, document: np.ndarray, lengths: np.ndarray, starts: np.ndarray, position: np.ndarray
) -> np.ndarray:
    """bool [N]: the tokens that `capture.positions` asks for, exclusions aside."""
    if positions == "all":
        return np.ones(len(position), dtype=bool)
    if isinstance(positions, Mapping):
        if "every" in positions:
            return np.asarray(position % positions["every"] == 0)
        return np.asarray(_uniform(np.repeat(document, lengths), position) < positions["sample"])
    wanted: tuple[int, ...] = {"first": (0,), "last": (-1,)}[positions] if isinstance(positions, str) else positions
    mask = np.zeros(len(position), dtype=bool)
    some = lengths > 0
    for number in wanted:
        mask[(starts + number + (lengths if number < 0 else 0))[some]] = True
    return mask


def _uniform(document: np.ndarray, position: np.ndarray) -> np.ndarray:
    """float64 [N] in [0, 1): a hash of (document, position), the same on every machine and in every batch."""
    mixed = _mix(_mix(document.astype(np.uint64)) ^ position.astype(np.uint64))
    return np.asarray((mixed >> np.uint64(11)) * 2.0**-53)


def _mix(value: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(value ^ (value >> np.uint64(31)))
