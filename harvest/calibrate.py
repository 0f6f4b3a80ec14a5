"""How long a job will take here: half a minute of it, harvested to a place of its own that is gone afterwards.

Nothing is written into the run, and no setting follows from what is measured.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harvest.config import Job
from harvest.errors import RequestError, WorkError
from harvest.estimate import PROBE_DOCUMENTS
from harvest.plan import Plan
from harvest.reader import open_run
from harvest.records import ShardRecord
from harvest.results import write_results
from harvest.runtime.coordinate import run_record
from harvest.runtime.executor import cluster_address
from harvest.runtime.finish import report_after_run
from harvest.runtime.inline import run_inline
from harvest.runtime.progress import Silent
from harvest.runtime.schedule import Schedule
from harvest.scale import Costs, Limits, Prediction, predict
from harvest.stages import Stages, in_words, stages_of
from harvest.store.files import Files
from harvest.store.lease import Lease
from harvest.store.ledger import Ledger
from harvest.store.opening import open_files

SECONDS = 30.0
"""Of harvesting; importing and loading the model come on top."""
WARM_BATCHES = 1
"""Before anything counts: threads start, kernels are chosen, files come into memory."""
MOST_BYTES = 8e9
"""That are written, and at most a tenth of what is free."""
PLACES, DOCUMENTS = 16, 32
"""Where in the data, and how many at each, documents are counted: the plan knows the first ones alone."""
TRIES = 12
"""Doublings of a part that is smaller than a document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A part of a job, harvested and thrown away."""

    tokens: int
    """That the model read."""
    shards: int
    bytes: int
    cores: float
    """Seconds of processor time, of all threads."""
    stages: Stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured, and what it comes to for the whole job."""

    measured: Measured
    workers: int
    per_node: int
    elsewhere: bool
    """The workers are a cluster's, whose nodes are taken to be like this machine."""
    tokens: int | None
    """Of the whole job; None where only reading to its end can tell."""
    start: float
    """Until the first forward, as here."""
    end: float
    """Merging sums, finding directions and writing the report, as here."""
    costs: Costs
    found: Prediction

    @property
    def seconds(self) -> float | None:
        """Of the whole command."""
        return None if self.tokens is None else self.start + self.found.seconds + self.end

    @property
    def text(self) -> str:
        """For people."""
        measured, found = self.measured, self.found
        where = "on nodes like this machine" if self.elsewhere else "on this machine"
        node = f"{found.bytes_per_second_per_node / 1e6:,.1f} MB/s a node, {found.bytes_per_second / 1e6:,.1f} in all"
        lines = sorted(found.lines.items(), key=lambda line: -line[1])
        others = ", ".join(f"{line} {seconds / found.seconds:.2f}" for line, seconds in lines[1:4] if seconds)
        rows = [
            (
                "calibrated",
                f"{measured.tokens:,} tokens in {in_words(measured.stages.worker_seconds)}; nothing is kept",
            ),
            ("workers", f"{self.workers}, {where}"),
            ("speed", f"{found.tokens_per_second:,.0f} tokens/s, {node}"),
            ("time", self._time()),
            ("limit", f"{found.limit} limits" + (f"; of its time: {others}" if others else "")),
        ]
        return "\n".join([*measured.stages.table, "", *(f"{key:<10}  {value}" for key, value in rows)])

    def _time(self) -> str:
        if self.seconds is None:
            return "unknown: only reading to the end of the data can tell how much there is"
        parts = f"start {in_words(self.start)}, end {in_words(self.end)}"
        ray = "; Ray's own start comes on top" if self.workers > 1 else ""
        return f"about {_long(self.seconds)} for {self.tokens:,} tokens ({parts}{ray})"

    def data(self) -> dict[str, Any]:
        """For programs."""
        found = self.found
        return {
            "workers": self.workers,
            "workers_per_node": self.per_node,
            "nodes": found.nodes,
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "start_seconds": round(self.start, 3),
            "end_seconds": round(self.end, 3),
            "tokens": self.tokens,
            "tokens_per_second": round(found.tokens_per_second, 3),
            "bytes_per_second": round(found.bytes_per_second, 3),
            "bytes_per_second_per_node": round(found.bytes_per_second_per_node, 3),
            "limit": found.limit,
            "shares": {line: round(seconds / found.seconds, 6) for line, seconds in found.lines.items()},
            "measured": {
                "tokens": self.measured.tokens,
                "shards": self.measured.shards,
                "bytes": self.measured.bytes,
                "cores_seconds": round(self.measured.cores, 3),
                **self.measured.stages.data(),
            },
        }


