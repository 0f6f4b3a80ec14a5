"""One replica of the model and its pipeline in a process of its own, driven by short conversations with a coordinator.

The pipeline runs in a thread; `exchange` is all that the coordinator calls. It brings shards, takes away what has
happened since, and is the heartbeat of both. Only descriptions and records travel: rows go from here to the store.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from harvest.config import load_job
from harvest.environment import allow_open_files
from harvest.errors import HarvestError, LostLeaseError, MismatchError, RequestError
from harvest.outcome import CalledOffError, Progress, Watch
from harvest.pipeline import Pipeline
from harvest.plan import Plan, make_plan
from harvest.planning.lock import differences
from harvest.records import Assignment, ShardText, SourceFile
from harvest.runtime.intake import Report, facts_of_text, report_of
from harvest.runtime.logs import say
from harvest.runtime.metrics import Meter, NoMeter
from harvest.runtime.slices import ReadFacts
from harvest.stages import ORDER
from harvest.store.lease import LeaseWatch
from harvest.store.opening import open_files

ORPHAN_SECONDS = 120.0
"""Without a word from the coordinator a worker takes nothing more on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hire:
    """What a worker is told at its birth."""

    name: str
    job: Mapping[str, Any]
    lock: Mapping[str, Any]
    """Of the coordinator's plan; the worker's own must be equal."""
    life: str
    """The coordinator's."""
    folder: str
    """Where relative paths of the job begin."""
    files: tuple[SourceFile, ...]
    """As the coordinator counted them."""
    device: str
    """`cpu` or `cuda`."""


