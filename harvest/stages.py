"""Where a worker's time goes: busy and waiting seconds of every stage, that travel with the records, and what they say.

A worker has three lines beside one another: reading (`read`), the model's own (`check`, `forward`, `copy`, `reduce`,
`commit`) and writing (`write`, `pool`, `finish`). The model's own is the one that counts: its whole time is `worker`,
and what is no stage of it was spent waiting for one of the others. All in seconds of a record:

    read            reading and tokenising                     read.idle        no shard was handed out
    check           a worker's first documents, compared       forward.idle     no shard was read
    forward         the model; of an accelerator with copies   forward.blocked  the writer had no room, or was not done
    copy            rows to where they gather                  worker           all of the model's line
    reduce          sums; windows that run once more           start            a worker's begin to its first forward
    reduce.beside   the same, beside an accelerator's forward
    write, pool     rows to the store; pooled rows             load             of it, loading the model
    finish          tables and sums, made durable
    commit          the outcome of the shard before is taken: where the work is in one process, its record is written
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from harvest.records import ShardRecord

REDUCED_BESIDE = "reduce.beside"
OWN = ("forward", "copy", "reduce", "check", "commit")
"""Stages of the model's own line."""
BESIDE = ("read", "write", "pool", "finish")
WRITING = ("write", "pool", "finish")
ORDER = ("read", "check", "forward", "copy", "reduce", "write", "pool", "finish", "commit")
"""As a shard meets them."""
OPTIONAL = ("check", "pool")
"""Not shown where no time went into them."""
OTHER = "between the stages: batches and shards begun, progress told"
WHOLE = "worker"
T = TypeVar("T")


class Clock:
    """Adds the time spent inside to a stage's seconds."""

    def __init__(self, total: dict[str, float], stage: str) -> None:
        self._total, self._stage, self.seconds = total, stage, 0.0

    def __enter__(self) -> Clock:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self._total[self._stage] = self._total.get(self._stage, 0.0) + self.seconds


def waited(items: Iterable[T], clock: Clock) -> Iterator[T]:
    """The items, with the time that each is waited for on the clock."""
    source = iter(items)
    while True:
        with clock:
            try:
                item = next(source)
            except StopIteration:
                return
        yield item


class Spent:
    """What the model's own line spends outside any shard's work, from one record to the next. One thread's."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.begin()

    def begin(self) -> None:
        """The line begins to work, or goes on after a rest that does not count."""
        self._since = time.perf_counter()

    def clock(self, stage: str) -> Clock:
        """A context that adds its seconds to a stage's, or to what the line waits for."""
        return Clock(self._seconds, stage)

    def add(self, stage: str, seconds: float) -> None:
        """The same, measured elsewhere."""
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """All since the last time, with the line's whole time."""
        now = time.perf_counter()
        self.add(WHOLE, now - self._since)
        taken, self._seconds, self._since = self._seconds, {}, now
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Seconds of one stage, of all workers together."""

    busy: float
    before: float | None = None
    """Its line waited for work: of the stage before, or of the coordinator. None where another stage's line is its."""
    behind: float | None = None
    """Its line waited for the stage behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The report of a run's stages."""

    worker_seconds: float
    """Of the lines of all workers' models, from their first shard asked for to their last one done."""
    stages: Mapping[str, Stage]
    reduced_beside: float
    """Of the seconds of `reduce`: in a line of its own, beside an accelerator's forward."""
    other: float
    """Of those seconds: between the stages."""
    limit: str
    """The stage that limits."""
    why: str
    """The same as a sentence."""
    starts: int
    """Workers that began, a worker's later lives included."""
    start: float
    """From a worker's begin to its first forward, on average."""
    load: float
    """Of it, loading the model."""
    check: float
    """Of it, comparing its first documents."""

    @property
    def forward_share(self) -> float:
        """Of the workers' time."""
        return self.stages["forward"].busy / self.worker_seconds

    @property
    def table(self) -> list[str]:
        """For people: the lines of a table."""
        rows: list[tuple[str, ...]] = [("stage", "busy", "of the time", "waited before", "waited behind")]
        for name, stage in self.stages.items():
            waits = ("" if seconds is None else in_words(seconds) for seconds in (stage.before, stage.behind))
            rows.append((name, in_words(stage.busy), self._share(stage.busy), *waits))
        for name, seconds in (("other", self.other), ("worker", self.worker_seconds)):
            rows.append((name, in_words(seconds), self._share(seconds), "", ""))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
        return [*lines[:-2], f"{lines[-2]}  {OTHER}", lines[-1]]

    @property
    def text(self) -> str:
        """The table, how the workers began, and what limits."""
        lines = self.table
        if self.starts:
            parts = [("the model", self.load), ("self-check", self.check)]
            told = ", ".join(f"{what} {in_words(seconds)}" for what, seconds in parts if seconds >= 0.005)
            mean = f", mean of {self.starts} starts of workers" if self.starts > 1 else ""
            began = f"first forward {in_words(self.start)} after a worker began"
            lines += ["", f"start   {began}{f' ({told})' if told else ''}{mean}"]
        return "\n".join([*lines, f"limit   {self.why}"])

    def _share(self, seconds: float) -> str:
        return f"{100 * seconds / self.worker_seconds:.0f} %"

    def data(self) -> dict[str, object]:
        """For programs."""
        return {
            "worker_seconds": round(self.worker_seconds, 3),
            "forward_share": round(self.forward_share, 4),
            "limit": self.limit,
            "why": self.why,
            "other_seconds": round(self.other, 3),
            "stages": {
                name: {
                    "busy_seconds": round(stage.busy, 3),
                    "waiting_before_seconds": None if stage.before is None else round(stage.before, 3),
                    "waiting_behind_seconds": None if stage.behind is None else round(stage.behind, 3),
                }
                for name, stage in self.stages.items()
            },
            "starts": self.starts,
            "first_forward_seconds": round(self.start, 3),
            "load_seconds": round(self.load, 3),
            "check_seconds": round(self.check, 3),
        }


