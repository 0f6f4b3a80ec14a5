"""Tells other programs what happens in a run, as lines of JSON; whatever happens, the last line says how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

import harvest
from harvest.errors import ending
from harvest.runtime import events
from harvest.runtime.progress import Lines, Quiet
from harvest.runtime.tally import Expected, Tally

if TYPE_CHECKING:  # a job that is wrong by itself is refused before torch is loaded
    from harvest.outcome import Progress as Advance
    from harvest.plan import Plan
    from harvest.records import ShardRecord

PROGRESS_SECONDS = 5.0
"""Between two events that say how far it is."""


class Teller:
    """Writes events, a line each."""

    def __init__(self, stream: TextIO, run: str | None = None) -> None:
        self._lines = Lines(stream)
        self.run = run
        """Whose events they are; None until the job is read."""

    def tell(self, kind: type[events.Event], **fields: Any) -> None:
        """One event, now. Raises TypeError for fields that are not its own."""
        told = {**fields, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "run": self.run}
        event = asdict(kind(**told))
        self._lines.say(json.dumps({"event": event.pop("event"), **event}, allow_nan=False))


@contextlib.contextmanager
def last_word(teller: Teller, kind: type[events.RunFailed] | type[events.WatchEnded]) -> Iterator[None]:
    """An error that leaves the block is told as the last event."""
    try:
        yield
    except BaseException as error:
        text, status = ending(error)
        teller.tell(kind, status=status, error=text)
        raise


@contextlib.contextmanager
def run_told(stream: TextIO) -> Iterator[Events]:
    """The events of one run. Whoever uses it ends the block with `completed`, or with an error."""
    teller = Teller(stream)
    with last_word(teller, events.RunFailed):
        yield Events(teller)


class Events(Quiet):
    """Tells programs of everything, and people on stderr of warnings alone."""

    def __init__(self, teller: Teller, clock: Callable[[], float] = time.monotonic) -> None:
        self._teller, self._tell, self._clock = teller, teller.tell, clock
        self._tally, self._last = Tally(clock), clock()

    def begun(self, run: str) -> None:
        """The job is read."""
        self._teller.run = run
        self._tell(events.RunStarted, harvest=harvest.__version__, host=socket.gethostname(), pid=os.getpid())

    def completed(self, summary: Mapping[str, Any]) -> None:
        """The run is complete, and there is nothing more to tell. `summary`: the fields of `RunCompleted`."""
        self._tell(events.RunCompleted, **summary)

    def started(self, plan: Plan, committed: list[ShardRecord]) -> None:
        expected = Expected.of(plan)
        self._tally.start(expected, committed)
        self._tell(
            events.PlanMade,
            names=[str(name) for name in plan.names],
            documents=expected.documents,
            tokens=expected.tokens,
            rows=expected.rows,
            shards=expected.shards,
            committed_shards=self._tally.shards,
            committed_tokens=self._tally.tokens,
        )

    def was_complete(self, run: str, rows: int) -> None:
        self._tell(events.AlreadyComplete, rows=rows)

    def ray_starts(self, address: str | None) -> None:
        self._tell(events.RayStarting, address=address)

    def workers_start(self, workers: int) -> None:
        self._tell(events.WorkersStarting, workers=workers)

    def loading(self) -> None:
        self._tell(events.ModelLoading)

    def loaded(self, seconds: float, took: float) -> None:
        self._tally.ready()
        self._last = self._clock()
        self._tell(events.ModelLoaded, seconds=round(seconds, 3), load_seconds=round(took, 3))

    def first_forward(self, seconds: float) -> None:
        self._tell(events.FirstForward, seconds=round(seconds, 3))

    def joined(self, worker: str, where: str, workers: int) -> None:
        self._tally.crew(workers)
        self._tell(events.WorkerJoined, worker=worker, where=where, workers=workers)

    def left(self, worker: str, why: str, workers: int) -> None:
        self._tally.crew(workers)
        self._tell(events.WorkerLost, worker=worker, why=why, workers=workers)

    def waiting(self, text: str) -> None:
        self._tell(events.Waiting, why=text)

    def advanced(self, advance: Advance) -> None:
        self._tally.advanced(advance)
        self._now_and_then()

    def committed(self, record: ShardRecord) -> None:
        self._tally.committed(record)
        shard = record.shard.key
        if record.self_check:
            self._tell(events.SelfCheck, shard=shard, errors=dict(record.self_check))
        self._tell(
            events.ShardCommitted,
            shard=shard,
            attempt=record.attempt,
            documents=record.documents,
            skipped=dict(record.skipped),
            tokens=record.tokens,
            rows=record.rows,
            bytes=sum(item.bytes for item in record.objects.values()),
            non_finite=dict(record.non_finite),
            forward_seconds=round(record.seconds.get("forward", 0.0), 3),
        )
        self._now_and_then()

    def retried(self, shard: str, error: str) -> None:
        self._tally.retried()
        self._tell(events.ShardRetried, shard=shard, error=error)

    def gave_up(self, shard: str, error: str) -> None:
        self._tally.gave_up(shard)
        self._tell(events.ShardFailed, shard=shard, error=error)

    def warned(self, text: str) -> None:
        super().warned(text)
        self._tell(events.Warned, text=text)

    def stopping(self) -> None:
        self._tell(events.Stopping)

    def finished(self, summary: dict[str, Any]) -> None:
        self._tell_progress()

    def _now_and_then(self) -> None:
        if self._clock() - self._last >= PROGRESS_SECONDS:
            self._last = self._clock()
            self._tell_progress()

    def _tell_progress(self) -> None:
        tally = self._tally
        counts = ("documents", "skipped", "tokens", "rows", "bytes", "shards", "retries", "failed", "workers")
        expected = ("expected_documents", "expected_tokens", "expected_rows", "expected_shards")
        left = tally.seconds_left
        self._tell(
            events.ProgressMade,
            **{key: getattr(tally, key) for key in (*counts, *expected)},
            tokens_per_second=round(tally.tokens_per_second, 1),
            bytes_per_second=round(tally.bytes_per_second),
            forward_share=round(tally.forward_share, 4),
            seconds=round(tally.seconds, 3),
            seconds_left=None if left is None else round(left, 1),
        )