def hire(plan: Plan, name: str, life: str) -> Hire:
    """What a worker of this plan must know; what its own machine must not decide is settled."""
    job = plan.job.model_dump(mode="json")
    job["run"]["threads"] = plan.resolved.threads
    return Hire(
        name=name,
        job=job,
        lock=plan.lock(),
        life=life,
        folder=os.getcwd(),
        files=plan.source.files,
        device=plan.resolved.device,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the coordinator wants of a worker."""

    assignments: tuple[Assignment, ...] = ()
    called_off: tuple[Assignment, ...] = ()
    fresh: bool = False
    """Whatever came before counts no more: the coordinator has given it to others."""
    may_load: bool = True
    """The model may be loaded now; many workers at once would fight for the disk."""
    wait_seconds: float = 0.0
    """How long the reply may wait for something to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What has happened at a worker since its last reply."""

    host: str
    pid: int
    node: str = ""
    """Of the cluster; empty outside one."""
    stage: str
    """`waiting` for leave to load (or preparing for it), `loading`, `ready`, or `ended`."""
    error: str = ""
    """Why it has ended."""
    permanent: bool = False
    """It would end in the same way again."""
    read: tuple[tuple[str, ReadFacts], ...] = ()
    reports: tuple[Report, ...] = ()
    progress: tuple[Progress, ...] = ()
    still_seconds: float = 0.0
    """Since anything moved, while it holds a shard."""
    busy: bool = False
    """A shard is in its pipeline, wanted or not."""
    load_seconds: float = 0.0
    """That loading the model took; 0 before."""


@dataclass(slots=True)
class _News:
    """What the next reply will tell."""

    read: list[tuple[str, ReadFacts]] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    progress: dict[tuple[str, str], Progress] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.read or self.reports)


class Worker:
    """A process of the crew. `exchange` may be called from any one thread; everything else is its own."""

    def __init__(self, hire: Hire, meter: Meter | None = None, node: str = "") -> None:
        self._hire, self._meter = hire, meter or NoMeter()
        self._node = node
        self._inbox: queue.Queue[Assignment | None] = queue.Queue()
        self._holds: dict[tuple[str, int], Assignment] = {}
        self._under_way = 0
        self._news = _News()
        self._changed = threading.Condition()
        self._stage, self._error, self._permanent = "waiting", "", False
        self._load_seconds = 0.0
        self._born = self._moved = self._heard = time.monotonic()
        self._may_load = threading.Event()
        self._thread: threading.Thread | None = None

    def exchange(self, order: Order) -> Reply:
        """Takes an order, waits for something to tell, tells it."""
        self._heard = time.monotonic()
        with self._changed:
            if order.fresh:
                self._holds.clear()
            for assignment in order.called_off:
                self._holds.pop((assignment.shard.key, assignment.attempt), None)
            for assignment in order.assignments:
                self._holds[assignment.shard.key, assignment.attempt] = assignment
                self._inbox.put(assignment)
            if order.may_load:
                self._may_load.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="harvest-pipeline", daemon=True)
                self._thread.start()
            stage = self._stage
            self._changed.wait_for(lambda: bool(self._news) or self._stage != stage, timeout=order.wait_seconds)
            news, self._news = self._news, _News()
            queued = max(0, len(self._holds) - 1)
            reply = self._reply(news)
        self._meter.record("harvest_queued_shards", queued)  # again and again: Ray forgets a gauge that is silent
        self._meter.record("harvest_load_seconds", self._load_seconds)
        return reply

    def _reply(self, news: _News) -> Reply:
        return Reply(
            host=socket.gethostname(),
            pid=os.getpid(),
            node=self._node,
            stage=self._stage,
            error=self._error,
            permanent=self._permanent,
            read=tuple(news.read),
            reports=tuple(news.reports),
            progress=tuple(news.progress.values()),
            busy=self._under_way > 0,
            load_seconds=self._load_seconds,
            still_seconds=time.monotonic() - self._moved if self._holds and self._stage == "ready" else 0.0,
        )

    # ---- in the pipeline's thread ------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            pipeline = self._start()
            self._enter("ready")
            for outcome in pipeline.run(self._assignments()):
                self._finished(report_of(outcome), called_off=isinstance(outcome.error, CalledOffError))
            self._enter("ended")
        except Exception as error:
            text = str(error) if isinstance(error, HarvestError) else f"{type(error).__name__}: {error}"
            self._error = " ".join(text.split())
            self._permanent = isinstance(error, RequestError | MismatchError | LostLeaseError)
            self._enter("ended")

    def _start(self) -> Pipeline:
        """The plan made once more, and compared: same data, weights and tokenizer here as at the coordinator."""
        from harvest.model.load import load_model  # transformers, which only a process that works needs

        if os.path.isdir(self._hire.folder):
            os.chdir(self._hire.folder)
        allow_open_files()
        job = load_job(self._hire.job)
        files = open_files(job.run.path, job.run.storage)
        watch = LeaseWatch(files, self._hire.life)
        watch.check()
        plan = make_plan(job, known=self._hire.files, device=self._hire.device)
        if different := differences(self._hire.lock, plan.lock()):
            raise MismatchError(f"{self._hire.name} on {socket.gethostname()} does not see the same: {different[0]}")
        self._may_load.wait()
        self._enter("loading")
        torch.set_num_threads(plan.resolved.threads)  # the number belongs to the thread that sets it, which is this one
        begin = time.monotonic()
        with_head = bool(plan.answers)
        model = load_model(job.model, plan.config, plan.resolved.dtype, plan.resolved.device, with_head)
        self._load_seconds = time.monotonic() - begin
        return Pipeline(
            plan,
            model,
            files,
            self._hire.life,
            self._watch(watch),
            begin=self._born,
            load_seconds=self._load_seconds,
        )

    def _watch(self, lease: LeaseWatch) -> Watch:
        def still_mine() -> None:
            self._moved = time.monotonic()
            lease.check()

        return Watch(
            was_read=self._was_read,
            advanced=self._advanced,
            still_mine=still_mine,
            wanted=self._wanted,
            ending=lambda: self._inbox.put(None),
        )

    def _assignments(self) -> Iterator[Assignment]:
        while True:
            try:
                assignment = self._inbox.get(timeout=ORPHAN_SECONDS / 4)
            except queue.Empty:
                if time.monotonic() - self._heard > ORPHAN_SECONDS:
                    return
                continue
            if assignment is None:
                return
            before, self._moved = self._moved, time.monotonic()
            with self._changed:
                if self._under_way == 0:
                    self._meter.record("harvest_waiting_seconds_total", self._moved - before)
                self._under_way += 1
            yield assignment

    def _wanted(self, assignment: Assignment) -> bool:
        return (assignment.shard.key, assignment.attempt) in self._holds

    def _was_read(self, assignment: Assignment, text: ShardText) -> None:
        self._moved = time.monotonic()
        with self._changed:
            self._news.read.append((assignment.shard.key, facts_of_text(text)))
            self._changed.notify_all()

    def _advanced(self, one: Progress) -> None:
        before, self._moved = self._moved, time.monotonic()
        with self._changed:
            key = one.shard, one.attempt
            sofar = self._news.progress.get(key)
            self._news.progress[key] = one if sofar is None else _sum(sofar, one)
        for name, value in (("tokens", one.tokens), ("rows", one.rows), ("bytes", one.bytes)):
            self._meter.record(f"harvest_{name}_total", value)
        self._meter.record("harvest_forward_seconds_total", one.forward_seconds)
        self._meter.record("harvest_tokens_per_second", one.tokens / max(self._moved - before, 1e-6))

    def _finished(self, report: Report, *, called_off: bool) -> None:
        self._moved = time.monotonic()
        shard = report.assignment.shard.key
        if report.record is not None:
            for stage in ORDER:
                if seconds := report.record.seconds.get(stage, 0.0):
                    self._meter.record("harvest_stage_seconds_total", seconds, stage=stage)
        say("called off" if called_off else report.error or "stored", worker=self._hire.name, shard=shard)
        with self._changed:
            self._holds.pop((shard, report.assignment.attempt), None)
            self._under_way -= 1
            if not called_off:
                self._news.reports.append(report)
                self._changed.notify_all()

    def _enter(self, stage: str) -> None:
        say(stage, worker=self._hire.name, error=self._error)
        with self._changed:
            self._stage = stage
            self._moved = time.monotonic()
            self._changed.notify_all()


def _sum(a: Progress, b: Progress) -> Progress:
    return replace(
        a,
        tokens=a.tokens + b.tokens,
        rows=a.rows + b.rows,
        bytes=a.bytes + b.bytes,
        forward_seconds=a.forward_seconds + b.forward_seconds,
    )
