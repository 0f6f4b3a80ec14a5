"""The coordinator's loop over a crew: hands out, listens, notices who died, hangs or fell silent. Knows no Ray.

Every worker has one conversation open at all times. Its reply is the heartbeat; what it tells goes to the intake, and
the next order answers it. A worker that is lost takes nothing with it: its shards go to others, and whatever it still
writes is in attempts that nobody commits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from harvest.errors import WorkError
from harvest.runtime.intake import Intake
from harvest.runtime.metrics import Meter, NoMeter
from harvest.runtime.progress import Observer
from harvest.runtime.schedule import Schedule
from harvest.runtime.worker import Order, Reply
from harvest.store.lease import Lease

SILENT_SECONDS = 60.0
"""A worker that has not answered for this long counts as dead."""
HUNG_SECONDS = 900.0
"""So does one that answers, holds a shard, and has not moved: no batch, no object, nothing read."""
LONELY_SECONDS = 60.0
"""Without a first worker, whoever watches is told what is waited for; again after as long."""
UNBORN_SECONDS = 900.0
"""A worker that has never answered waits for room in the cluster, or its process is stuck: it is asked for anew."""
SETTLE_SECONDS = 10.0
"""At the end, for workers to put down what others have done meanwhile."""
BIRTHS = 3
"""Times in a row that a worker may die or fail before it is ready; then it is let go."""
BUSY_SECONDS = 1.0
IDLE_SECONDS = 0.05
"""How long a reply may wait for news: from a worker that has all it may hold, and from one that could take more."""
GROW_SECONDS = 10.0
"""Between two looks for room for more workers."""
REPLIES_PER_SECOND = 200
"""Of a whole crew; larger crews answer more slowly."""
LOADS_PER_NODE = 4
"""Models loaded at a time on one node, once a first one has brought the weights into its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """Instead of a reply: the worker's process is not there any more."""

    reason: str
    blame: bool = True
    """Its shard may have killed it; not so where a whole node went."""
    final: bool = False
    """It does not come back by itself."""


class Crew(Protocol):
    """The workers of a run, however they are reached. A lost worker comes back under its own name, if it can."""

    workers: Sequence[str]
    needs: str
    """What one takes, for messages."""

    def send(self, worker: str, order: Order) -> None:
        """Opens a conversation; one at a time for each worker."""

    def wait(self, seconds: float) -> list[tuple[str, Reply | Gone]]:
        """The replies that are there; waits for a first one, but no longer than `seconds`."""

    def restart(self, worker: str) -> None:
        """Ends the worker's process, dead or alive, forgets its conversation, and lets another one begin."""

    def dismiss(self, worker: str) -> None:
        """Ends the worker for good."""

    def newcomers(self) -> Sequence[str]:
        """Workers that have come into being since the last call, because there is room for them now.

        Raises WorkError where there will never be any again.
        """

    def leaving(self) -> frozenset[str]:
        """Nodes that are announced to be taken away soon: a preemption notice, a drain."""


@dataclass(slots=True)
class _Member:
    """What is known of a worker."""

    stage: str = "absent"
    node: str = ""
    where: str = ""
    heard: float | None = None
    """When its process last answered; None before its first answer."""
    since: float = 0.0
    """When it was asked for."""
    births: int = 0
    """Failed ones in a row."""
    busy: bool = False
    """It was at work on a shard when it last answered."""
    leave: bool = False
    """It may load the model."""
    fresh: bool = True
    """No order has reached its process yet, as far as we know."""
    silent: bool = False
    """It could not be reached; the next try is a second away."""


