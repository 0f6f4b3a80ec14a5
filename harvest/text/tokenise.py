"""Rows of a source to the tokens of a shard: every document is either stored or skipped with a reason."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from harvest.errors import DocumentError, RequestError
from harvest.records import DOCUMENTS_PER_FILE, DocumentRow, ShardAnswers, ShardExamples, ShardText, SourceRow
from harvest.settings.direction import DirectionSettings
from harvest.settings.tables import CaptureSettings, ChatSettings, DataSettings, TokenSettings
from harvest.text import reasons
from harvest.text.answers import RightAnswers
from harvest.text.chat import ChatTemplate
from harvest.text.documents import Document, DocumentReader
from harvest.text.encode import Encoder
from harvest.text.examples import places
from harvest.text.pieces import pieces_of
from harvest.text.running import Running
from harvest.text.spans import (
    TokenSpans,
    asked_spans,
    doubtful_spans,
    require_span_source,
    spans_read,
    uses_spans,
)
from harvest.text.windows import Layout, WindowRules, joined, lay_out


class Rows(Protocol):
    """One pass over a slice of a source file."""

    ended: bool
    cursor: Mapping[str, Any] | None

    @property
    def digest(self) -> str:
        """Of the rows yielded so far."""
        ...

    def __iter__(self) -> Iterator[SourceRow]: ...


class Tokeniser:
    """Turns rows into the windows that the model reads, under one job's settings.

    `tokenizer` is a fast tokenizer of transformers, left as it was found; None serves `data.ids`.
    `context` and `vocab_size` (rows of the model's input embedding) are the resolved figures. `bos_id`, `eos_id` and
    `special_ids` speak for the tokenizer where there is none (from the model's config). `kept`: columns that documents
    keep, `data.keep` by default; `directions` look at theirs besides. `answers`: which one is right, where the
    model is asked for one at the end of each document.

    Raises RequestError for what can never work: text or chat without a fast tokenizer, chat without a
    template, a BOS policy without a BOS token, exclusions that name no token of the vocabulary.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        data: DataSettings,
        chat: ChatSettings,
        tokens: TokenSettings,
        capture: CaptureSettings,
        context: int,
        vocab_size: int,
        bos_id: int | None = None,
        eos_id: int | None = None,
        special_ids: Iterable[int] = (),
        directions: Sequence[DirectionSettings] = (),
        kept: Sequence[str] | None = None,
        answers: RightAnswers | None = None,
    ) -> None:
        require_span_source(data, capture, directions)
        asked, read = asked_spans(capture), spans_read(directions)
        encoder = _encoder(tokenizer, data, tokens)
        own_bos = None if tokenizer is None else tokenizer.bos_token_id
        bos = bos_id if own_bos is None else int(own_bos)
        if tokens.bos in ("always", "window"):
            _require_bos(bos, tokens, context, vocab_size)
        template = None
        if data.kind == "messages" and encoder is not None:
            guard = encoder.special_words if tokens.special_in_text == "literal" else None
            template = ChatTemplate(tokenizer, chat, column=data.columns[0], guard=guard, by_span=bool(asked or read))
        self.doubtful_spans = () if template is None else doubtful_spans((*asked, *read), template.source)
        """Names of spans asked for that chats may have, and most have not."""
        stream = tokens.batching == "concatenated"
        separator = _separator(tokenizer, tokens, bos, eos_id, vocab_size) if stream else None
        special = _table(vocab_size, special_ids if tokenizer is None else _special_ids(tokenizer))
        if separator is not None:
            special[separator] = True
        self._data, self._tokens, self._context = data, tokens, context
        self._directions, self._kept = tuple(directions), data.keep if kept is None else kept
        self._answers, self._tokenizer = answers, tokenizer
        self._rules = WindowRules(
            context=context,
            window_bos=bos if tokens.bos == "window" else None,
            positions=capture.positions,
            special=special,
            excluded=_excluded(capture, special, bos, has_tokenizer=tokenizer is not None),
            stream=stream,
            separator=separator,
        )
        self._reader = DocumentReader(
            data=data,
            tokens=tokens,
            encoder=encoder,
            chat=template,
            positions=capture.positions,
            context=context,
            vocab_size=vocab_size,
            bos=bos,
            with_spans=uses_spans(data, capture, directions),
            asked=asked,
            named=read,
        )

    def pieces(self) -> list[bytes] | None:
        """Token id -> the bytes that it adds to a text; None without a tokenizer."""
        return None if self._tokenizer is None else pieces_of(self._tokenizer)

    def shard(
        self, rows: Rows, *, file: int, name: str = "", limit: int | None = None, max_tokens: int | None = None
    ) -> ShardText:
        """Tokenises a slice of file number `file` (called `name` in messages) whole.

        `limit`: at most so many documents, skipped ones counted. `max_tokens`: documents in order as long as
        the sum of the tokens that run stays within it; the first that would exceed it ends the shard. After
        either, `cut` is true and the digest covers the documents listed, no row further.

        Raises DocumentError under `data.on_bad = "fail"`; an empty document and one too short for
        `capture.positions` are skipped under either policy.
        """
        listed: list[DocumentRow] = []
        running = Running(self._directions, self._answers)
        strict = self._data.on_bad == "fail"
        count, cut = 0, limit == 0
        digest = rows.digest if limit == 0 or max_tokens is not None else ""
        for sequences in self._reader.read(rows, limit, each_digest=max_tokens is not None):
            ids = [self._reader.trimmed(sequence) for sequence in sequences]
            new = sum(len(of_one) for of_one in ids if of_one is not None)
            if max_tokens is not None and running.total + new > max_tokens:
                cut = True
                break
            row = sequences[0].row.row
            number, where = file * DOCUMENTS_PER_FILE + row, f"{name or f'file {file}'}, row {row}"
            self._refuse(sequences, number, where)
            for sequence, of_one in zip(sequences, ids):
                running.add(sequence, number, of_one, self._spans(sequence), strict=strict, where=where)
                listed.append(self._listed(sequence, number))
            count, digest = count + 1, sequences[0].digest
        else:
            cut = limit is not None and count == limit
            digest = digest if cut and max_tokens is not None else rows.digest
        layout, examples, answers = self._lay_out(running, strict=strict)
        stored = iter(layout.rows.tolist())
        return ShardText(
            documents=[replace(row, rows=next(stored)) if row.status == "stored" else row for row in listed],
            windows=layout.windows,
            tokens=layout.tokens,
            stored=layout.stored,
            examples=examples,
            answers=answers,
            forward_tokens=int(layout.fed.sum()),
            tokens_run=running.total,
            dropped_tokens=sum(row.tokens for row in listed if row.status == "stored") - running.total,
            source_digest=digest,
            ended=not cut and rows.ended,
            cursor=None if cut else rows.cursor,
            cut=cut,
            span_documents=running.met(self._reader.asked),
        )

    def _lay_out(
        self, running: Running, *, strict: bool
    ) -> tuple[Layout, dict[str, list[ShardExamples]], ShardAnswers | None]:
        """Windows and rows of the sequences that run, the examples of every direction in them, and the answers."""
        variants = None if self._data.contrast is None else running.variant
        flat = joined(running.document, running.ids, self._rules, variants)
        spans = running.spans
        found = [list(places(of, flat, spans, self._rules.excluded, strict=strict)) for of in running.labels]
        also = np.zeros(len(flat.token), bool)
        for place in itertools.chain.from_iterable(found):
            also[place.token] = True
        right = np.array(running.right, np.int64)
        asked = np.flatnonzero(right >= 0)
        last = flat.bounds[asked] + flat.lengths[asked] - 1
        also[last] = True
        layout = lay_out(flat, self._rules, spans if self._reader.with_spans else None, also if also.any() else None)
        answers = None
        if self._answers is not None:
            row = np.full(len(right), -1, np.int64)
            row[asked] = layout.captured[last]
            answers = ShardAnswers(row=row, right=right)
        examples = {
            of.settings.name: [place.examples(flat, layout.captured) for place in of_direction]
            for of, of_direction in zip(running.labels, found)
        }
        return layout, examples, answers

    def span_names(self, rows: Iterable[SourceRow], limit: int) -> list[frozenset[str]]:
        """The names of all spans of each of the first `limit` documents."""
        return [
            frozenset(name for one in sequences if one.spans is not None for name in one.spans.names)
            for sequences in self._reader.read(rows, limit)
        ]

    def sizes(self, rows: Iterable[SourceRow], limit: int) -> list[tuple[int, int]]:
        """(tokens fed to the model, rows stored) of each of the first `limit` documents; (0, 0) if unusable."""
        running = Running(self._directions, self._answers)
        count = 0
        for sequences in self._reader.read(rows, limit):
            for one in sequences:
                ids = self._reader.trimmed(one)
                if ids is not None:
                    running.add(one, count, ids, self._spans(one), strict=False)
            count += 1
        layout, _, _ = self._lay_out(running, strict=False)
        sizes = np.zeros((count, 2), np.int64)
        np.add.at(sizes, np.array(running.document, np.int64), np.stack([layout.fed, layout.rows], axis=1))
        return [(fed, stored) for fed, stored in sizes.tolist()]

    def count(self, rows: Iterable[SourceRow], limit: int) -> list[int]:
        """Tokens that would be fed to the model, for each of the first `limit` documents; 0 if unusable."""
        return [tokens for tokens, _ in self.sizes(rows, limit)]

    def _spans(self, document: Document) -> list[TokenSpans]:
        """Of one usable document; nothing where the job uses none."""
        spans = self._reader.trimmed_spans(document)
        return [] if spans is None else [spans]

    def _refuse(self, sequences: Sequence[Document], number: int, where: str) -> None:
        """Raises DocumentError for a document that cannot be used, where that is no matter of skipping."""
        trouble = sequences[0].trouble
        if trouble is not None and self._data.on_bad == "fail" and not trouble.harmless:
            if len(sequences) == 1:  # of several the reason tells
                where = f"{where}, column {self._data.columns[0]!r}"
            seen = trouble.detail if trouble.reason == reasons.NOT_VALID else f"{where}; {trouble.detail}".rstrip("; ")
            raise DocumentError(number, trouble.reason, seen)

    def _listed(self, document: Document, number: int) -> DocumentRow:
        tokens = 0 if document.ids is None else len(document.ids)
        trouble = document.trouble
        reason = trouble.reason if trouble is not None else None
        if trouble is None and self._tokens.long == "truncate" and tokens > self._context:
            reason = reasons.TRUNCATED
        wanted = self._kept or ()
        ours = {*self._data.columns, self._data.spans}
        kept = {k: v for k, v in document.row.values.items() if k not in ours or k in wanted}
        status = "stored" if trouble is None else "skipped"
        return DocumentRow(
            document=number,
            variant=document.variant,
            tokens=tokens,
            rows=0,
            status=status,
            reason=reason,
            kept=kept,
        )


def _require_bos(bos: int | None, tokens: TokenSettings, context: int, vocab_size: int) -> None:
    if bos is None or not 0 <= bos < vocab_size:
        raise RequestError(
            f"tokens.bos = {tokens.bos!r}: the tokenizer has no BOS token of the model's vocabulary; "
            "allowed here are 'auto' and 'never'"
        )
    if tokens.bos == "window" and context < 2:
        raise RequestError(f"tokens.context = {context}: with tokens.bos = 'window' allowed are 2 tokens or more")


def _separator(
    tokenizer: Any, tokens: TokenSettings, bos: int | None, eos_id: int | None, vocab_size: int
) -> int | None:
    """The token that closes every document of a stream; None for none."""
    own_eos = None if tokenizer is None else tokenizer.eos_token_id
    found = {"eos": eos_id if own_eos is None else int(own_eos), "bos": bos, "none": None}
    token = found[tokens.separator]
    if tokens.separator != "none" and (token is None or not 0 <= token < vocab_size):
        allowed = [key for key, i in found.items() if key == "none" or (i is not None and 0 <= i < vocab_size)]
        raise RequestError(
            f"tokens.separator = {tokens.separator!r}: the tokenizer has no such token of the model's vocabulary; "
            f"allowed here are {', '.join(map(repr, allowed))}"
        )
    return token


def _excluded(capture: CaptureSettings, special: np.ndarray, bos: int | None, *, has_tokenizer: bool) -> np.ndarray:
    """bool [vocabulary]: tokens without a row."""
    size = len(special)
    excluded = np.zeros(size, dtype=bool)
    for item in capture.exclude:
        if isinstance(item, int):
            if not 0 <= item < size:
                raise RequestError(f"capture.exclude = {item}: allowed are token ids from 0 to {size - 1}")
            excluded[item] = True
        elif not has_tokenizer and (bos is None if item == "bos" else not special.any()):
            raise RequestError(f"capture.exclude = {item!r}: without a tokenizer allowed are token ids")
        elif item == "special":
            excluded |= special
        elif bos is not None:  # a tokenizer without a BOS has nothing to leave out
            excluded |= _table(size, [bos])
    return excluded


def _encoder(tokenizer: Any, data: DataSettings, tokens: TokenSettings) -> Encoder | None:
    """None for token ids, which need none and take any tokenizer, or none."""
    if data.kind == "ids":
        return None
    if tokenizer is None:
        named = f"data.{data.kind} = {data.columns[0]!r}" if data.contrast is None else "data.contrast"
        raise RequestError(f"tokens.tokenizer: the model has none, and {named} needs one")
    if not getattr(tokenizer, "is_fast", False):
        name = f"{tokens.tokenizer!r}" if tokens.tokenizer else "the model's"
        raise RequestError(
            f"tokens.tokenizer = {name}: {type(tokenizer).__name__} is not a fast tokenizer; "
            "allowed are those with a tokenizer.json"
        )
    return Encoder(tokenizer)


def _special_ids(tokenizer: Any) -> set[int]:
    """Special by role (BOS, EOS, ...) or as an added token."""
    return set(tokenizer.all_special_ids) | {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def _table(size: int, ids: Iterable[int]) -> np.ndarray:
    table = np.zeros(size, dtype=bool)
    table[[i for i in ids if 0 <= i < size]] = True
    return table
