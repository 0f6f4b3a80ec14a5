"""What a shard keeps for its directions, against its stored rows: the states that were read, and the sums over them.

A state that is one stored row is that row, to the bit. Sums are made again from the kept states wherever the shard kept
all of them; what `settings.examples` has cut, and states of rows that are not stored, only their checksums vouch for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from functools import cached_property

import numpy as np
import torch

from harvest.checking.findings import Finding
from harvest.concepts.directions import settings_of
from harvest.concepts.examples import answered_right, labelled
from harvest.errors import DamageError, RequestError
from harvest.records import ArraySpec, Read, ShardRecord
from harvest.reduce.base import StateFile
from harvest.reduce.concepts import COARSEST, Concepts
from harvest.reduce.labels import A, B, make_labels
from harvest.settings.direction import DirectionSettings
from harvest.states import open_states
from harvest.store import layout
from harvest.store.examples import StoredExamples
from harvest.store.files import Files
from harvest.store.ledger import RunRecord
from harvest.store.storedrows import StoredRows
from harvest.store.tables import StoredTable, columns_of

AT_ONCE = 1024
"""States that are compared in one go."""
LIKE_SUMS = 1e-9
"""Relative to the largest value: float64 sums in another grouping."""
LIKE_POOLED = 1e-5
"""The same, where float64 states of several rows are kept as float32."""
PARTS = 3
"""Of the sums: A, B, and what is left of A along its partner."""


def read_findings(files: Files, run: RunRecord, record: ShardRecord, threads: Executor) -> Iterator[Finding]:
    """Of a shard whose objects, tables, arrays and other sums are sound; names are spread over `threads`."""
    try:
        check = _ReadCheck(files, run, record)
        for found in threads.map(lambda name: list(check.of(name)), run.plan["resolved"]["names"]):
            yield from found
    except DamageError as error:
        yield Finding(damage=True, shard=record.shard.key, object=layout.attempt_path(record.attempt), what=str(error))


class _ReadCheck:
    def __init__(self, files: Files, run: RunRecord, record: ShardRecord) -> None:
        self._files, self._run, self._record = files, run, record
        self._kept: list[tuple[DirectionSettings, StoredExamples, np.ndarray]] = []
        """With the shard's row at the place of each example, -1 where none is stored."""
        attempt = layout.attempt_path(record.attempt)
        for settings in settings_of(run):
            if settings.embedding is None and layout.examples_name(settings.name) in record.objects:
                examples = StoredExamples(files, f"{attempt}/{layout.examples_name(settings.name)}")
                self._kept.append((settings, examples, _stored_row(examples, self._tokens)))
        self._saved = open_states(files, record) if self._kept else None

    @cached_property
    def _tokens(self) -> Mapping[str, np.ndarray] | None:
        if layout.TOKENS not in self._record.objects:
            return None
        return columns_of(
            StoredTable(self._files, f"{layout.attempt_path(self._record.attempt)}/{layout.TOKENS}").read()
        )

    def of(self, name: str) -> Iterator[Finding]:
        """What is wrong at a name."""
        if self._saved is None:
            return
        stored = None
        if self._tokens is not None:
            plan = self._run.plan
            width, dtype = plan["names"][name]["width"], plan["resolved"]["store_dtype"]
            spec = ArraySpec(rows=self._record.rows, width=width, dtype=dtype)
            stored = StoredRows(self._files, self._record.attempt, name, spec)
        for settings, examples, row in self._kept:
            for read in settings.reads:
                at = labelled(name, read.label)
                wrong = None
                if stored is not None and _is_one_row(read):
                    wrong = _other_than_stored(settings, read, examples, row, name, stored)
                if wrong is not None:
                    what = f"{at}: the state of document {wrong} is not its stored row"
                    yield self._finding(layout.examples_name(settings.name), what)
                elif (what_differs := _differing_sum(settings, read, examples, name, self._saved)) is not None:
                    yield self._finding(layout.STATES, f"direction {settings.name!r} at {at}: {what_differs}")

    def _finding(self, inside: str, what: str) -> Finding:
        path = f"{layout.attempt_path(self._record.attempt)}/{inside}"
        return Finding(damage=True, shard=self._record.shard.key, object=path, what=what)


