"""What a shard's captured rows give its directions: sums over the examples, and a sample of the examples themselves.

Held-out examples are in no sum. Which examples are kept is known before the forward, so only their rows are copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from harvest.buffers import Rows
from harvest.concepts.logits import ShardLogits
from harvest.records import ShardExamples, ShardText, SortWindow
from harvest.reduce.concepts import COARSEST, ConceptState
from harvest.reduce.labels import Labels, make_labels, order_pairs
from harvest.reduce.pool import DocumentPool
from harvest.reduce.project import Projection
from harvest.reduce.sample import ExampleKeys, held_out, join_keys, smallest
from harvest.reduce.stacked import update_all
from harvest.settings.direction import DirectionSettings

EXAMPLES = ("whitened", "pca", "leace", "logistic")


def labelled(name: str, label: str) -> str:
    """What a direction at a name is called: `residual.12`, or `residual.12@-3` where there are several reads."""
    return f"{name}@{label}" if label else name


def keeps_examples(settings: DirectionSettings, *, stores_rows: bool) -> bool:
    """Whether a direction needs examples at the end; a run that stores no rows keeps them for the modes alone."""
    return stores_rows or any(mode in EXAMPLES for mode in settings.modes)


def keys_of(settings: DirectionSettings, found: ShardExamples, before: tuple[int, int]) -> ExampleKeys:
    """Which examples there are, with their pairs and the part that each belongs to; `before`: for pairs by order."""
    pair = order_pairs(found.group, before) if settings.pair == "order" else found.pair
    part = found.held_out
    if part is None:
        part = held_out(found.document, pair, float(settings.holdout))
    return ExampleKeys(
        document=found.document,
        variant=found.variant,
        position=found.position,
        group=found.group,
        held_out=part,
        pair=pair,
    )


class _Reading:
    """One direction at one read: its examples, as their rows come in."""

    def __init__(
        self,
        settings: DirectionSettings,
        found: ShardExamples,
        before: tuple[int, int],
        widths: Mapping[str, int],
        logits: ShardLogits | None,
        *,
        kept: bool,
    ) -> None:
        self.settings, self.found, self.widths = settings, found, widths
        self.weight, self.difference = found.weight.copy(), np.full(len(found), np.nan)
        """Of each example; where the model's answers matter, once they are known."""
        self._logits = logits if settings.needs_answers else None
        self._waiting: list[tuple[np.ndarray, Mapping[str, torch.Tensor]]] = []
        """Examples and states whose answers are not known yet."""
        self.keys = keys_of(settings, found, before)
        self.states: dict[str, ConceptState] = {name: ConceptState() for name in widths}
        has = np.zeros(len(found), bool)
        has[found.owner] = True
        self._with_rows, self._without = np.flatnonzero(has), np.flatnonzero(~has)
        usable = self.keys.take(self._with_rows)
        self.chosen = self._with_rows[smallest(usable, settings.examples)] if kept else np.zeros(0, np.int64)
        """The examples that are kept."""
        self._place = np.full(len(found), -1, np.int64)
        self._place[self.chosen] = np.arange(len(self.chosen))
        self.kept = {name: np.zeros((len(self.chosen), width), np.float32) for name, width in widths.items()}
        self._pools = {name: pool for name, width in widths.items() if (pool := _pool(found, width)) is not None}
        """Where an example has several rows."""
        self._given = 0
        """Examples with rows whose pooled state is out."""

    def update(self, first: int, stop: int, rows: Rows) -> None:
        """Captured rows [first, stop)."""
        self._read(first, stop, rows)
        self._settle(stop)

    def _read(self, first: int, stop: int, rows: Rows) -> None:
        low, high = np.searchsorted(self.found.rows, [first, stop])
        if low == high:
            return
        local = torch.from_numpy(self.found.rows[low:high] - first)
        if not self._pools:
            self._add(self.found.owner[low:high], {name: block.index_select(0, local) for name, block in rows.items()})
            return
        owner = self.found.owner[low:high]
        states = {
            name: _joined(pool.update(rows[name].index_select(0, local), owner), self.widths[name])
            for name, pool in self._pools.items()
        }
        self._add_pooled(states)

    def finish(self) -> None:
        """The document that was still open; and those without a state, which keep their pairs from being made."""
        if self._pools:
            self._add_pooled({name: _joined(pool.finish(), self.widths[name]) for name, pool in self._pools.items()})
        if len(self._without):
            nothing = {name: torch.full((len(self._without), width), torch.nan) for name, width in self.widths.items()}
            self._add(self._without, nothing)
        self._settle(None)
        if self.found.unknown:
            self.states = {
                name: replace(state, unknown=state.unknown + self.found.unknown) for name, state in self.states.items()
            }

    def _add_pooled(self, states: Mapping[str, torch.Tensor]) -> None:
        count = len(next(iter(states.values())))
        if count:
            self._add(self._with_rows[self._given : self._given + count], states)
            self._given += count

    def _add(self, examples: np.ndarray, states: Mapping[str, torch.Tensor]) -> None:
        """States [k, d] of these examples, name by name; they wait for answers that may lie in a later window."""
        if self._logits is None:
            self._include(examples, states)
        else:
            self._waiting.append((examples, states))

    def _settle(self, stop: int | None) -> None:
        """Includes what waited for answers that rows below `stop` have brought; without one, for all."""
        if self._logits is None or not self._waiting:
            return
        examples = np.concatenate([those for those, _ in self._waiting])
        states = {name: torch.cat([of[name] for _, of in self._waiting]) for name in self.widths}
        sequence, count = self.found.sequence[examples], len(examples)
        if stop is not None:
            count = int(self._logits.known(sequence, stop).sum())  # they come in order, so these are the first
        self._waiting = [(examples[count:], {name: block[count:] for name, block in states.items()})]
        self._answered(self._logits, examples[:count], {name: block[:count] for name, block in states.items()})

    def _answered(self, logits: ShardLogits, examples: np.ndarray, states: Mapping[str, torch.Tensor]) -> None:
        """Without a logit that is a number an example has no state."""
        difference = np.append(logits.differences, np.nan)[self.found.sequence[examples]]
        self.difference[examples] = difference
        odd = ~np.isfinite(difference)
        if self.settings.weight == "logit_diff":
            self.weight[examples] = np.where(odd, 0.0, np.abs(difference))
        if odd.any():
            states = {
                name: block.masked_fill(torch.from_numpy(odd)[:, None], torch.nan) for name, block in states.items()
            }
        self._include(examples, states)

    def _include(self, examples: np.ndarray, states: Mapping[str, torch.Tensor]) -> None:
        place = self._place[examples]
        copied = torch.from_numpy(np.flatnonzero(place >= 0))
        training = np.flatnonzero(~self.keys.held_out[examples])
        labels, index = self._labels(examples[training]), torch.from_numpy(training)
        if len(copied):
            for name, block in states.items():
                self.kept[name][place[place >= 0]] = block.index_select(0, copied).to(torch.float32).numpy()
        rows = {name: block.index_select(0, index) for name, block in states.items()}
        self.states = update_all(self.states, rows, labels, COARSEST)

    def _labels(self, examples: np.ndarray) -> Labels:
        pair = self.keys.pair
        return make_labels(
            self.found.group[examples],
            self.weight[examples],
            None if pair is None else [pair[i] for i in examples.tolist()],
            rows=len(examples),
            right=answered_right(self.settings, self.difference[examples]),
        )


