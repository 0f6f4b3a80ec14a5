"""The numbers that a cluster's Prometheus sees, one line each; advisory, for the count of record is the ledger's.

Ray puts `ray_` before every name, and adds its own labels (node, process, session).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from harvest.outcome import Progress
from harvest.plan import Plan
from harvest.records import ShardRecord
from harvest.runtime.progress import Observer

SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Bounds of the histograms' buckets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number: what it is called and what it counts."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    about: str
    labels: tuple[str, ...] = ()
    """Besides `run` and `worker`."""


OF_WORKERS = (
    Metric(name="harvest_tokens_total", kind="counter", about="Real tokens that the forward read."),
    Metric(name="harvest_rows_total", kind="counter", about="Rows captured, those of repeated tries included."),
    Metric(name="harvest_bytes_total", kind="counter", about="Bytes of rows that go to the store."),
    Metric(name="harvest_forward_seconds_total", kind="counter", about="Seconds in the forward."),
    Metric(name="harvest_stage_seconds_total", kind="counter", about="Busy seconds by stage.", labels=("stage",)),
    Metric(name="harvest_waiting_seconds_total", kind="counter", about="Seconds without a shard to work on."),
    Metric(name="harvest_queued_shards", kind="gauge", about="Shards that wait at a worker."),
    Metric(name="harvest_tokens_per_second", kind="gauge", about="Tokens per second since the last report."),
    Metric(name="harvest_load_seconds", kind="gauge", about="Seconds that loading the model took."),
)
OF_THE_COORDINATOR = (
    Metric(name="harvest_shards", kind="gauge", about="Shards by state.", labels=("state",)),
    Metric(name="harvest_workers", kind="gauge", about="Workers by stage.", labels=("stage",)),
    Metric(name="harvest_retries_total", kind="counter", about="Tries at a shard that failed and are repeated."),
    Metric(name="harvest_lost_workers_total", kind="counter", about="Workers that died or fell silent."),
    Metric(name="harvest_committed_shards_total", kind="counter", about="Shards committed by this coordinator."),
    Metric(name="harvest_committed_rows_total", kind="counter", about="Rows of shards committed by this coordinator."),
    Metric(name="harvest_non_finite_total", kind="counter", about="Non-finite values in committed shards."),
    Metric(name="harvest_shard_forward_seconds", kind="histogram", about="Seconds of forward of a committed shard."),
)
METRICS = {metric.name: metric for metric in (*OF_WORKERS, *OF_THE_COORDINATOR)}


class Meter(Protocol):
    """Takes numbers by the names above."""

    def record(self, name: str, value: float, **labels: str) -> None:
        """Adds to a counter, sets a gauge, or observes into a histogram."""


class NoMeter:
    """Where nobody scrapes."""

    def record(self, name: str, value: float, **labels: str) -> None: ...


class Counted:
    """Passes everything on to an observer, and counts it on the way."""

    def __init__(self, observer: Observer, meter: Meter) -> None:
        self._observer, self._meter = observer, meter

    def was_complete(self, run: str, rows: int) -> None:
        self._observer.was_complete(run, rows)

    def ray_starts(self, address: str | None) -> None:
        self._observer.ray_starts(address)

    def started(self, plan: Plan, committed: list[ShardRecord]) -> None:
        self._observer.started(plan, committed)

    def workers_start(self, workers: int) -> None:
        self._observer.workers_start(workers)

    def loading(self) -> None:
        self._observer.loading()

    def loaded(self, seconds: float, took: float) -> None:
        self._observer.loaded(seconds, took)

    def first_forward(self, seconds: float) -> None:
        self._observer.first_forward(seconds)

    def joined(self, worker: str, where: str, workers: int) -> None:
        self._observer.joined(worker, where, workers)

    def left(self, worker: str, why: str, workers: int) -> None:
        self._meter.record("harvest_lost_workers_total", 1)
        self._observer.left(worker, why, workers)

    def waiting(self, text: str) -> None:
        self._observer.waiting(text)

    def advanced(self, advance: Progress) -> None:
        self._observer.advanced(advance)

    def committed(self, record: ShardRecord) -> None:
        self._meter.record("harvest_committed_shards_total", 1)
        self._meter.record("harvest_committed_rows_total", record.rows)
        self._meter.record("harvest_non_finite_total", sum(record.non_finite.values()))
        self._meter.record("harvest_shard_forward_seconds", record.seconds.get("forward", 0.0))
        self._observer.committed(record)

    def retried(self, shard: str, error: str) -> None:
        self._meter.record("harvest_retries_total", 1)
        self._observer.retried(shard, error)

    def gave_up(self, shard: str, error: str) -> None:
        self._observer.gave_up(shard, error)

    def stopping(self) -> None:
        self._observer.stopping()

    def finished(self, summary: dict[str, Any]) -> None:
        self._observer.finished(summary)

    def warned(self, text: str) -> None:
        self._observer.warned(text)

    def stopped(self, error: BaseException) -> None:
        self._observer.stopped(error)
