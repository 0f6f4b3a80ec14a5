"""Rows to token ids, document by document: what is wrong with one is kept beside it and never spoils a neighbour."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from harvest.records import SourceRow
from harvest.settings.tables import DataSettings, TokenSettings
from harvest.text import reasons
from harvest.text.chat import ChatTemplate
from harvest.text.encode import Encoder
from harvest.text.reasons import UnusableError, require_text
from harvest.text.spans import Span, TokenSpans, phases_of_text, read_spans, token_spans, with_phases
from harvest.text.windows import Positions, require_positions

GROUP_DOCUMENTS = 1024
GROUP_CHARACTERS = 2**22
"""Texts are encoded in groups, as many threads as the backend likes; a group ends at either figure."""


@dataclass(slots=True, kw_only=True)
class Document:
    """A row, or one of its two texts, on its way: the text waits for the group to be encoded, then becomes ids."""

    row: SourceRow
    digest: str
    variant: int
    """Which sequence of the document."""
    text: str | None = None
    restore: Callable[[str], str] | None = None
    ids: np.ndarray | None = None
    named: Sequence[Span] = ()
    """Spans in characters of the text, or in tokens of the ids as given."""
    spans: TokenSpans | None = None
    """The same for the tokens; None where the job uses no spans."""
    trouble: UnusableError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentReader:
    """How the documents of one job are tokenised."""

    data: DataSettings
    tokens: TokenSettings
    encoder: Encoder | None
    """None for a job of token ids without a tokenizer."""
    chat: ChatTemplate | None
    """Renders `data.messages`; None for text and ids."""
    positions: Positions
    """A document too short for one of them is of no use."""
    context: int
    vocab_size: int
    bos: int | None
    """The BOS token; known where `tokens.bos` is `always` or `window`."""
    with_spans: bool = False
    """Spans are read or found, and said of every token."""
    asked: tuple[str, ...] = ()
    """Names of spans whose tokens alone are stored; empty for other positions."""
    named: tuple[str, ...] = ()
    """Names of spans that directions read at."""

    def read(self, rows: Any, limit: int | None, *, each_digest: bool = False) -> Iterator[Sequence[Document]]:
        """The sequences of each row in order, tokenised group by group; never a row more than `limit`."""
        group: list[Document] = []
        characters = 0
        for row in islice(iter(rows), limit):
            digest = rows.digest if each_digest else ""
            for variant in range(len(self.data.columns)):
                document = Document(row=row, digest=digest, variant=variant)
                try:
                    self._prepare(document)
                except UnusableError as error:
                    document.trouble = error
                group.append(document)
                characters += len(document.text or "")
            if len(group) >= GROUP_DOCUMENTS or characters >= GROUP_CHARACTERS:
                yield from self._by_row(self._encoded(group))
                group, characters = [], 0
        yield from self._by_row(self._encoded(group))

    def _by_row(self, group: Sequence[Document]) -> Iterator[Sequence[Document]]:
        """A row with a sequence that cannot be used is of no use whole, for a reason that names the column."""
        columns = self.data.columns
        for at in range(0, len(group), len(columns)):
            sequences = group[at : at + len(columns)]
            troubled = [document for document in sequences if document.trouble is not None]
            if self.data.contrast is not None and troubled:
                worst = min(troubled, key=lambda document: document.trouble is None or document.trouble.harmless)
                trouble = worst.trouble
                assert trouble is not None
                if trouble.reason != reasons.NOT_VALID:  # which concerns the row
                    reason = reasons.of_column(trouble.reason, columns[worst.variant])
                    trouble = UnusableError(reason, trouble.detail, harmless=trouble.harmless)
                for document in sequences:
                    document.trouble = trouble
            yield sequences

    def _prepare(self, document: Document) -> None:
        """Fills in the text to encode, or the ids; raises UnusableError."""
        if document.row.error is not None:
            raise UnusableError(reasons.NOT_VALID, document.row.error)
        column = self.data.columns[document.variant]
        value = document.row.values.get(column)
        if value is None:
            raise UnusableError(reasons.NULL)
        if self.data.kind == "ids":
            document.ids = self._in_vocabulary(_as_ids(value))
            document.named = self._read_spans(document, len(document.ids))
        elif self.chat is not None:
            rendering = self.chat.render(value)
            document.text, document.restore, document.named = rendering.text, rendering.restore, rendering.spans
        elif not isinstance(value, str):
            raise UnusableError(reasons.NOT_TEXT, f"{type(value).__name__} in column {column!r}")
        elif not value:
            raise UnusableError(reasons.EMPTY, harmless=True)
        else:
            require_text(value)
            if self.with_spans:
                document.named = with_phases(self._read_spans(document, len(value)), phases_of_text(value))
            document.text = value

    def _read_spans(self, document: Document, length: int) -> list[Span]:
        return [] if self.data.spans is None else read_spans(document.row.values.get(self.data.spans), length)

    def _encoded(self, group: Sequence[Document]) -> Sequence[Document]:
        """The group with ids or a trouble in the place of every text."""
        if self.encoder is not None:
            self._encode(self.encoder, group)
        for document in group:
            if document.trouble is None:
                try:
                    self._settle(document)
                except UnusableError as error:
                    document.trouble = error
        return group

    def _encode(self, encoder: Encoder, group: Sequence[Document]) -> None:
        """Ids, and the tokens' places where spans are used, for every text of a group."""
        itself = self.chat is None and self.tokens.bos != "never"
        plain = [d for d in group if d.text is not None and d.restore is None]
        texts = [d.text for d in plain if d.text is not None]
        literal = (self.tokens.special_in_text == "literal") and self.chat is None
        encode = encoder.encode_placed if self.with_spans else encoder.encode
        for document, found in zip(plain, encode(texts, add_special=itself, literal=literal)):
            self._take(document, found)
            if len(found) <= (encoder.added_by_itself if itself else 0):
                document.trouble = UnusableError(reasons.EMPTY, harmless=True)
        for document in group:
            if document.text is not None and document.restore is not None:
                self._take(document, encoder.encode_marked_placed(document.text, document.restore))
            document.text = None

    def _take(self, document: Document, found: np.ndarray) -> None:
        """`found`: ids [T], or [T, 3] with the characters of each token."""
        if found.ndim == 1:
            document.ids = found
        else:
            document.ids = np.ascontiguousarray(found[:, 0])
            if self.with_spans:
                document.spans = token_spans(document.named, found[:, 1:], self.asked, self.named)

    def _settle(self, document: Document) -> None:
        """Vocabulary, BOS policy, spans and length of one document; raises UnusableError."""
        assert document.ids is not None
        if self.with_spans and document.spans is None:  # ids: a token is one character wide
            at = np.arange(len(document.ids))
            places = np.stack([at, at + 1], axis=1)
            document.spans = token_spans(document.named, places, self.asked, self.named)
        ids, spans = self._with_bos(self._in_vocabulary(document.ids), document.spans)
        document.ids, document.spans, document.named = ids, spans, ()
        if self.tokens.long == "fail" and len(ids) > self.context:
            raise UnusableError(reasons.longer_than(self.context), f"{len(ids)} tokens")
        fits = min(len(ids), self.context) if self.tokens.long == "truncate" else len(ids)
        require_positions(self.positions, fits)
        if self.asked and spans is not None and not spans.chosen[:fits].any():
            raise UnusableError(reasons.without_span(self.asked), harmless=True)

    def _in_vocabulary(self, ids: np.ndarray) -> np.ndarray:
        low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise UnusableError(reasons.BEYOND_VOCABULARY, f"id {wrong}, allowed are 0 to {self.vocab_size - 1}")
        return ids.astype(np.int32, copy=False)

    def _with_bos(self, ids: np.ndarray, spans: TokenSpans | None) -> tuple[np.ndarray, TokenSpans | None]:
        """Exactly one BOS at the start under `always` and `window`, also where two stood; else as they are."""
        if self.tokens.bos not in ("always", "window"):
            return ids, spans
        others = np.flatnonzero(ids != self.bos)
        lead = int(others[0]) if len(others) else len(ids)
        ids = np.concatenate([np.array([self.bos], dtype=np.int32), ids[lead:]])
        return ids, None if spans is None else spans.behind_one(lead)

    def trimmed(self, document: Document) -> np.ndarray | None:
        """The tokens that run; None for an unusable document."""
        if document.trouble is not None or document.ids is None:
            return None
        return document.ids[: self._most]

    @property
    def _most(self) -> int | None:
        return self.context if self.tokens.long == "truncate" else None

    def trimmed_spans(self, document: Document) -> TokenSpans | None:
        """What spans say of `trimmed`; None where the job uses none."""
        return None if document.spans is None else document.spans.up_to(self._most)


def _as_ids(value: Any) -> np.ndarray:
    """int64 [T] of a list of whole numbers (or an array of them); raises UnusableError for anything else."""
    if isinstance(value, list | tuple):
        if not all(issubclass(kind, int | np.integer) and kind is not bool for kind in set(map(type, value))):
            raise UnusableError(reasons.NOT_IDS, "it holds other things than whole numbers")
    elif not hasattr(value, "__array__"):
        raise UnusableError(reasons.NOT_IDS, f"{type(value).__name__} instead of a list")
    if len(value) == 0:
        raise UnusableError(reasons.EMPTY, harmless=True)
    array = np.asarray(value)
    if array.dtype == object or (array.dtype.kind == "u" and array.dtype.itemsize == 8):
        raise UnusableError(reasons.BEYOND_VOCABULARY, "an id of more than 63 bits")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UnusableError(reasons.NOT_IDS, f"an array of {array.dtype} with {array.ndim} dimensions")
    return array.astype(np.int64)
