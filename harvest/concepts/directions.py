"""Directions of a run: sums merged in shard order, fits and figures from the examples that all shards kept.

The same shards give the same bits, whoever harvested them. A direction that cannot be made has a status that says why;
no figure ever comes from examples that its direction, or the choice of a layer, has seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from threadpoolctl import threadpool_limits

from harvest import glance
from harvest.concepts import cards
from harvest.concepts.examples import keeps_examples, labelled
from harvest.concepts.gathered import GatheredExamples
from harvest.concepts.tokengroups import place_of, token_directions
from harvest.errors import DamageError, RequestError
from harvest.records import ShardRecord
from harvest.reduce.compare import UNTURNED, best_name, cross_validated, shuffled_control
from harvest.reduce.direction import SUMS, Counts, Direction, of_sums, undefined
from harvest.reduce.evaluate import Evaluation, evaluate
from harvest.reduce.examples import Examples
from harvest.reduce.fitted import fit
from harvest.reduce.saved import card_bytes, read_directions, vectors_bytes
from harvest.settings.direction import DirectionSettings
from harvest.states import Merged, MergedSums, merged_sums
from harvest.store import layout
from harvest.store.files import Files
from harvest.store.ledger import RunRecord

Value = TypeVar("Value")
NO_EXAMPLES = "no examples are kept (capture.store = false)"
_NOTHING = Counts(rows=(0, 0), weights=(0.0, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run comes to for one entry of [[directions]]."""

    name: str
    found: cards.Found
    card: Mapping[str, Any]
    """Everything but the vectors, as plain values: what NAME.json holds."""


Check = Callable[[Result], Any]
"""What a card says of adding its direction to the model."""


class Named(dict[str, Value]):
    """By name; a name that is not there is refused with those that are."""

    def __init__(self, found: Mapping[str, Value], what: str) -> None:
        super().__init__(found)
        self._what = what

    def __repr__(self) -> str:
        return glance.listed(self._what, self)

    def _repr_html_(self) -> str:
        rows = [
            (name, glance.few(list(value)) if isinstance(value, Named) else repr(value)) for name, value in self.items()
        ]
        return glance.html(self._what, rows)

    def __missing__(self, name: str) -> Value:
        near = glance.meant(name, list(self))
        raise RequestError(f"{self._what}: no {name!r} here; there are {glance.few(list(self))}{near}")


def settings_of(run: RunRecord) -> list[DirectionSettings]:
    """The directions that the run's job asks for."""
    return [DirectionSettings.model_validate(told) for told in run.job.get("directions") or ()]


def write_directions(
    files: Files, run: RunRecord, records: Sequence[ShardRecord], sums: MergedSums, check: Check | None = None
) -> dict[str, str]:
    """Computes and writes every direction; path -> hash of what is there now."""
    written = {}
    for result in compute(files, run, records, sums):
        if check is not None:
            result = replace(result, card={**result.card, "check": check(result)})
        for kind, blob in (("safetensors", vectors_bytes(result.found)), ("json", card_bytes(result.card))):
            path = layout.direction_path(result.name, kind)
            files.replace(path, blob)
            written[path] = content_hash(blob)
    return written


def content_hash(blob: bytes) -> str:
    """What complete.json says of a file of directions."""
    return hashlib.blake2b(blob, digest_size=16).hexdigest()


def stored(files: Files, run: RunRecord) -> Iterator[Result]:
    """The directions that a finished run has written. Raises DamageError for files that are missing or not ours."""
    for settings in settings_of(run):
        blobs = []
        for kind in ("safetensors", "json"):
            path = layout.direction_path(settings.name, kind)
            try:
                blobs.append(files.read(path))
            except FileNotFoundError:
                raise DamageError(f"{files.url}/{path}: missing") from None
        where = f"{files.url}/{layout.direction_path(settings.name, 'safetensors')}"
        try:
            card = json.loads(blobs[1])
        except ValueError as error:
            raise DamageError(f"{files.url}/{layout.direction_path(settings.name, 'json')}: {error}") from None
        yield Result(name=settings.name, found=read_directions(blobs[0], card, where), card=card)


def compute(
    files: Files, run: RunRecord, records: Sequence[ShardRecord], sums: MergedSums | None = None
) -> Iterator[Result]:
    """The directions of the committed shards, given in dataset order; merges their sums where nobody has yet."""
    directions, names = settings_of(run), list(run.plan["resolved"]["names"])
    sums = merged_sums(files, records, directions, names) if sums is None else sums
    with threadpool_limits(limits=1):  # the number of threads would show in the bits
        for settings in directions:
            if settings.embedding is not None:
                yield _of_tokens(files, run, records, settings)
            else:
                yield _Entry(files, run, records, settings, names, sums.of(settings.name)).result()


def _of_tokens(files: Files, run: RunRecord, records: Sequence[ShardRecord], settings: DirectionSettings) -> Result:
    """The directions between two groups of tokens; none of them is held out."""
    made, tokens = token_directions(files, records, settings)
    at, judged = place_of(settings), Evaluation(examples=(0, 0), reason="tokens: none are held out")
    found = {mode: {at: replace(one, name=settings.name, evaluation=judged)} for mode, one in made.items()}
    card = {
        **cards.head(run, settings),
        "tokens": tokens,
        "best": dict.fromkeys(found),
        "control": dict.fromkeys(found),
        "cosines": cards.agreement(found),
        "directions": [cards.entry(settings, at, of_mode[at], "exact", None) for of_mode in found.values()],
    }
    return Result(name=settings.name, found=found, card=card)


