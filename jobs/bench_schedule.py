"""The coordinator by itself: schedule, intake, lease and a ledger on disk, with simulated workers that do nothing.

    python jobs/bench_schedule.py [--workers 1000] [--shards 10000 100000] [--out jobs/results]

Every shard goes the whole way: handed out, read, reported, committed to the ledger by an fsynced put-if-absent. What is
left out is the network and the work. Goal: 500 commits a second, the same cost per shard for ten times the shards.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from measuring import Found, Row, main

from harvest.records import FORMAT_VERSION, Assignment, ShardRecord, SourceFile, StoredObject
from harvest.runtime.intake import Intake, Report
from harvest.runtime.lead import Gone, Lead
from harvest.runtime.progress import Silent
from harvest.runtime.schedule import Schedule
from harvest.runtime.slices import ReadFacts
from harvest.runtime.worker import Order, Reply
from harvest.store.lease import Lease
from harvest.store.ledger import Ledger
from harvest.store.opening import open_files

NAMES = 36
"""Objects in a record: those of the demo."""
DOCUMENTS = 8
GOAL = 500


class Idle:
    """A crew whose members report each shard in the next conversation."""

    needs = "nothing"

    def __init__(self, workers: int, life: str) -> None:
        self.workers: Sequence[str] = [f"worker-{number}" for number in range(workers)]
        self._life = life
        self._orders: list[tuple[str, Order]] = []
        self._known: set[str] = set()

    def send(self, worker: str, order: Order) -> None:
        self._orders.append((worker, order))

    def wait(self, seconds: float) -> list[tuple[str, Reply | Gone]]:
        orders, self._orders = self._orders, []
        return [(worker, self._reply(worker, order)) for worker, order in orders]

    def _reply(self, worker: str, order: Order) -> Reply:
        facts = ReadFacts(documents=DOCUMENTS, tokens=DOCUMENTS * 100, ended=False, cut=False, cursor=None)
        return Reply(
            host="here",
            pid=1,
            stage="ready",
            read=tuple((one.shard.key, facts) for one in order.assignments),
            reports=tuple(Report(assignment=one, record=record(one, self._life)) for one in order.assignments),
        )

    def restart(self, worker: str) -> None: ...
    def dismiss(self, worker: str) -> None: ...
    def newcomers(self) -> Sequence[str]:
        return []

    def leaving(self) -> frozenset[str]:
        return frozenset()


def record(assignment: Assignment, life: str) -> ShardRecord:
    """As long as one of the demo's."""
    stored = StoredObject(bytes=1 << 20, crc32c="01234567")
    fields: dict[str, Any] = dict.fromkeys(ShardRecord.__dataclass_fields__, 0)
    fields |= {key: {} for key in ("skipped", "non_finite", "zero_rows", "span_documents", "self_check")}
    fields |= {
        "format": FORMAT_VERSION,
        "shard": assignment.shard,
        "attempt": f"{assignment.shard.key}.{life}-{assignment.attempt}",
        "documents": DOCUMENTS,
        "tokens": DOCUMENTS * 100,
        "objects": {f"residual.{layer}/{name}": stored for layer in range(NAMES) for name in ("c.0.0", "zarr.json")},
        "keys_digest": "0" * 32,
        "source_digest": "0" * 32,
        "ended": False,
        "cut": False,
        "cursor": None,
        "environment": {"torch": "0", "device": "none"},
        "seconds": {"forward": 1.0, "write": 0.5},
    }
    return ShardRecord(**{key: fields[key] for key in ShardRecord.__dataclass_fields__})


def measure(workers: int, shards: int) -> tuple[float, float]:
    """Commits a second, and CPU milliseconds of the coordinator per shard."""
    with tempfile.TemporaryDirectory() as folder:
        files = open_files(folder)
        file = SourceFile(number=0, name="x", path="", format="jsonl", rows=shards * DOCUMENTS, fingerprint="")
        with Lease.acquire(files) as lease:
            schedule = Schedule(
                [file], shard_documents=DOCUMENTS, attempts=3, kept=lambda file, start, stop: stop - start, depth=2
            )
            crew, ledger = Idle(workers, lease.life), Ledger(files)
            lead = Lead(
                crew,
                schedule=schedule,
                intake=Intake(ledger, lease, schedule, Silent()),
                lease=lease,
                observer=Silent(),
            )
            begin, cpu = time.monotonic(), time.process_time()
            lead.run()
            seconds, cpu_seconds = time.monotonic() - begin, time.process_time() - cpu
        assert len(list(files.list("ledger"))) == shards
    return shards / seconds, 1000 * cpu_seconds / shards


def rate(workers: int, shards: int, count: int) -> Found:
    figures = [measure(workers, shards)[0] for _ in range(count)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Found(figures=figures, remark=f"{shards:,} shards, {workers:,} simulated workers, peak {peak:,.0f} MiB")


def growth(workers: int, few: int, many: int, count: int) -> Found:
    """CPU per shard of many over that of few, in turn."""
    pairs = [(measure(workers, few)[1], measure(workers, many)[1]) for _ in range(count)]
    remark = ", ".join(f"{statistics.median(side):.2f} ms" for side in zip(*pairs))
    return Found(figures=[second / first for first, second in pairs], remark=f"{remark} a shard")


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    workers, few, many = (100, 200, 2000) if asked.quick else (asked.workers, *asked.shards)
    run = partial(rate, workers, few, asked.pairs)
    yield Row(what="scheduler and ledger, commits", goal=GOAL, unit="/s", measure=run)
    what = f"CPU per shard, {many:,} shards / {few:,}"
    # The long side takes a minute and a half: three pairs tell whether it grows.
    run = partial(growth, workers, few, many, min(asked.pairs, 3))
    yield Row(what=what, goal=1.1, at_most=True, measure=run)


def more(options: argparse.ArgumentParser) -> None:
    options.add_argument("--workers", type=int, default=1000)
    options.add_argument("--shards", type=int, nargs=2, default=[10_000, 100_000], metavar=("FEW", "MANY"))


if __name__ == "__main__":
    main(__doc__, rows, more)
