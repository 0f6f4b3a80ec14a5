"""Examples of directions: which group, weight and pair each document has, and the tokens where its state is read.

All of it is known before the forward. A document in doubt is refused by name, or counted and left out of the direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harvest.errors import DocumentError
from harvest.records import Read, ShardExamples
from harvest.settings.direction import DirectionSettings, plain_text
from harvest.text import reasons
from harvest.text.reasons import UnusableError
from harvest.text.spans import TokenSpans
from harvest.text.windows import Flat

A, B, NEITHER = 0, 1, -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What the columns of a row say of its document."""

    group: int
    """0 is A, 1 is B, -1 neither."""
    weight: float = 1.0
    pair: str | None = None
    held_out: bool | None = None
    trouble: UnusableError | None = None
    """Why it is in neither group, where that is no wish of the job's."""


def group_of(settings: DirectionSettings, values: Mapping[str, Any], variant: int = 0) -> int:
    """0, 1 or -1 by the text of the group's column; an empty cell is in no group, not even in the rest.

    Of a contrast by the sequence alone.
    """
    if settings.by_variant:
        return (A, B)[variant]
    value = values.get(settings.column or "")
    if value is None:
        return NEITHER
    text = cell_text(value)
    if text in (settings.positive or ()):
        return A
    if settings.negative == "rest":
        return B
    return B if settings.negative is not None and text in settings.negative else NEITHER


def cell_text(value: Any) -> str:
    """What a cell compares as."""
    return plain_text(value.item() if isinstance(value, np.generic) else value)


def label_of(settings: DirectionSettings, values: Mapping[str, Any], variant: int = 0) -> Label:
    """The label of a sequence; one that cannot be used is in neither group, and says why."""
    group = group_of(settings, values, variant)
    if group == NEITHER:
        if settings.negative is None:
            return Label(group=NEITHER)
        seen = values.get(settings.column or "")
        shown = "is empty" if seen is None else f"= {cell_text(seen)[:40]!r}"
        return _unusable(settings, f"{settings.column} {shown} is in no group: {_groups(settings)}")
    weight, pair, held_out = 1.0, None, None
    if settings.weight_column is not None:
        try:
            weight = float(values.get(settings.weight_column))  # type: ignore[arg-type]  # None is caught below
        except (TypeError, ValueError):
            weight = math.nan
        if not (math.isfinite(weight) and weight >= 0):
            seen = values.get(settings.weight_column)
            return _unusable(settings, f"{settings.weight_column} = {seen!r} is no weight (a number of at least 0)")
    if settings.pair_column is not None:
        key = values.get(settings.pair_column)
        if key is None:
            return _unusable(settings, f"{settings.pair_column} is empty, so it has no pair")
        pair = cell_text(key)
    if settings.holdout_column is not None:
        part = values.get(settings.holdout_column)
        held_out = part is not None and cell_text(part) == "test"
    return Label(group=group, weight=weight, pair=pair, held_out=held_out)


def _groups(settings: DirectionSettings) -> str:
    """What would be in one, for a message."""
    a, b = (", ".join(map(repr, values))[:80] for values in (settings.positive or (), settings.negative or ()))
    return f"A is {a}, B all other text" if settings.negative == "rest" else f"A is {a}, B is {b}"


def _unusable(settings: DirectionSettings, what: str) -> Label:
    return Label(group=NEITHER, trouble=UnusableError(reasons.no_example(settings.name), what))


@dataclass(slots=True)
class Labels:
    """The labels of a shard's sequences in one direction, one after the other."""

    settings: DirectionSettings
    document: list[int] = field(default_factory=list)
    variant: list[int] = field(default_factory=list)
    label: list[Label] = field(default_factory=list)
    answers: Callable[[Mapping[str, Any], int], int] | None = None
    """Which answer is right for a row's values and a variant, -1 for none; where the direction asks."""
    slot: list[int] = field(default_factory=list)
    """Place among the sequences that run; -1 for a skipped one, which is here to keep its pair from being made."""
    unknown: int = 0

    def add(
        self, document: int, variant: int, values: Mapping[str, Any], slot: int, *, strict: bool, where: str = ""
    ) -> None:
        """The next sequence. Raises DocumentError for one in doubt where that is not to be counted only."""
        label = label_of(self.settings, values, variant)
        if label.group != NEITHER and self.answers is not None and self.answers(values, variant) < 0:
            seen = cell_text(values.get(self.settings.column or ""))
            label = _unusable(self.settings, f"{self.settings.column} = {seen[:40]!r} has no answer in [answers]")
        if slot < 0 and (label.group == NEITHER or not self.settings.paired):
            return
        if label.group == NEITHER:
            if strict and label.trouble is not None:
                raise _error(document, label.trouble, where)
            self.unknown += 1
            return
        self.document.append(document)
        self.variant.append(variant)
        self.label.append(label)
        self.slot.append(slot)


