"""Who works on which shard, what a failure means, when the run is over: a pure state machine.

It knows no Ray, no files, no clock and no threads: outcomes and the time go in, assignments come out. Every try at a
shard has a number of its own in this life, so that two tries never share a folder, and the first one to report wins.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harvest.records import Assignment, Shard, ShardRecord, SourceFile
from harvest.runtime.slices import ReadFacts, Slices, facts_of
from harvest.store.layout import parse_attempt

LATE_FACTOR = 3.0
"""A shard is late after so many times the median of what shards took in this life, hand-out to commit."""
LATE_SECONDS = 30.0
"""No shard is late before this."""
RECENT = 1000
"""Durations that the median is taken of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A shard that was given up."""

    shard: Shard
    attempts: int
    """That failed."""
    error: str
    permanent: bool
    """The error would repeat itself."""


@dataclass(frozen=True, slots=True)
class _Try:
    assignment: Assignment
    worker: str
    since: float


class Schedule:
    """Hands out shards until every one is committed or given up."""

    def __init__(
        self,
        files: Sequence[SourceFile],
        *,
        shard_documents: int,
        attempts: int,
        kept: Callable[[int, int, int], int],
        limit: int | None = None,
        max_tokens: int | None = None,
        committed: Mapping[str, ShardRecord] | None = None,
        depth: int | None = None,
        mark: Callable[[int, int], Mapping[str, Any] | None] = lambda file, row: None,
        before: Callable[[int, int], Mapping[str, tuple[int, int]]] = lambda file, row: {},
    ) -> None:
        """`kept(file, start, stop)` tells how many rows of a range the sample keeps, without reading them.

        `mark(file, row)`: a cursor close before a row, where there is an index; a worker then need not make its own.
        `before(file, row)`: what lies before a shard of the groups of directions that pair by order.

        `depth`: shards that one worker holds at a time, the one it works on included; None: as many as it asks for.
        """
        self._slices = Slices(
            files,
            shard_documents=shard_documents,
            kept=kept,
            limit=limit,
            max_tokens=max_tokens,
            committed=committed or {},
            mark=mark,
            before=before,
        )
        self._attempts, self._depth = attempts, depth
        self._held: dict[str, list[_Try]] = {}  # worker -> its tries, in the order in which it works on them
        self._by_key: dict[str, list[_Try]] = {}
        self._retry: deque[Assignment] = deque()
        self._failed: dict[str, int] = {}
        self._avoid: dict[str, str] = {}  # shard -> the worker that failed last at it
        self._suspects: set[str] = set()  # shards that a worker died with: they are tried alone
        self._called_off: dict[str, list[Assignment]] = {}
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._numbers = 0
        self._stopped = False
        self.failures: list[Failure] = []

    # ---- out ---------------------------------------------------------------------------------------------------

    def next(self, worker: str = "", now: float = 0.0) -> Assignment | None:
        """The next shard for a worker; None where there is none for it now (see `finished`). `now` in seconds."""
        held = self._held.setdefault(worker, [])
        full = self._depth is not None and len(held) >= self._depth
        if self._stopped or full or any(one.assignment.shard.key in self._suspects for one in held):
            return None
        found = self._take_retry(worker, held) or self._slices.take(worker, patient=bool(held))
        if found is None and not held:
            found = self._queued_elsewhere(worker) or self._late(worker, now)
        return None if found is None else self._hand_out(found, worker, now)

    def called_off(self, worker: str) -> list[Assignment]:
        """Tries of this worker that nobody needs any more, each told once."""
        return self._called_off.pop(worker, [])

    @property
    def finished(self) -> bool:
        """Nothing is running and nothing will be handed out any more."""
        if self._by_key or self._retry:
            return False
        return self._stopped or self._slices.waiting_for() is not None

    @property
    def running(self) -> list[str]:
        """Keys of the shards that are out, in the order in which they went."""
        return list(self._by_key)

    @property
    def committed_shards(self) -> int:
        """Of this life and earlier ones."""
        return len(self._slices.done)

    def held(self, worker: str) -> int:
        """Shards that this worker has."""
        return len(self._held.get(worker, ()))

    # ---- in ----------------------------------------------------------------------------------------------------

    def read(self, key: str, facts: ReadFacts) -> None:
        """A shard has been read and tokenised; its forward is still to come."""
        self._slices.read(key, facts)

    def committed(self, record: ShardRecord, now: float = 0.0) -> None:
        """A shard's record stands in the ledger; whoever else is at it is called off."""
        key = record.shard.key
        attempt = parse_attempt(record.attempt)
        for one in self._by_key.get(key, []):
            if attempt is not None and attempt[2] == one.assignment.attempt:
                self._durations.append(now - one.since)
        self._release(key)
        self._retry = deque(waiting for waiting in self._retry if waiting.shard.key != key)
        self._slices.read(key, facts_of(record))
        self._slices.done.add(key)

    def wants(self, assignment: Assignment) -> bool:
        """Whether a report about this try still matters: its shard is neither committed nor given up."""
        key = assignment.shard.key
        return key not in self._slices.done and all(failure.shard.key != key for failure in self.failures)

    def failed(self, assignment: Assignment, error: str, *, permanent: bool) -> bool:
        """A try has failed; True when the shard goes on (again, or elsewhere), False when it is given up.

        `permanent` marks an error that would repeat itself. A try that was called off has failed at nothing.
        """
        key = assignment.shard.key
        one = next((one for one in self._by_key.get(key, []) if one.assignment.attempt == assignment.attempt), None)
        if one is None:
            return True
        self._remove(one)
        self._avoid[key] = one.worker
        return self._try_again(one.assignment, error, permanent=permanent)

    def lost(self, worker: str, error: str, *, blame: bool = True) -> list[tuple[Assignment, bool]]:
        """A worker is gone, and with it its tries; returns them, each with whether its shard goes on.

        With `blame` the shards may have killed it: each counts a failed try, and is tried alone from now on.
        """
        lost = self._held.pop(worker, [])
        self._called_off.pop(worker, None)
        for one in lost:
            self._remove(one)
        if blame:
            self._suspects |= {one.assignment.shard.key for one in lost}
        return [(one.assignment, self._try_again(one.assignment, error, counts=blame)) for one in lost]

    def stop(self) -> None:
        """Hands out nothing more; what is running may still report."""
        self._stopped = True
        self._retry.clear()

    # ---- inside ------------------------------------------------------------------------------------------------

    def _hand_out(self, assignment: Assignment, worker: str, now: float) -> Assignment:
        self._numbers += 1
        one = _Try(replace(assignment, attempt=self._numbers), worker, now)
        self._held[worker].append(one)
        self._by_key.setdefault(assignment.shard.key, []).append(one)
        return one.assignment

    def _take_retry(self, worker: str, held: Sequence[_Try]) -> Assignment | None:
        """One that failed before: with another worker where there is one, and alone where a worker died with it."""
        for waiting in self._retry:
            key = waiting.shard.key
            if held and key in self._suspects:
                continue
            if self._avoid.get(key) == worker and len(self._held) > 1:
                continue
            self._retry.remove(waiting)
            return waiting
        return None

    def _queued_elsewhere(self, worker: str) -> Assignment | None:
        """One that waits behind another at a worker: it is called off there."""
        queued = [tries[-1] for other, tries in self._held.items() if other != worker and len(tries) > 1]
        if not queued:
            return None
        one = min(queued, key=lambda one: one.since)
        self._remove(one)
        self._called_off.setdefault(one.worker, []).append(one.assignment)
        return one.assignment

    def _late(self, worker: str, now: float) -> Assignment | None:
        """One that takes far longer than its like, and that nobody else tries yet."""
        if not self._durations:
            return None
        limit = max(LATE_SECONDS, LATE_FACTOR * statistics.median(self._durations))
        late = [
            tries[0]
            for key, tries in self._by_key.items()
            if len(tries) == 1 and key not in self._suspects and tries[0].worker != worker
        ]
        oldest = min(late, key=lambda one: one.since, default=None)
        return oldest.assignment if oldest is not None and now - oldest.since > limit else None

    def _try_again(self, assignment: Assignment, error: str, *, permanent: bool = False, counts: bool = True) -> bool:
        key = assignment.shard.key
        self._failed[key] = self._failed.get(key, 0) + counts
        if permanent or self._stopped or self._failed[key] >= self._attempts:
            self._release(key)
            failure = Failure(shard=assignment.shard, attempts=self._failed[key], error=error, permanent=permanent)
            self.failures.append(failure)
            return False
        if key not in self._by_key:
            self._retry.append(assignment)
        return True

    def _release(self, key: str) -> None:
        """Nobody works on this shard any more, and whoever did is told so."""
        for one in list(self._by_key.get(key, [])):
            self._remove(one)
            self._called_off.setdefault(one.worker, []).append(one.assignment)

    def _remove(self, one: _Try) -> None:
        if one in self._held.get(one.worker, []):
            self._held[one.worker].remove(one)
        tries = self._by_key[one.assignment.shard.key]
        tries.remove(one)
        if not tries:
            del self._by_key[one.assignment.shard.key]
