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

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from harvest import cards
from harvest.errors import DamageError, RequestError
from harvest.examples import answered_right, keeps_examples, labelled
from harvest.records import ShardRecord
from harvest.reduce.compare import UNTURNED, best_name, cross_validated, shuffled_control
from harvest.reduce.direction import SUMS, Counts, Direction, of_sums, undefined
from harvest.reduce.evaluate import Evaluation, evaluate
from harvest.reduce.examples import Examples, ready
from harvest.reduce.fitted import fit
from harvest.reduce.labels import make_labels
from harvest.reduce.sample import ExampleKeys, smallest
from harvest.reduce.saved import card_bytes, read_directions, vectors_bytes
from harvest.settings.direction import DirectionSettings
from harvest.states import Merged, MergedSums, merged_sums
from harvest.store import layout
from harvest.store.examples import StoredExamples
from harvest.store.files import Files
from harvest.store.ledger import RunRecord
from harvest.tokengroups import place_of, token_directions

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

    def __missing__(self, name: str) -> Value:
        raise RequestError(f"{self._what}: no {name!r} here; there are {', '.join(self) or 'none'}")


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


# ---- examples ------------------------------------------------------------------------------------------------------


class _Kept:
    """The examples of one direction at one read: the smallest hashes of all shards, in dataset order."""

    def __init__(self, shards: Sequence[StoredExamples], label: str, settings: DirectionSettings) -> None:
        self._shards, self._settings = shards, settings
        rows = [np.flatnonzero(np.array([read == label for read in shard.read], bool)) for shard in shards]
        owner = np.repeat(np.arange(len(shards)), [len(index) for index in rows])
        index = np.concatenate([np.zeros(0, np.int64), *rows])
        column = {
            name: np.concatenate([shard.keys[name][at] for shard, at in zip(shards, rows)])
            for name in ("document", "variant", "position", "group", "weight", "logit_diff")
        }
        paired = all(shard.pair is not None for shard in shards if len(shard))
        pair = [shard.pair[i] for shard, at in zip(shards, rows) if shard.pair is not None for i in at.tolist()]
        every = ExampleKeys(
            document=column["document"],
            variant=column["variant"],
            position=column["position"],
            group=column["group"],
            held_out=np.concatenate([shard.held_out[at] for shard, at in zip(shards, rows)]),
            pair=tuple(pair) if paired else None,
        )
        chosen = smallest(every, settings.examples)
        self.keys, self._owner, self._index = every.take(chosen), owner[chosen], index[chosen]
        self._weight, self._difference = column["weight"][chosen], column["logit_diff"][chosen]

    def part(self, name: str, *, held_out: bool) -> Examples:
        """Those that are held out, or that are not, with their states at a name. Raises RequestError for odd pairs."""
        chosen = np.flatnonzero(self.keys.held_out == held_out)
        keys = self.keys.take(chosen)
        parts = [
            shard.states(name, self._index[chosen[self._owner[chosen] == number]])
            for number, shard in enumerate(self._shards)
        ]
        right = answered_right(self._settings, self._difference[chosen])
        labels = make_labels(keys.group, self._weight[chosen], keys.pair, rows=len(keys), right=right)
        return ready(torch.from_numpy(np.concatenate(parts)), labels, keys.unit)


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
        stores_rows = bool(run.job["capture"]["store"])
        self._shards = [
            StoredExamples(files, f"{layout.attempt_path(record.attempt)}/{layout.examples_name(settings.name)}")
            for record in records
            if keeps_examples(settings, stores_rows=stores_rows)
        ]

    def result(self) -> Result:
        """Every mode at every name."""
        found: dict[str, dict[str, Direction]] = {mode: {} for mode in self._settings.modes}
        scores: dict[str, dict[str, float | None]] = {mode: {} for mode in self._settings.modes}
        kept = {}
        for read in self._settings.reads:
            if self._shards:
                kept[read.label] = _Kept(self._shards, read.label, self._settings)
            for name in self._names:
                at = labelled(name, read.label)
                for mode, direction, score in self._at(name, at, kept.get(read.label)):
                    found[mode][at], scores[mode][at] = replace(direction, name=self._settings.name), score
        return Result(name=self._settings.name, found=found, card=self._card(found, scores, kept))

    def _at(self, name: str, at: str, kept: _Kept | None) -> Iterator[tuple[str, Direction, float | None]]:
        """(mode, direction with its evaluation, what folds of the training examples say of it)."""
        training = held_out = None
        why = NO_EXAMPLES
        if kept is not None:
            try:
                training, held_out = kept.part(name, held_out=False), kept.part(name, held_out=True)
            except RequestError as error:
                why = str(error)
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

    def _card(
        self,
        found: cards.Found,
        scores: Mapping[str, Mapping[str, float | None]],
        kept: Mapping[str, _Kept],
    ) -> dict[str, Any]:
        best = {mode: best_name(of_mode) for mode, of_mode in scores.items()}
        return {
            **cards.head(self._run, self._settings),
            "best": best,
            "control": {mode: self._control(mode, at, kept) for mode, at in best.items()},
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

    def _control(self, mode: str, at: str | None, kept: Mapping[str, _Kept]) -> dict[str, float | str | None] | None:
        """Held-out AUROC at the best name of directions made with shuffled labels, or why there is none; None without
        a best name."""
        if at is None:
            return None
        name, label = cards.parts(self._settings, at)
        chosen, found = kept[label], None
        if mode in UNTURNED:
            why = "shuffled labels do not turn this mode round, so that its figure with them would say nothing of leaks"
        else:
            why = "no direction from shuffled labels, or too few examples held out"
            found = shuffled_control(chosen.part(name, held_out=False), chosen.part(name, held_out=True), mode)
        mean, error = found or (None, None)
        return {"at": at, "auroc": mean, "standard_error": error, "reason": why if found is None else None}