def calibrate(plan: Plan, workers: int | None = None, *, begin: float, seconds: float = SECONDS) -> Calibration:
    """Harvests a part of the job for so many seconds, and says what the whole comes to for `workers`, by default the
    job's own. `begin`: when the command began (monotonic).

    Raises RequestError where this machine cannot, WorkError where the part fails.
    """
    job = plan.job
    _refuse(plan, workers)
    tokens = _tokens(plan)
    with _scratch(job) as place:
        since = time.monotonic()
        model, warm = _harvest(plan, None, place("warm"), WARM_BATCHES * plan.resolved.tokens_per_batch, begin)
        start = warm.stages.start
        left = max(seconds / 2, seconds - (time.monotonic() - since - warm.stages.load))
        per_second = warm.tokens / max(1e-9, warm.stages.worker_seconds - warm.stages.check)
        files = place("part")
        _, measured = _harvest(plan, model, files, _most(plan, round(left * per_second)), time.monotonic())
        end = _end(plan, files)
    costs = _costs(measured)
    count = _workers(plan, workers)
    per_node, elsewhere = _per_node(plan, count)
    shards = plan.estimate.shards or max(1, round((tokens or 1e9) * measured.shards / measured.tokens))
    limits = Limits(workers_per_node=per_node, cores=resolve_cores())
    found = predict(costs, limits, workers=count, tokens=tokens or 1e9, shards=shards)
    return Calibration(
        measured=measured,
        workers=count,
        per_node=per_node,
        elsewhere=elsewhere,
        tokens=tokens,
        start=start,
        end=end,
        costs=costs,
        found=found,
    )


# ---- the part ----------------------------------------------------------------------------------------------------


def _refuse(plan: Plan, workers: int | None) -> None:
    if workers is not None and workers < 1:
        raise RequestError(f"--workers {workers}: allowed are whole numbers of at least 1")
    if plan.resolved.device == "cuda" and not torch.cuda.is_available():
        raise RequestError("--calibrate: the plan is for CUDA, which this machine has not; allowed is a node that has")


