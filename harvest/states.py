"""The saved sums of a committed shard, wherever its attempt lies, and the sums that those of all shards come to.

A shard's are one request, or mapped; they are added up name by name, so that memory does not grow with the shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harvest.concepts.examples import labelled
from harvest.errors import DamageError, RequestError
from harvest.records import ShardRecord
from harvest.reduce.base import Reduction, State, StateFile, save_states
from harvest.reduce.concepts import Concepts, ConceptState, ConceptTotal
from harvest.settings.direction import DirectionSettings
from harvest.store import layout
from harvest.store.files import Files


def open_states(files: Files, record: ShardRecord) -> StateFile:
    """The saved sums of a shard. Raises DamageError where they are missing or cut."""
    path = _states_path(record)
    try:
        mapped = files.map(path)
        whole = memoryview(files.read(path)) if mapped is None else mapped.data  # arrays one by one: 450 requests
    except FileNotFoundError:
        whole = memoryview(b"")  # reads as cut short, by name
    return StateFile(lambda start, length: whole[start : start + length], f"{files.url}/{path}")


def open_parts(files: Files, path: str) -> StateFile:
    """A state file of which little is wanted: read where it lies. Raises DamageError where it is missing or cut."""

    def read(start: int, length: int) -> bytes:
        try:
            return files.read_range(path, start, length)
        except FileNotFoundError:
            return b""

    return StateFile(read, f"{files.url}/{path}")


def _states_path(record: ShardRecord) -> str:
    return f"{layout.attempt_path(record.attempt)}/{layout.STATES}"


Merged = Mapping[str, ConceptState | str]
"""Name with its read -> the sums of all shards, or why they cannot be added up."""


class MergedSums:
    """The sums of all shards, taken in dataset order: one total for each name, and what waits for a partner."""

    def __init__(self, directions: Sequence[DirectionSettings], names: Sequence[str]) -> None:
        self._totals = {
            d.name: {labelled(name, read.label): ConceptTotal() for read in d.reads for name in names}
            for d in directions
            if d.embedding is None
        }
        self._broken: dict[tuple[str, str], str] = {}

    def __bool__(self) -> bool:
        """Whether there is anything to add up."""
        return bool(self._totals)

    def add(self, states: StateFile) -> None:
        """The next shard's, name by name. Raises DamageError for sums that are not there."""
        for direction, totals in self._totals.items():
            for at, total in totals.items():
                try:
                    state = states.load(Concepts(), f"{direction}/{at}")
                except KeyError:
                    raise DamageError(f"{states.where}: no sums of {at!r}") from None
                try:
                    if (direction, at) not in self._broken:
                        total.add(state)
                except RequestError as error:  # a pair's third row, the others in another shard
                    self._broken[direction, at] = str(error)

    def of(self, direction: str) -> Merged:
        """What they come to for a direction."""
        totals = self._totals[direction]
        return {at: self._broken.get((direction, at)) or total.state() for at, total in totals.items()}


class MergedStates:
    """The states of one reduction over all shards, merged in the order in which they are added."""

    def __init__(self, reduction: Reduction[Any], names: Sequence[str]) -> None:
        self._reduction = reduction
        self._merged = {name: reduction.zero() for name in names}
        self._seen = False

    def add(self, states: StateFile) -> None:
        """The next shard's. Raises DamageError for sums of a name that the run has not."""
        for name in states.names(self._reduction.kind):
            if name not in self._merged:
                raise DamageError(f"{states.where}: sums of {name!r}, which is no name of this run")
            self._seen = True
            self._merged[name] = self._reduction.merge(self._merged[name], states.load(self._reduction, name))

    def __bool__(self) -> bool:
        """Whether some shard keeps this reduction."""
        return self._seen

    def saved(self) -> bytes:
        """The merged states as a state file."""
        return save_states([(self._reduction, self._merged)])

    def result(self) -> dict[str, Any]:
        """Name -> what it comes to; empty where no shard keeps this reduction."""
        return {name: self._reduction.finalise(state) for name, state in self._merged.items()} if self._seen else {}


def merged_state(files: Files, records: Sequence[ShardRecord], reduction: Reduction[State], name: str) -> State:
    """Of one name, of which alone the shards' sums are read."""
    merged = reduction.zero()
    for record in records:
        if layout.STATES in record.objects:
            merged = reduction.merge(merged, _loaded(open_parts(files, _states_path(record)), reduction, name))
    return merged


def finished_state(files: Files, path: str, reduction: Reduction[State], name: str) -> State:
    """Of one name, from what a finished run has merged."""
    return _loaded(open_parts(files, path), reduction, name)


def _loaded(states: StateFile, reduction: Reduction[State], name: str) -> State:
    try:
        return states.load(reduction, name)
    except KeyError:
        raise DamageError(f"{states.where}: no {reduction.kind} of {name!r}") from None


def merged_states(
    files: Files, records: Sequence[ShardRecord], reduction: Reduction[Any], names: Sequence[str]
) -> dict[str, Any]:
    """Name -> what a reduction comes to over these shards; empty where none keeps it."""
    merged = MergedStates(reduction, names)
    for record in records:
        if layout.STATES in record.objects:
            merged.add(open_states(files, record))
    return merged.result()


def merged_sums(
    files: Files, records: Sequence[ShardRecord], directions: Sequence[DirectionSettings], names: Sequence[str]
) -> MergedSums:
    """In one pass over the shards."""
    sums = MergedSums(directions, names)
    for record in records if sums else ():
        sums.add(open_states(files, record))
    return sums