class Lead:
    """Runs a schedule to its end with a crew."""

    def __init__(
        self,
        crew: Crew,
        *,
        schedule: Schedule,
        intake: Intake,
        lease: Lease,
        observer: Observer,
        meter: Meter | None = None,
        clock: Callable[[], float] = time.monotonic,
        begin: float = 0.0,
        together: bool = False,
    ) -> None:
        """`together`: nothing is handed out before all are ready, so that what is measured is all of them at work."""
        self._crew, self._schedule, self._intake, self._lease = crew, schedule, intake, lease
        self._observer, self._meter, self._clock, self._begin = observer, meter or NoMeter(), clock, begin
        self._members = {worker: _Member(since=clock()) for worker in crew.workers}
        self._warm: set[str] = set()
        """Nodes on which a model has been loaded."""
        self._leaving: frozenset[str] = frozenset()
        self._looked = self._grew = self._told = clock()
        self._was_loading = self._was_ready = self._moved = False
        self._waits_for_all = together

    def run(self) -> None:
        """Returns when the schedule is finished. Raises WorkError without workers, LostLeaseError after a takeover."""
        self._lease.tell(f"starting {len(self._members)} workers")
        self._observer.workers_start(len(self._members))
        for worker in self._members:
            self._send(worker)
        while not self._schedule.finished:
            self._listen()
            if self._clock() - self._looked > BUSY_SECONDS:
                self._looked = self._clock()
                self._lease.check()
                self._look_around()
        settled = self._clock() + SETTLE_SECONDS
        while any(member.busy for member in self._members.values()) and self._clock() < settled:
            self._listen()

    def _listen(self) -> None:
        heard = [(worker, news) for worker, news in self._crew.wait(BUSY_SECONDS) if worker in self._members]
        told = [news for _, news in heard if isinstance(news, Reply)]
        for reply in told:
            for key, facts in reply.read:
                self._schedule.read(key, facts)
            for progress in reply.progress:
                if not self._moved:
                    self._moved = True
                    self._observer.first_forward(self._clock() - self._begin)
                self._observer.advanced(progress)
        if reports := [report for reply in told for report in reply.reports]:
            self._intake.take(reports, self._clock())
        for worker, news in heard:
            self._hear(worker, news)

    # ---- one worker --------------------------------------------------------------------------------------------

    def _hear(self, worker: str, news: Reply | Gone) -> None:
        member, now = self._members[worker], self._clock()
        if isinstance(news, Gone):
            if member.heard is None and not news.final:
                member.silent = True  # on its way: its node may not be known to be dead yet
            else:
                self._lose(worker, news.reason, blame=news.blame, end=news.final)
            return
        member.fresh, member.heard, member.node, member.where = False, now, news.node, f"{news.host}, pid {news.pid}"
        if news.stage in ("loading", "ready") and not self._was_loading:
            self._was_loading = True
            self._lease.tell("loading the model")
            self._observer.loading()
        if news.stage == "ready" and member.stage != "ready":
            self._ready(worker, member, news)
        member.stage, member.busy = news.stage, news.busy
        if news.stage == "ended":
            self._lose(worker, news.error or "ended by itself", blame=bool(news.error), permanent=news.permanent)
        elif news.still_seconds > HUNG_SECONDS:
            self._lose(worker, f"has not moved for {news.still_seconds:.0f} s", end=True)
        else:
            self._send(worker)

    def _ready(self, worker: str, member: _Member, news: Reply) -> None:
        member.births = 0
        self._warm.add(news.node)
        if not self._was_ready:
            self._was_ready = True
            self._lease.tell("harvesting")
            self._observer.loaded(self._clock() - self._begin, news.load_seconds)
        ready = 1 + sum(other.stage == "ready" for other in self._members.values())
        self._observer.joined(worker, member.where, ready)

    def _send(self, worker: str) -> None:
        member, now = self._members[worker], self._clock()
        assignments = []
        if member.stage == "ready" and not self._is_leaving(member) and not self._waits():
            while (assignment := self._schedule.next(worker, now)) is not None:
                assignments.append(assignment)
        wait = BUSY_SECONDS if assignments else IDLE_SECONDS
        order = Order(
            assignments=tuple(assignments),
            called_off=tuple(self._schedule.called_off(worker)),
            fresh=member.fresh,
            may_load=self._may_load(member),
            wait_seconds=0.0 if member.heard is None else max(wait, len(self._members) / REPLIES_PER_SECOND),
        )
        self._crew.send(worker, order)

    def _waits(self) -> bool:
        """Once all have been ready, what is left of them does not wait for those that come anew."""
        if self._waits_for_all:
            self._waits_for_all = any(member.stage != "ready" for member in self._members.values())
        return self._waits_for_all

    def _is_leaving(self, member: _Member) -> bool:
        """Its node will be gone before another shard is done, and there is someone else to do it."""
        return member.node in self._leaving and any(
            other.stage == "ready" and other.node not in self._leaving for other in self._members.values()
        )

    def _may_load(self, member: _Member) -> bool:
        """One worker of a node first, which brings the weights into its memory; then a few at a time."""
        if not member.leave and member.heard is not None:
            loading = sum(other.leave and other.stage != "ready" for other in self._on(member.node))
            member.leave = loading < (LOADS_PER_NODE if member.node in self._warm else 1)
        return member.leave

    def _on(self, node: str) -> list[_Member]:
        return [member for member in self._members.values() if member.heard is not None and member.node == node]

    def _lose(
        self, worker: str, reason: str, *, blame: bool = True, end: bool = False, permanent: bool = False
    ) -> None:
        """Its shards go elsewhere; it begins anew, or is let go where it never gets ready."""
        member = self._members[worker]
        why = f"{f'{member.where}: ' if member.where else ''}{reason}"
        text = f"{worker}{f' ({member.where})' if member.where else ''}: {reason}"
        births = 0 if member.stage == "ready" else member.births + 1
        self._intake.lost(worker, text, blame=blame)
        ready = sum(other.stage == "ready" for name, other in self._members.items() if name != worker)
        self._observer.left(worker, why, ready)
        if permanent or births >= BIRTHS:
            self._crew.dismiss(worker)
            del self._members[worker]
            if not self._members:
                self._lease.check()
                raise WorkError(f"no worker is left; the last one was {text}")
            return
        self._members[worker] = _Member(births=births, since=self._clock())
        if end or member.stage == "ended":
            self._crew.restart(worker)
        self._send(worker)

    # ---- all of them -------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Once a second: who has not answered, which nodes will go, and what the gauges say."""
        now = self._clock()
        self._leaving = self._crew.leaving()
        self._intake.beat()
        for worker, member in list(self._members.items()):
            if member.silent:
                member.silent = False
                self._send(worker)
            elif member.heard is None and now - member.since > UNBORN_SECONDS:
                self._members[worker] = _Member(births=member.births, since=now)
                self._crew.restart(worker)
                self._send(worker)
            elif member.heard is not None and now - member.heard > SILENT_SECONDS:
                self._lose(worker, f"has not answered for {now - member.heard:.0f} s", end=True)
        if any(member.heard is not None for member in self._members.values()):
            self._told = now
        elif now - self._told > LONELY_SECONDS:
            self._told = now
            self._observer.waiting(f"no worker has begun yet; each waits for {self._crew.needs} of the cluster")
        if now - self._grew > GROW_SECONDS:
            self._grew = now
            for worker in self._crew.newcomers():
                self._members[worker] = _Member(since=now)
                self._send(worker)
        for stage, count in Counter(member.stage for member in self._members.values()).items():
            self._meter.record("harvest_workers", count, stage=stage)
        self._meter.record("harvest_shards", self._schedule.committed_shards, state="committed")
        self._meter.record("harvest_shards", len(self._schedule.running), state="running")
        self._meter.record("harvest_shards", len(self._schedule.failures), state="failed")