class Worked:
    """The seconds that committed shards tell, added up over workers."""

    def __init__(self) -> None:
        self._total: dict[str, float] = {}
        self._starts = 0

    def add(self, record: ShardRecord) -> None:
        """One more shard; records of earlier versions have no more than some stages, and tell nothing."""
        if WHOLE in record.seconds:
            self._starts += "start" in record.seconds
            for key, seconds in record.seconds.items():
                self._total[key] = self._total.get(key, 0.0) + seconds

    def stages(self) -> Stages | None:
        """What they come to; None where none tells."""
        get, whole = self._total.get, self._total.get(WHOLE, 0.0)
        if whole <= 0.0:
            return None
        idle, blocked, starved = get("forward.idle", 0.0), get("forward.blocked", 0.0), get("read.idle", 0.0)
        waits: dict[str, tuple[float, float | None]] = {
            "read": (starved, max(0.0, whole - get("read", 0.0) - starved)),
            "forward": (idle, blocked),
            "write": (max(0.0, whole - sum(get(stage, 0.0) for stage in WRITING)), None),
        }
        stages = {
            name: Stage(busy=get(name, 0.0), before=waits[name][0], behind=waits[name][1])
            if name in waits
            else Stage(busy=get(name, 0.0))
            for name in ORDER
            if name not in OPTIONAL or get(name, 0.0)
        }
        beside = get(REDUCED_BESIDE, 0.0)
        if beside:
            stages["reduce"] = Stage(busy=get("reduce", 0.0) + beside, before=max(0.0, whole - beside))
        limit, why = _limit(self._total, whole)
        mean = max(1, self._starts)
        return Stages(
            worker_seconds=whole,
            stages=stages,
            reduced_beside=beside,
            other=max(0.0, whole - idle - blocked - sum(get(stage, 0.0) for stage in OWN)),
            limit=limit,
            why=why,
            starts=self._starts,
            start=get("start", 0.0) / mean,
            load=get("load", 0.0) / mean,
            check=get("check", 0.0) / mean,
        )


def stages_of(records: Iterable[ShardRecord]) -> Stages | None:
    """What committed shards tell, summed over workers; None where none tells."""
    worked = Worked()
    for record in records:
        worked.add(record)
    return worked.stages()


def in_words(seconds: float) -> str:
    """Seconds to three digits or so: `1.23 s`, `45.6 s`, `1,234 s`."""
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"


def _limit(total: Mapping[str, float], whole: float) -> tuple[str, str]:
    """The stage that most of the model's line went to, or was spent waiting for, and that in words."""
    shares = {stage: total.get(stage, 0.0) / whole for stage in OWN}
    shares |= {"read": total.get("forward.idle", 0.0) / whole, "write": total.get("forward.blocked", 0.0) / whole}
    limit = max(shares, key=lambda stage: shares[stage])
    share, forward = f"{100 * shares[limit]:.0f} %", f"{100 * shares['forward']:.0f} %"
    if limit == "forward":
        return limit, f"the forward limits: it was busy {forward} of the time"
    if limit == "read" and total.get("read.idle", 0.0) > total.get("read", 0.0):
        limit, what = "coordinator", f"the coordinator limits: there was no shard to work on {share} of the time"
    elif limit in ("read", "write"):
        if limit == "write" and total.get(REDUCED_BESIDE, 0.0) > sum(total.get(stage, 0.0) for stage in WRITING):
            limit = "reduce"
        line = {"read": "reading and tokenising", "write": "writing", "reduce": "reducing"}[limit]
        what = f"{line} limits: the forward waited for it {share} of the time"
    else:
        what = f"{limit} limits: it took {share} of the time"
    return limit, f"{what}; the forward was busy {forward} of it"