class _Entry:
    """One entry of [[directions]], over all its names."""

    def __init__(
        self,
        files: Files,
        run: RunRecord,
        records: Sequence[ShardRecord],
        settings: DirectionSettings,
        names: Sequence[str],
        sums: Merged,
    ) -> None:
        self._run, self._settings, self._names, self._sums = run, settings, names, sums
        self._unmatched = "count" if run.job["data"]["on_bad"] == "skip" else "error"
        file = layout.examples_name(settings.name)
        kept = bool(records) and keeps_examples(settings, stores_rows=bool(run.job["capture"]["store"]))
        paths = [f"{layout.attempt_path(record.attempt)}/{file}" for record in records]
        self._examples = GatheredExamples(files, paths, settings) if kept else None

    def result(self) -> Result:
        """Every mode at every name."""
        found: dict[str, dict[str, Direction]] = {mode: {} for mode in self._settings.modes}
        scores: dict[str, dict[str, float | None]] = {mode: {} for mode in self._settings.modes}
        for read in self._settings.reads:
            for name in self._names:
                at = labelled(name, read.label)
                for mode, direction, score in self._at(name, read.label, at):
                    found[mode][at], scores[mode][at] = replace(direction, name=self._settings.name), score
        return Result(name=self._settings.name, found=found, card=self._card(found, scores))

    def _parts(self, name: str, label: str) -> tuple[Examples, Examples] | str:
        """The examples to make a direction from, and those to judge it by; or why there are none."""
        if self._examples is None:
            return NO_EXAMPLES
        try:
            training, held_out = (self._examples.part(label, name, held_out=out) for out in (False, True))
        except RequestError as error:
            return str(error)
        return training, held_out

    def _at(self, name: str, label: str, at: str) -> Iterator[tuple[str, Direction, float | None]]:
        """(mode, direction with its evaluation, what folds of the training examples say of it)."""
        found = self._parts(name, label)
        training, held_out, why = (None, None, found) if isinstance(found, str) else (*found, "")
        for mode in self._settings.modes:
            direction = self._made(mode, at, training, why)
            score = None if training is None else cross_validated(training, mode)
            if held_out is None:
                judged = Evaluation(examples=(0, 0), reason=why)
            else:
                judged = evaluate(
                    held_out.states,
                    held_out.group,
                    held_out.unit,
                    vector=direction.vector,
                    midpoint=direction.midpoint,
                )
            yield mode, replace(direction, evaluation=judged), score

    def _made(self, mode: str, at: str, training: Examples | None, why: str) -> Direction:
        state = self._sums[at]
        try:
            if mode not in SUMS:
                return undefined(mode, why, _NOTHING) if training is None else fit(training, mode, self._unmatched)
            if isinstance(state, str):
                return undefined(mode, state, _NOTHING)
            return of_sums(state, mode, self._unmatched)
        except RequestError as error:  # examples without a partner
            counts = _NOTHING if isinstance(state, str) else of_sums(state, "single_group").counts
            return undefined(mode, str(error), counts)

    # ---- the card --------------------------------------------------------------------------------------------------

    def _card(self, found: cards.Found, scores: Mapping[str, Mapping[str, float | None]]) -> dict[str, Any]:
        best = {mode: best_name(of_mode) for mode, of_mode in scores.items()}
        return {
            **cards.head(self._run, self._settings),
            "best": best,
            "control": {mode: self._control(mode, at) for mode, at in best.items()},
            "cosines": cards.agreement(found),
            "directions": [
                cards.entry(self._settings, at, direction, self._basis(mode, at, direction), scores[mode][at])
                for mode, of_mode in found.items()
                for at, direction in of_mode.items()
            ],
        }

    def _basis(self, mode: str, at: str, direction: Direction) -> str:
        """`exact`, or which share of the examples the mode has seen."""
        state = self._sums[at]
        if mode in SUMS or isinstance(state, str):
            return "exact"
        seen = sum(direction.counts.rows)
        every = sum(of_sums(state, "single_group").counts.rows)
        return "exact" if seen >= every else f"from {seen} of {every} examples"

    def _control(self, mode: str, at: str | None) -> dict[str, float | str | None] | None:
        """Held-out AUROC at the best name of directions made with shuffled labels, or why there is none; None without
        a best name."""
        if at is None:
            return None
        found, examples = None, self._parts(*cards.parts(self._settings, at))
        if mode in UNTURNED:
            why = "shuffled labels do not turn this mode round, so that its figure with them would say nothing of leaks"
        else:
            why = "no direction from shuffled labels, or too few examples held out"
            found = None if isinstance(examples, str) else shuffled_control(*examples, mode)
        mean, error = found or (None, None)
        return {"at": at, "auroc": mean, "standard_error": error, "reason": why if found is None else None}
