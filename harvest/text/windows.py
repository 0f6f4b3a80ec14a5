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
    """Token that opens every window which does not begin with it anyway; None: they begin with the text itself."""
    positions: Positions
    """`capture.positions`."""
    special: np.ndarray
    """bool [vocabulary]: special tokens."""
    excluded: np.ndarray
    """bool [vocabulary]: tokens that get no row."""
    stream: bool = False
    """Windows are cut from all documents joined together, instead of from each document."""
    separator: int | None = None
    """Token behind every document of a stream."""

    @property
    def later(self) -> int:
        """Document tokens of a window after the first."""
        return self.context - (self.window_bos is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The windows of some documents and the rows that come out of them."""

    windows: Sequence[Window]
    """In document order; those without a captured row are left out."""
    tokens: TokenColumns
    """Of the stored rows, in row order."""
    stored: np.ndarray | None
    """bool [captured rows]; None where all are stored."""
    captured: np.ndarray
    """int64 [N]: captured rows before each token, which is its own row where it has one."""
    rows: np.ndarray
    """int64 [D]: stored rows of each document."""
    fed: np.ndarray
    """int64 [D]: tokens of each document that the windows feed to the model, with the windows' own BOS."""


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
    flat: Flat, rules: WindowRules, spans: Sequence[TokenSpans] | None = None, also: np.ndarray | None = None
) -> Layout:
    """Cuts documents, or the stream of them, into windows and numbers the rows, in order and without gaps.

    `spans`: of each document where they are used. `also` bool [N]: tokens that are captured besides those that are
    stored. Context 8 with a BOS of its own for every later window cuts 21 tokens (a BOS and 20 more) as 8 + 7 + 6.
    """
    first, lead = _stream_cuts(flat, rules) if rules.stream else _document_cuts(flat, rules)
    keep = _selected(rules.positions, flat, spans or ()) & ~rules.excluded[flat.token]
    kept = np.flatnonzero(keep)
    before = np.concatenate([[0], np.cumsum(keep)])
    owner = flat.owner(kept)
    span, span_names = (None, ()) if spans is None else _numbered(flat, spans, kept)
    columns = TokenColumns(
        document=flat.document[owner],
        position=flat.position[kept],
        token=flat.token[kept],
        chunk=(_cut(first, kept) - _cut(first, flat.bounds[:-1])[owner]).astype(np.int32),
        special=rules.special[flat.token[kept]],
        variant=None if flat.variant is None else flat.variant[owner],
        span=span,
        span_names=span_names,
    )
    every, taken, captured = keep, kept, before
    if also is not None and (also & ~keep).any():
        every = keep | also
        taken, captured = np.flatnonzero(every), np.concatenate([[0], np.cumsum(every)])
    return Layout(
        windows=_windows(flat, first, lead, taken, captured, rules, flat.document[flat.owner(taken)]),
        tokens=columns,
        stored=None if every is keep else keep[taken],
        captured=captured[:-1],
        rows=np.diff(before[flat.bounds]),
        fed=_fed(flat, first, lead, captured),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """All documents behind one another, with their separators; of a contrast each sequence counts as one here."""

    document: np.ndarray
    """int64 [D]: ids."""
    lengths: np.ndarray
    """int64 [D]: tokens, the separator not counted."""
    bounds: np.ndarray
    """int64 [D + 1]: where each document begins, and the end."""
    token: np.ndarray
    """int32 [N]"""
    position: np.ndarray
    """int32 [N]: in the document."""
    variant: np.ndarray | None = None
    """int8 [D]: which sequence of its document each of these is; None where a document has one."""

    def owner(self, at: np.ndarray) -> np.ndarray:
        """Index of the document of each of these tokens."""
        return np.asarray(np.searchsorted(self.bounds, at, side="right") - 1)


def joined(
    documents: Sequence[int], ids: Sequence[np.ndarray], rules: WindowRules, variants: Sequence[int] | None = None
) -> Flat:
    """Documents by id and the tokens int32 [T] of each that run; `last` and numbers from the end count in those.

    In a stream the separator behind a document is a token of it at the position after its last, in no span.
    """
    separator = rules.separator if rules.stream else None
    end = np.array([] if separator is None else [separator], dtype=np.int32)
    lengths = np.array([len(array) for array in ids], dtype=np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths + len(end))])
    token = np.concatenate([np.empty(0, np.int32), *(part for array in ids for part in (array, end))])
    return Flat(
        document=np.array(documents, dtype=np.int64),
        lengths=lengths,
        bounds=bounds,
        token=token,
        position=(np.arange(len(token)) - np.repeat(bounds[:-1], np.diff(bounds))).astype(np.int32),
        variant=None if variants is None else np.array(variants, dtype=np.int8),
    )