@contextlib.contextmanager
def _scratch(job: Job) -> Iterator[Callable[[str], Files]]:
    """Gives out folders beside the run's, on the same disk or in the same bucket; all are gone afterwards."""
    path, storage = job.run.path.rstrip("/"), job.run.storage
    if "://" in path and not path.startswith("file://"):
        url = f"{path}.calibration-{secrets.token_hex(4)}"
        try:
            yield lambda name: open_files(f"{url}/{name}", storage)
        finally:
            everything = open_files(url, storage)
            for file, _ in list(everything.list()):
                everything.delete(file)
        return
    wanted = Path(os.path.abspath(os.path.expanduser(path.removeprefix("file://"))))
    parent = next(folder for folder in wanted.parents if folder.is_dir())
    try:
        folder = tempfile.mkdtemp(prefix=f".{wanted.name}.calibration-", dir=parent)
    except OSError as error:
        raise RequestError(f"--calibrate: {parent}, beside run.path, takes no folder: {error.strerror}") from None
    try:
        yield lambda name: open_files(f"{folder}/{name}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _harvest(plan: Plan, model: Any, files: Files, tokens: int, begin: float) -> tuple[Any, Measured]:
    """The job's first shards, as a run harvests and commits them, cut after so many tokens; and the model."""
    for _ in range(TRIES):
        before = time.process_time()
        with Lease.acquire(files) as lease:
            schedule = _schedule(plan, tokens)
            about: dict[str, Any] = {"lease": lease, "schedule": schedule, "observer": Silent(), "begin": begin}
            model = run_inline(plan, model, files=files, **about)
        if schedule.failures:
            raise WorkError(f"--calibrate: {schedule.failures[0].error}")
        records = list(Ledger(files).records().values())
        stages = stages_of(records)
        if stages is not None and any(record.forward_tokens for record in records):
            return model, _measured(records, stages, time.process_time() - before)
        for record in records:  # the first document is longer than the part
            Ledger(files).remove(record.shard.key)
        tokens *= 2
    raise WorkError(f"--calibrate: nothing to run among the first {tokens:,} tokens")


def _end(plan: Plan, files: Files) -> float:
    """Seconds that merging, directions and the report take of the part; of groups that it has no examples of, none."""
    before = time.monotonic()
    Ledger(files).create_run(run_record(plan))
    write_results(files)
    report_after_run(open_run(files), Silent(), plan.tokeniser.pieces)
    return time.monotonic() - before


def _schedule(plan: Plan, tokens: int) -> Schedule:
    most, source = plan.job.data.max_tokens, plan.source
    return Schedule(
        source.files,
        shard_documents=plan.resolved.shard_documents,
        attempts=1,
        kept=source.kept,
        limit=plan.job.data.limit,
        max_tokens=tokens if most is None else min(tokens, most),
        mark=source.mark,
        before=plan.groups_before,
    )


def _measured(records: list[ShardRecord], stages: Stages, cores: float) -> Measured:
    return Measured(
        tokens=sum(record.forward_tokens for record in records),
        shards=len(records),
        bytes=sum(item.bytes for record in records for item in record.objects.values()),
        cores=cores,
        stages=stages,
    )


def _most(plan: Plan, tokens: int) -> int:
    """So many, or as many as there is room for."""
    free = plan.estimate.free_bytes
    room = MOST_BYTES if free is None else min(MOST_BYTES, free / 10)
    return max(1, min(tokens, round(room / max(1, plan.estimate.bytes_per_row))))


# ---- what it comes to --------------------------------------------------------------------------------------------


def _tokens(plan: Plan) -> int | None:
    """Of the whole job, judged from documents all over the data; as the plan says where a limit ends it early."""
    data, source = plan.job.data, plan.source
    documents = plan.estimate.documents
    if documents is None or documents <= PROBE_DOCUMENTS or data.limit is not None or data.max_tokens is not None:
        return plan.estimate.tokens
    step = plan.resolved.shard_documents
    starts = [(file.number, start) for file in source.files for start in range(0, file.rows or 0, step)]
    found: list[int] = []
    for place in range(min(PLACES, len(starts))):
        file, start = starts[place * len(starts) // min(PLACES, len(starts))]
        rows = source.rows(file, start, start + step, source.mark(file, start))
        found += plan.tokeniser.count(rows, DOCUMENTS)
    return round(documents * sum(found) / len(found)) if found else plan.estimate.tokens


def _costs(measured: Measured) -> Costs:
    """Of a token and of a shard; what happens once in a worker's life is neither."""
    stages = {name: stage.busy for name, stage in measured.stages.stages.items()}
    tokens, shards = measured.tokens, measured.shards
    return Costs(
        model=sum(stages[name] for name in ("forward", "copy", "reduce")) / tokens,
        read=stages["read"] / tokens,
        write=(stages["write"] + stages.get("pool", 0.0)) / tokens,
        cores=max(0.0, measured.cores - measured.stages.check) / tokens,
        model_shard=(measured.stages.other + stages["commit"]) / shards,
        write_shard=stages["finish"] / shards,
        bytes=measured.bytes / tokens,
    )


def _workers(plan: Plan, asked: int | None) -> int:
    """The job's own number; `auto` is one for each replica's share of this machine's GPUs, or one."""
    if asked is not None:
        return asked
    if plan.job.run.workers != "auto":
        return plan.job.run.workers
    return _gpu_room(plan) or 1


def _per_node(plan: Plan, workers: int) -> tuple[int, bool]:
    """Workers of one node, and whether they are a cluster's: without an address all are on this machine."""
    if cluster_address(plan.job) is None:
        return workers, False
    each = plan.job.run.cpus_per_worker
    return _gpu_room(plan) or max(1, int(resolve_cores() // (1 if each == "auto" else max(each, 1e-9)))), True


def _gpu_room(plan: Plan) -> int:
    """Workers that this machine's GPUs are enough for; 0 without."""
    if plan.resolved.device != "cuda":
        return 0
    each = plan.job.run.gpus_per_worker
    return int(torch.cuda.device_count() // (1 if each == "auto" or not each else each))


def resolve_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _long(seconds: float) -> str:
    """`45.6 s`, `12 min`, `3 h 20 min`."""
    if seconds < 120:
        return in_words(seconds)
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