def _error(document: int, trouble: UnusableError, where: str = "") -> DocumentError:
    seen = f"{where}; {trouble.detail}" if where else trouble.detail
    return DocumentError(document, trouble.reason, seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the states of a direction are read, in tokens of all documents behind one another."""

    labels: Labels
    read: Read
    member: np.ndarray
    """int64 [n]: which of the labels each example has."""
    token: np.ndarray
    """int64 [m], rising."""
    owner: np.ndarray
    """int64 [m], rising: the example of each of these tokens."""
    context_first: np.ndarray | None = None
    """bool [n]: as in ShardExamples."""

    def examples(self, flat: Flat, row: np.ndarray) -> ShardExamples:
        """The same in captured rows; `row` int64 [N]: of each token."""
        labels = [self.labels.label[i] for i in self.member.tolist()]
        position = np.full(len(labels), -1, np.int32)
        position[self.owner] = flat.position[self.token]  # the last one of each stays
        settings, document = self.labels.settings, np.array(self.labels.document, np.int64)[self.member]
        pair = tuple(label.pair or "" for label in labels) if settings.pair_column is not None else None
        if settings.by_variant and settings.paired:
            pair = tuple(map(str, document.tolist()))
        return ShardExamples(
            read=self.read,
            document=document,
            variant=np.array(self.labels.variant, np.int8)[self.member],
            position=position,
            group=np.array([label.group for label in labels], np.int8),
            weight=np.array([label.weight for label in labels], np.float64),
            pair=pair,
            held_out=None if settings.holdout_column is None else np.array([bool(label.held_out) for label in labels]),
            sequence=np.array(self.labels.slot, np.int64)[self.member],
            rows=row[self.token],
            owner=self.owner,
            context_first=self.context_first,
            unknown=self.labels.unknown,
        )


def places(
    labels: Labels, flat: Flat, spans: Sequence[TokenSpans], excluded: np.ndarray, *, strict: bool
) -> Iterator[Places]:
    """Read by read. `excluded` bool [vocabulary]: tokens that are left out of `mean`, `all` and spans.

    Raises DocumentError for a document without the place asked for, unless it is to be counted only.
    """
    slot = np.array(labels.slot, np.int64)
    for read in labels.settings.reads:
        context_first = None
        if read.kind in ("at", "on"):
            length = np.append(flat.lengths, 0)[slot]  # -1 finds the 0
            at = _places(read.index, length)
            there = (at >= 0) & (at < length)
            if read.kind == "on":
                on = _places(read.on, length)
                there &= (on >= 0) & (on < length) & (on != at)
                context_first = on < at
            owner = np.flatnonzero(there)
            token = flat.bounds[slot[owner]] + at[owner]
            if read.kind == "on":
                both = np.stack([token, flat.bounds[slot[owner]] + on[owner]], axis=1)
                token, owner = np.sort(both, axis=1).reshape(-1), np.repeat(owner, 2)
        else:
            token, owner = _several(read, slot, flat, spans, excluded)
            there = np.isin(np.arange(len(slot)), owner)
        lacking = np.flatnonzero(~there & (slot >= 0))
        if strict and read.kind != "mean" and read.kind != "all" and len(lacking):
            first = int(lacking[0])
            raise _error(labels.document[first], _lack(labels.settings, read, int(flat.lengths[slot[first]])))
        if read.kind == "all":  # each token stands for itself
            yield Places(labels=labels, read=read, member=owner, token=token, owner=np.arange(len(owner)))
        else:
            yield Places(
                labels=labels,
                read=read,
                member=np.arange(len(slot)),
                token=token,
                owner=owner,
                context_first=context_first,
            )


def _places(index: int, length: np.ndarray) -> np.ndarray:
    """int64 [n]: a place counted from the front or the end of documents of these lengths; it may lie outside."""
    return length + index if index < 0 else np.full(len(length), index)


def _several(
    read: Read, slot: np.ndarray, flat: Flat, spans: Sequence[TokenSpans], excluded: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a document that are read together, and whose they are."""
    member = np.full(len(flat.lengths), -1, np.int64)
    member[slot[slot >= 0]] = np.flatnonzero(slot >= 0)
    document = np.repeat(np.arange(len(flat.lengths)), np.diff(flat.bounds))
    wanted = ~excluded[flat.token] & (member[document] >= 0) & (flat.position < flat.lengths[document])
    if read.kind == "span":
        inside = np.zeros(len(flat.token), bool)
        for start, of_document in zip(flat.bounds.tolist(), spans):
            found = of_document.named[read.span]
            inside[start : start + len(found)] = found
        wanted &= inside
    token = np.flatnonzero(wanted)
    return token, member[document[token]]


def _lack(settings: DirectionSettings, read: Read, length: int) -> UnusableError:
    what = f"no token in span {read.span}"
    if read.kind == "at":
        what = f"position {read.index} of {length} tokens"
    elif read.kind == "on":
        what = f"position {read.index} on position {read.on} of {length} tokens, which must be two tokens"
    return UnusableError(reasons.no_example(settings.name), f"read: {what}")