def _is_one_row(read: Read) -> bool:
    return read.kind in ("at", "all") or read.pool == "last"


def _stored_row(examples: StoredExamples, tokens: Mapping[str, np.ndarray] | None) -> np.ndarray:
    """int64 [n]: the shard's row at the place where each example's state was read; -1 where none is stored."""
    nowhere = np.full(len(examples), -1, np.int64)
    if tokens is None or not len(tokens["document"]):
        return nowhere
    sequence = tokens["document"] * 2 + tokens.get("variant", np.int64(0))
    first = np.append(True, np.diff(sequence) != 0)
    known, place = sequence[first], (np.cumsum(first) - 1 << 31) + tokens["position"]
    if (np.diff(known) <= 0).any() or (np.diff(place) <= 0).any():  # told with the table
        return nowhere
    wanted = examples.keys["document"] * 2 + examples.keys["variant"]
    number = np.searchsorted(known, wanted).clip(max=len(known) - 1)
    asked = (number << 31) + examples.keys["position"]
    row = np.searchsorted(place, asked).clip(max=len(place) - 1)
    there = (known[number] == wanted) & (examples.keys["position"] >= 0) & (place[row] == asked)
    return np.where(there, row, -1)


def _other_than_stored(
    settings: DirectionSettings, read: Read, examples: StoredExamples, row: np.ndarray, name: str, stored: StoredRows
) -> int | None:
    """The first document whose state at a read is not its stored row; None where all are."""
    index = np.flatnonzero((np.array(examples.read, object) == read.label) & (row >= 0))
    if settings.needs_answers:  # without an answer that is a number an example has no state
        index = index[np.isfinite(examples.keys["logit_diff"][index])]
    for start in range(0, len(index), AT_ONCE):
        part = index[start : start + AT_ONCE]
        kept, there = examples.states(name, part), stored.take(row[part]).to(torch.float32).numpy()
        same = ((kept == there) | (np.isnan(kept) & np.isnan(there))).all(axis=1)
        if not same.all():
            return int(examples.keys["document"][part[np.argmin(same)]])
    return None


def _differing_sum(
    settings: DirectionSettings, read: Read, examples: StoredExamples, name: str, saved: StateFile
) -> str | None:
    """What is wrong with the sums of a direction at a name; None where it is nothing, or cannot be told."""
    sums = Concepts()
    try:
        state = saved.load(sums, f"{settings.name}/{labelled(name, read.label)}")
    except KeyError:
        return "no sums are saved"
    index = np.flatnonzero((np.array(examples.read, object) == read.label) & ~examples.held_out)
    group = examples.keys["group"][index]
    if max(np.count_nonzero(group == A), np.count_nonzero(group == B)) >= settings.examples:
        return None  # some may have been cut
    right = answered_right(settings, examples.keys["logit_diff"][index])
    pairs = None if examples.pair is None else [examples.pair[i] for i in index.tolist()]
    try:
        labels = make_labels(group, examples.keys["weight"][index], pairs, rows=len(index), right=right)
        made = sums.update(sums.zero(), torch.from_numpy(examples.states(name, index)), labels, COARSEST)
    except RequestError as error:  # a pair's third row, a weight that is none
        raise DamageError(f"{examples.where}: {error}") from None
    exact = _is_one_row(read)
    parts = PARTS if exact else PARTS - 1  # what is left along a partner may be rounding alone
    one, two = sums.arrays(state), sums.arrays(made)
    if one["counts"][:parts].tolist() != two["counts"][:parts].tolist():
        return f"sums over {one['counts'][:2].tolist()} examples of A and B, it keeps {two['counts'][:2].tolist()}"
    like = LIKE_SUMS if exact else LIKE_POOLED
    for part in range(parts):
        for found, expected in (
            (one["means"][part], two["means"][part]),
            (one["sums"][3 * part : 3 * part + 3], two["sums"][3 * part : 3 * part + 3]),
        ):
            room = like * float(np.abs(expected).max(initial=0.0))
            if found.shape != expected.shape or not np.allclose(found, expected, rtol=like, atol=room):
                return "its sums are not what its examples give"
    return None
