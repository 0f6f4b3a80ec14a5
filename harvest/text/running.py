"""The sequences of a shard that run, in dataset order: one text of a document, or each of its two."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harvest.settings.direction import DirectionSettings
from harvest.text.answers import RightAnswers
from harvest.text.documents import Document
from harvest.text.examples import Labels
from harvest.text.spans import TokenSpans


class Running:
    """Gathers them, and what directions say of these and of skipped ones."""

    def __init__(self, directions: Sequence[DirectionSettings], answers: RightAnswers | None) -> None:
        self.labels = [Labels(settings, answers=answers if settings.needs_answers else None) for settings in directions]
        self._answers = answers
        self.right: list[int] = []
        """Which answer is right for each, -1 for none; empty where none is asked for."""
        self.document: list[int] = []
        self.variant: list[int] = []
        self.ids: list[np.ndarray] = []
        self.spans: list[TokenSpans] = []
        """Of each; empty where the job uses none."""
        self.total = 0
        """Tokens."""

    def add(
        self,
        sequence: Document,
        number: int,
        ids: np.ndarray | None,
        spans: Sequence[TokenSpans],
        *,
        strict: bool,
        where: str = "",
    ) -> None:
        """The next one; `ids` None for one that is skipped."""
        slot = -1 if ids is None else len(self.ids)
        for label in self.labels:
            label.add(number, sequence.variant, sequence.row.values, slot, strict=strict, where=where)
        if ids is not None:
            self.document.append(number)
            self.variant.append(sequence.variant)
            self.ids.append(ids)
            if self._answers is not None:
                self.right.append(self._answers(sequence.row.values, sequence.variant))
            self.spans += spans
            self.total += len(ids)

    def met(self, names: Sequence[str]) -> dict[str, int]:
        """Name -> documents with a token in such a span."""
        return {
            name: len({number for number, spans in zip(self.document, self.spans) if name in spans.met})
            for name in names
        }
