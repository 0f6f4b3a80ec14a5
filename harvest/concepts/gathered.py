"""The examples that all shards kept of a direction, cut to those with the smallest hashes: bounded for any number.

Keys are read shard by shard and cut as they come; states stay where they are mapped, and from a remote store only the
chosen ones are fetched, once, into a temporary folder.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from harvest.concepts.examples import answered_right
from harvest.reduce.examples import Examples, ready
from harvest.reduce.labels import make_labels
from harvest.reduce.sample import ExampleKeys, join_keys, smallest
from harvest.settings.direction import DirectionSettings
from harvest.store.examples import StoredExamples
from harvest.store.files import Files
from harvest.store.opening import open_files

CUT_ROWS = 2**16
"""Of keys that gather before they are cut to the smallest."""
OPEN_SHARDS = 256
"""Mapped at a time: a process may not map any number of files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """Examples at one read; n of them in dataset order."""

    keys: ExampleKeys
    weight: np.ndarray
    """float64 [n]"""
    difference: np.ndarray
    """float64 [n]: of the answers' logits; NaN where there is none."""
    shard: np.ndarray
    """int64 [n]: number of the shard."""
    row: np.ndarray
    """int64 [n]: place among what the shard kept."""

    def take(self, index: np.ndarray) -> _Chosen:
        return _Chosen(
            keys=self.keys.take(index),
            weight=self.weight[index],
            difference=self.difference[index],
            shard=self.shard[index],
            row=self.row[index],
        )


class GatheredExamples:
    """Of one direction, at every read."""

    def __init__(self, files: Files, paths: Sequence[str], settings: DirectionSettings) -> None:
        """`paths`: the examples of every shard, in dataset order. Raises DamageError for a file that is not ours."""
        self._settings, self._files, self._paths = settings, files, list(paths)
        self._chosen = self._choose()
        self._folder = None if files.local else tempfile.TemporaryDirectory(prefix="harvest-examples-")
        if self._folder is not None:
            self._fetch(self._folder.name)
        self._opened = functools.lru_cache(maxsize=OPEN_SHARDS)(self._open)

    def part(self, label: str, name: str, *, held_out: bool) -> Examples:
        """Those of a read that are held out, or that are not, with their states at a name.

        Raises RequestError for odd pairs.
        """
        every = self._chosen[label]
        chosen = every.take(np.flatnonzero(every.keys.held_out == held_out))
        numbers, starts = np.unique(chosen.shard, return_index=True)  # they rise, as the examples do
        rows = np.split(chosen.row, starts[1:])
        if not len(numbers):  # the width is still that of the name
            numbers, rows = np.zeros(1, np.int64), [chosen.row]
        parts = [self._opened(number).states(name, at) for number, at in zip(numbers.tolist(), rows)]
        right = answered_right(self._settings, chosen.difference)
        labels = make_labels(chosen.keys.group, chosen.weight, chosen.keys.pair, rows=len(chosen.keys), right=right)
        return ready(torch.from_numpy(np.concatenate(parts)), labels, chosen.keys.unit)

    def keys(self, label: str, *, held_out: bool) -> ExampleKeys:
        """Which examples `part` is made of; its `index` counts in these."""
        keys = self._chosen[label].keys
        return keys.take(np.flatnonzero(keys.held_out == held_out))

    def _open(self, number: int) -> StoredExamples:
        return StoredExamples(self._files, self._paths[number])

    def _choose(self) -> dict[str, _Chosen]:
        """Read -> the examples with the smallest hashes."""
        found: dict[str, list[_Chosen]] = {read.label: [] for read in self._settings.reads}
        waiting = 0
        for number in range(len(self._paths)):
            stored = self._open(number)
            for label, parts in found.items():
                parts.append(_of_shard(stored, label, number, paired=self._settings.paired))
            waiting += len(stored)
            if waiting > CUT_ROWS:
                found, waiting = {label: [self._cut(parts)] for label, parts in found.items()}, 0
        return {label: self._cut(parts) for label, parts in found.items()}

    def _cut(self, parts: Sequence[_Chosen]) -> _Chosen:
        every = _Chosen(
            keys=join_keys([part.keys for part in parts]),
            weight=np.concatenate([part.weight for part in parts]),
            difference=np.concatenate([part.difference for part in parts]),
            shard=np.concatenate([part.shard for part in parts]),
            row=np.concatenate([part.row for part in parts]),
        )
        return every.take(smallest(every.keys, self._settings.examples))

    def _fetch(self, folder: str) -> None:
        """Copies what is chosen of every shard into the folder, and reads it there from now on."""
        local, paths = open_files(folder), []
        for number in range(len(self._paths)):
            rows = np.unique(np.concatenate([one.row[one.shard == number] for one in self._chosen.values()]))
            paths.append(f"{number}.arrow")
            if len(rows) or not number:  # the first one knows the widths
                local.create(paths[-1], self._open(number).some(rows))
            for one in self._chosen.values():
                here = one.shard == number
                one.row[here] = np.searchsorted(rows, one.row[here])
        self._files, self._paths = local, paths


def _of_shard(stored: StoredExamples, label: str, number: int, *, paired: bool) -> _Chosen:
    row = np.flatnonzero(np.array([read == label for read in stored.read], bool))
    keys = ExampleKeys(
        document=stored.keys["document"][row],
        variant=stored.keys["variant"][row],
        position=stored.keys["position"][row],
        group=stored.keys["group"][row],
        held_out=stored.held_out[row],
        pair=tuple((stored.pair or ())[i] for i in row.tolist()) if paired else None,
    )
    return _Chosen(
        keys=keys,
        weight=stored.keys["weight"][row],
        difference=stored.keys["logit_diff"][row],
        shard=np.full(len(row), number),
        row=row,
    )
