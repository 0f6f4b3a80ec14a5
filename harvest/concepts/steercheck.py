"""Whether adding a direction moves the model's answers its way: logits before and after, at each document's last token.

Documents are read again, one by one and unpadded, held-out ones where any are: what moves them was made from others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from harvest.concepts import cards
from harvest.concepts.directions import Result
from harvest.concepts.examples import keys_of
from harvest.errors import RequestError
from harvest.model.capture import Capture
from harvest.model.steer import steer
from harvest.plan import Plan
from harvest.records import Batch, ShardText
from harvest.reduce.direction import Direction
from harvest.settings.direction import DirectionSettings

SCALE = 1.0
"""The direction in the units of the activations, once: of a difference of means the step from B's mean to A's."""


class SteerCheck:
    """Of every direction whose `check` asks for it, each mode at its best name."""

    def __init__(self, plan: Plan, model: Any) -> None:
        self._plan, self._model = plan, model

    def __call__(self, result: Result) -> dict[str, Any] | None:
        """Mode -> logits before and after; None where the direction asks for none."""
        settings = next((one for one in self._plan.job.read_directions if one.name == result.name), None)
        if settings is None or not settings.check:
            return None
        documents = self._first(settings)
        sequences = [ids for document in documents for ids in document]
        groups = self._answers(settings)
        before = self._logits(sequences)
        found: dict[str, dict[str, Any]] = {}
        for mode, directions in result.found.items():
            at: str | None = result.card["best"][mode] or (next(iter(directions)) if len(directions) == 1 else None)
            found[mode] = {"at": at, "scale": SCALE, "documents": len(documents), "reason": None}
            if at is None or directions[at].vector is None or not documents:
                why = "no best name" if at is None else "the direction is undefined"
                found[mode]["reason"] = why if documents else "no document with an answer to look at"
            else:
                name, _ = cards.parts(settings, at)
                found[mode] |= moved(before, self._steered(sequences, name, directions[at]), groups)
        return found

    def _answers(self, settings: DirectionSettings) -> tuple[list[int], list[int]]:
        """Which of the job's answers are A's and B's."""
        answers, contrast = self._plan.resolved.answers, self._plan.job.data.contrast or ()
        a = contrast[:1] if settings.by_variant else settings.positive or ()
        others = tuple(value for value in answers if value not in a)
        b = settings.negative if isinstance(settings.negative, tuple) else others
        number = {token: i for i, token in enumerate(self._plan.answers)}
        one, other = ({number[answers[value]] for value in values if value in answers} for values in (a, b))
        return sorted(one - other), sorted(other - one)

    def _first(self, settings: DirectionSettings) -> list[list[np.ndarray]]:
        """The sequences of the first documents, as many as are asked for, each with both texts of a contrast."""
        found: dict[int, list[np.ndarray]] = {}
        for document, ids in self._sequences(settings):
            if document not in found and len(found) == settings.check:
                break
            found.setdefault(document, []).append(ids)
        return list(found.values())

    def _sequences(self, settings: DirectionSettings) -> Iterator[tuple[int, np.ndarray]]:
        """Document, and the ids that lead to the last token of a sequence in a group that has an answer, in order."""
        plan, data = self._plan, self._plan.job.data
        limit, tokens, size = data.limit, data.max_tokens, plan.resolved.shard_documents
        for file in plan.source.files:
            start, ended = 0, False
            while not ended and (file.rows is None or start < file.rows):
                rows = plan.source.rows(file.number, start, start + size)
                text = plan.tokeniser.shard(rows, file=file.number, name=file.name, limit=limit, max_tokens=tokens)
                yield from self._of_shard(settings, text, plan.groups_before(file.number, start))
                limit = None if limit is None else limit - text.listed
                tokens = None if tokens is None else tokens - text.tokens_run
                if text.cut:
                    return
                start, ended = start + size, text.ended

    def _of_shard(
        self, settings: DirectionSettings, text: ShardText, before: Mapping[str, tuple[int, int]]
    ) -> Iterator[tuple[int, np.ndarray]]:
        found, answers = text.examples[settings.name][0], text.answers
        assert answers is not None
        held_out = keys_of(settings, found, before.get(settings.name, (0, 0))).held_out
        wanted = found.sequence[held_out] if settings.holdout != 0 else found.sequence
        first = np.array([window.row for window in text.windows], np.int64)
        for row in answers.row[np.unique(wanted[wanted >= 0])].tolist():
            if row >= 0:
                window = text.windows[int(np.searchsorted(first, row, side="right")) - 1]
                yield window.document, window.ids[: int(window.keep[row - window.row]) + 1]

    def _logits(self, sequences: list[np.ndarray]) -> np.ndarray:
        """float64 [sequences, answers] at their last tokens."""
        found = [np.zeros((0, len(self._plan.answers)))]
        with Capture(self._model, (), self._plan.answers) as capture:
            for ids in sequences:
                last = np.array([len(ids) - 1])
                batch = Batch(
                    input_ids=ids[None].astype(np.int64),
                    lengths=np.array([len(ids)]),
                    source=last,
                    rows=np.zeros(1, np.int64),
                    spans=[(len(ids) - 1, 0, 1)],
                    documents=np.zeros(1, np.int64),
                )
                logits = capture(batch, {}, np.zeros(1, np.int64))
                assert logits is not None
                found.append(logits)
        return np.concatenate(found)

    def _steered(self, sequences: list[np.ndarray], name: str, direction: Direction) -> np.ndarray:
        with steer(self._model, {name: direction}, SCALE, sites=(name,)):
            return self._logits(sequences)


def moved(before: np.ndarray, after: np.ndarray, groups: tuple[list[int], list[int]]) -> dict[str, Any]:
    """Mean logits of A's and B's answers before and after, and whether A's gained on B's; both [sequences, answers]."""
    means = {
        letter: {"before": float(before[:, own].mean()), "after": float(after[:, own].mean())} if own else None
        for letter, own in zip("AB", groups)
    }
    a, b = means["A"], means["B"]
    if a is None or b is None:
        return {**means, "right_way": None, "reason": f"group {'B' if b is None else 'A'} has no answer of its own"}
    return {**means, "right_way": a["after"] - a["before"] > b["after"] - b["before"]}


def refuse_check(plan: Plan, on_cluster: bool) -> None:
    """Raises RequestError where documents cannot be read again, or where no model is at hand when a run ends."""
    asking = next((one for one in plan.job.read_directions if one.check), None)
    if asking is None:
        return
    told = f"direction {asking.name!r}: check = {asking.check}"
    if on_cluster:
        raise RequestError(f"{told}: runs the model where the run ends; allowed with several workers is 0")
    if any(file.rows is None and file.format in ("stream", "objects") for file in plan.source.files):
        raise RequestError(f"{told}: reads documents again, which a stream does not allow; allowed is 0")