def _document_cuts(flat: Flat, rules: WindowRules) -> tuple[np.ndarray, np.ndarray]:
    """int64 [W], bool [W]: the first token of each window, and whether a BOS of its own precedes it.

    The BOS of a document's first window is the document's.
    """
    lengths, starts = flat.lengths, flat.bounds[:-1]
    count = (np.maximum(lengths - rules.context, 0) + rules.later - 1) // rules.later + (lengths > 0)
    owner = np.repeat(np.arange(len(lengths)), count)
    chunk = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    first = starts[owner] + np.where(chunk == 0, 0, rules.context + (chunk - 1) * rules.later)
    return first, (chunk > 0) & (rules.window_bos is not None)


def _stream_cuts(flat: Flat, rules: WindowRules) -> tuple[np.ndarray, np.ndarray]:
    """As `_document_cuts`, of one window behind the other whatever they hold: all but the last are full.

    A window that happens to begin with a BOS gets no second one.
    """
    if rules.window_bos is None:
        first = np.arange(0, len(flat.token), rules.context)
        return first, np.zeros(len(first), dtype=bool)
    starts, leads, at = [], [], 0
    while at < len(flat.token):
        starts.append(at)
        leads.append(bool(flat.token[at] != rules.window_bos))
        at += rules.context - leads[-1]
    return np.array(starts, dtype=np.int64), np.array(leads, dtype=bool)


def _cut(first: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Index of the window of each of these tokens."""
    return np.asarray(np.searchsorted(first, at, side="right") - 1)


def _numbered(flat: Flat, spans: Sequence[TokenSpans], kept: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """int32 [n], the innermost span of each row counted in the names that some row has, sorted; -1 outside all."""
    all_names = sorted({name for of_document in spans for name in of_document.names})
    number = {name: i for i, name in enumerate(all_names)}
    codes = np.full(len(flat.token), -1, np.int32)
    for start, of_document in zip(flat.bounds.tolist(), spans):
        table = np.array([*(number[name] for name in of_document.names), -1], np.int32)  # -1 finds the last entry
        codes[start : start + len(of_document.innermost)] = table[of_document.innermost]
    codes = codes[kept]
    used = np.unique(codes[codes >= 0])
    codes = np.where(codes < 0, -1, np.searchsorted(used, codes)).astype(np.int32)
    return codes, tuple(all_names[i] for i in used.tolist())


def _windows(
    flat: Flat,
    first: np.ndarray,
    lead: np.ndarray,
    kept: np.ndarray,
    before: np.ndarray,
    rules: WindowRules,
    documents: np.ndarray,
) -> list[Window]:
    """`kept`, `documents` [n]: token and document of each row; `before` [N + 1]: rows before each token."""
    own_bos = np.array([] if rules.window_bos is None else [rules.window_bos], dtype=np.int32)
    stop = np.append(first[1:], len(flat.token))
    windows = []
    for a, b, led in zip(first.tolist(), stop.tolist(), lead.tolist()):
        row, end = int(before[a]), int(before[b])
        if row == end:
            continue
        windows.append(
            Window(
                ids=np.concatenate([own_bos, flat.token[a:b]]) if led else flat.token[a:b],
                keep=(kept[row:end] - a + led).astype(np.int32),
                row=row,
                document=int(documents[row]),
                documents=documents[row:end] if rules.stream else None,
            )
        )
    return windows


def _fed(flat: Flat, first: np.ndarray, lead: np.ndarray, before: np.ndarray) -> np.ndarray:
    stop = np.append(first[1:], len(flat.token))[: len(first)]
    runs = before[stop] > before[first]
    token_runs = np.concatenate([[0], np.cumsum(np.repeat(runs, stop - first))])
    own = np.bincount(flat.owner(first[runs & lead]), minlength=len(flat.document))
    return np.asarray(np.diff(token_runs[flat.bounds]) + own)


def _selected(positions: Positions, flat: Flat, spans: Sequence[TokenSpans]) -> np.ndarray:
    """bool [N]: the tokens that `capture.positions` asks for, exclusions aside."""
    if positions == "all":
        return np.ones(len(flat.token), dtype=bool)
    if isinstance(positions, Mapping):
        if "every" in positions:
            return np.asarray(flat.position % positions["every"] == 0)
        if "sample" in positions:
            document = np.repeat(flat.document, np.diff(flat.bounds))
            return np.asarray(_uniform(document, flat.position) < positions["sample"])
    mask = np.zeros(len(flat.token), dtype=bool)
    if isinstance(positions, Mapping):
        for start, of_document in zip(flat.bounds.tolist(), spans):
            mask[start : start + len(of_document.chosen)] = of_document.chosen
        return mask
    wanted: tuple[int, ...] = {"first": (0,), "last": (-1,)}[positions] if isinstance(positions, str) else positions
    some = flat.lengths > 0
    for number in wanted:
        mask[(flat.bounds[:-1] + number + (flat.lengths if number < 0 else 0))[some]] = True
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