def answered_right(settings: DirectionSettings, difference: np.ndarray) -> np.ndarray | None:
    """bool [n]: by its logit difference the model's own answer is right, or unknown; None where that is not asked."""
    return ~(difference <= 0) if settings.correct_only else None


def _pool(found: ShardExamples, width: int) -> DocumentPool | Projection | None:
    """What makes one state of an example's rows at a name; None where a row is one."""
    if found.context_first is not None:
        return Projection(width, found.context_first[np.unique(found.owner)])
    return None if found.read.pool is None else DocumentPool([found.read.pool], width, np.float64)


def _joined(found: Any, width: int) -> torch.Tensor:
    parts = [np.zeros((0, width)), *(values for pooled in found for values in pooled.values())]
    return torch.from_numpy(np.concatenate(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptExamples:
    """The examples that a shard keeps of one direction, read by read and in dataset order: columns of a table."""

    keys: Mapping[str, np.ndarray | Sequence[str | None]]
    """read, document, variant, position, group, weight, logit_diff, held_out, pair."""
    states: Mapping[str, np.ndarray]
    """Name -> float32 [n, d]."""


def _kept(readings: Sequence[_Reading]) -> KeptExamples:
    keys = join_keys([reading.keys.take(reading.chosen) for reading in readings])
    return KeptExamples(
        keys={
            "read": [reading.found.read.label for reading in readings for _ in reading.chosen],
            "document": keys.document,
            "variant": keys.variant,
            "position": keys.position,
            "group": keys.group,
            "weight": np.concatenate([reading.weight[reading.chosen] for reading in readings]),
            "logit_diff": np.concatenate([reading.difference[reading.chosen] for reading in readings]),
            "held_out": keys.held_out,
            "pair": [None] * len(keys) if keys.pair is None else keys.pair,
        },
        states={name: np.concatenate([reading.kept[name] for reading in readings]) for name in readings[0].widths},
    )


class ShardReads:
    """All directions of a shard; sort windows come in order, each once."""

    def __init__(
        self,
        directions: Sequence[DirectionSettings],
        text: ShardText,
        before: Mapping[str, tuple[int, int]],
        widths: Mapping[str, int],
        logits: ShardLogits | None = None,
        *,
        stores_rows: bool,
    ) -> None:
        """`widths`: name -> values of a row; `logits`: where the job asks for answers."""
        self._readings = {
            settings.name: [
                _Reading(
                    settings,
                    found,
                    before.get(settings.name, (0, 0)),
                    widths,
                    logits,
                    kept=keeps_examples(settings, stores_rows=stores_rows),
                )
                for found in text.examples[settings.name]
            ]
            for settings in directions
        }
        self._stores_rows = stores_rows

    def update(self, window: SortWindow, rows: Rows) -> None:
        """A window's captured rows, in dataset order."""
        for readings in self._readings.values():
            for reading in readings:
                reading.update(window.first_row, window.first_row + window.rows, rows)

    def finish(self) -> None:
        """No further window comes."""
        for readings in self._readings.values():
            for reading in readings:
                reading.finish()

    def states(self) -> dict[str, ConceptState]:
        """`direction/name` or `direction/name@read` -> its sums."""
        return {
            f"{direction}/{labelled(name, reading.found.read.label)}": state
            for direction, readings in self._readings.items()
            for reading in readings
            for name, state in reading.states.items()
        }

    def kept(self) -> dict[str, KeptExamples]:
        """Direction -> what is kept of it; only those that need examples."""
        return {
            direction: _kept(readings)
            for direction, readings in self._readings.items()
            if keeps_examples(readings[0].settings, stores_rows=self._stores_rows)
        }
