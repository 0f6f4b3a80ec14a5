"""How long a job will take here: half a minute of it, harvested to a place of its own that is gone afterwards.

Several workers of this machine take cores, memory and caches from one another, which no figure of a single one tells;
so a job that asks for them is measured with them, in processes of their own, as it will run. Nothing is written into
the run, and no setting follows from what is measured.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from harvest.config import Job
from harvest.errors import RequestError, WorkError
from harvest.plan import Plan
from harvest.planning.estimate import probe_documents
from harvest.reading.reader import open_run
from harvest.records import ShardRecord
from harvest.results import write_results
from harvest.runtime.coordinate import SHARDS_PER_WORKER, run_record
from harvest.runtime.executor import cluster_address, uses_cluster
from harvest.runtime.finish import report_after_run
from harvest.runtime.forecast import Forecast, Measured, forecast
from harvest.runtime.inline import run_inline
from harvest.runtime.progress import Silent
from harvest.runtime.schedule import Schedule
from harvest.stages import stages_of
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
TRIES = 12
"""Doublings of a part that is smaller than a document."""
PARTS_PER_WORKER = 4
"""Shards of what several workers share, at least, so that all of them have work while it lasts."""


def calibrate(plan: Plan, workers: int | None = None, *, begin: float, seconds: float = SECONDS) -> Forecast:
    """Harvests a part of the job for so many seconds, and says what the whole comes to for `workers`, by default the
    job's own. `begin`: when the command began (monotonic).

    Raises RequestError where this machine cannot, WorkError where the part fails.
    """
    _refuse_elsewhere(plan)
    crew = _crew(plan, workers)
    with _scratch(plan.job) as place:
        since = time.monotonic()
        model, warm = _alone(plan, None, place("warm"), WARM_BATCHES * plan.resolved.tokens_per_batch, begin)
        start = warm.stages.start
        left = max(seconds / 2, seconds - (time.monotonic() - since - warm.stages.load))
        per_second = warm.tokens / max(1e-9, warm.stages.worker_seconds - warm.stages.check)
        tokens, files = _most(plan, round(left * per_second)), place("part")
        if crew is None:
            _, measured = _alone(plan, model, files, tokens, time.monotonic())
        else:
            del model
            _free(plan)
            measured, start = _together(plan, crew, files, tokens)
            start += since - begin
        end = _end(plan, files)
    return forecast(plan, measured, workers, start=start, end=end)


# ---- the part ----------------------------------------------------------------------------------------------------


def _refuse_elsewhere(plan: Plan) -> None:
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


def _crew(plan: Plan, workers: int | None) -> int | None:
    """Workers that the job itself would start on this machine; None where one tells enough, or they are elsewhere."""
    asked = plan.job.run.workers
    if asked == "auto" or asked == 1 or workers not in (None, asked):
        return None
    return asked if uses_cluster(plan.job) and cluster_address(plan.job) is None else None


def _free(plan: Plan) -> None:
    """What the model took is the workers' now."""
    gc.collect()
    if plan.resolved.device == "cuda":
        torch.cuda.empty_cache()


def _alone(plan: Plan, model: Any, files: Files, tokens: int, begin: float) -> tuple[Any, Measured]:
    """The job's first shards, as a run harvests and commits them, cut after so many tokens; and the model."""
    for _ in range(TRIES):
        before = time.process_time()
        with Lease.acquire(files) as lease:
            schedule = _schedule(plan, tokens)
            about: dict[str, Any] = {"lease": lease, "schedule": schedule, "observer": Silent(), "begin": begin}
            model = run_inline(plan, model, files=files, **about)
        measured = _measured(files, schedule, time.process_time() - before)
        if measured is not None:
            return model, measured
        tokens *= 2
    raise WorkError(f"--calibrate: nothing to run among the first {tokens:,} tokens")


def _together(plan: Plan, workers: int, files: Files, tokens: int) -> tuple[Measured, float]:
    """The same by so many workers at once, each with as much; and the seconds that starting and ending them took.

    What worked alone took as many tokens before, so that a part holds a document.
    """
    from harvest.runtime import cluster  # ray takes its time

    begin = time.monotonic()
    plan, tokens = _at(plan, files), tokens * workers
    schedule = _schedule(plan, tokens, shards=PARTS_PER_WORKER * workers)
    heard = _Begun()
    with cluster.connected(plan.job, None), Lease.acquire(files) as lease:
        about: dict[str, Any] = {"lease": lease, "schedule": schedule, "observer": heard, "begin": begin}
        cluster.run_cluster(plan, workers, files=files, reserve_memory=False, together=True, **about)
    measured = _measured(files, schedule, None)
    if measured is None:
        raise WorkError(f"--calibrate: nothing to run among the first {tokens:,} tokens")
    return measured, heard.mean - begin + measured.stages.check / workers + time.monotonic() - heard.last


class _Begun(Silent):
    """When the workers were ready, and when the last shard was committed (monotonic)."""

    def __init__(self) -> None:
        self._ready: list[float] = []
        self.last = time.monotonic()

    @property
    def mean(self) -> float:
        """A run's workers begin one after the other: together they have worked as if all had begun then."""
        return sum(self._ready) / len(self._ready)

    def joined(self, worker: str, where: str, workers: int) -> None:
        self._ready.append(time.monotonic())

    def committed(self, record: ShardRecord) -> None:
        self.last = time.monotonic()


def _at(plan: Plan, files: Files) -> Plan:
    """The same for a run in these files, which workers open for themselves."""
    run = plan.job.run.model_copy(update={"path": files.url})
    return replace(plan, job=plan.job.model_copy(update={"run": run}))


def _end(plan: Plan, files: Files) -> float:
    """Seconds that merging, directions and the report take of the part; of groups that it has no examples of, none."""
    before = time.monotonic()
    Ledger(files).create_run(run_record(plan))
    write_results(files)
    report_after_run(open_run(files), Silent(), plan.tokeniser.pieces)
    return time.monotonic() - before


def _schedule(plan: Plan, tokens: int, shards: int | None = None) -> Schedule:
    """The job's, cut after so many tokens; in `shards` parts or more where those of the job would be fewer."""
    most, source, documents = plan.job.data.max_tokens, plan.source, plan.resolved.shard_documents
    if shards is not None:
        rows = tokens / _tokens_per_row(plan)
        documents = min(documents, 1 << max(0, int(rows / shards).bit_length() - 1))
    return Schedule(
        source.files,
        shard_documents=documents,
        attempts=1,
        kept=source.kept,
        limit=plan.job.data.limit,
        max_tokens=tokens if most is None else min(tokens, most),
        depth=None if shards is None else SHARDS_PER_WORKER,
        mark=source.mark,
        before=plan.groups_before,
    )


def _measured(files: Files, schedule: Schedule, cores: float | None) -> Measured | None:
    """What the part's records tell. None, and the part gone, where its first document is longer than it."""
    if schedule.failures:
        raise WorkError(f"--calibrate: {schedule.failures[0].error}")
    records = list(Ledger(files).records().values())
    stages, tokens = stages_of(records), sum(record.forward_tokens for record in records)
    if stages is None or not tokens:
        for record in records:
            Ledger(files).remove(record.shard.key)
        return None
    return Measured(
        tokens=tokens,
        shards=len(records),
        bytes=sum(item.bytes for record in records for item in record.objects.values()),
        cores=cores,
        stages=stages,
    )


def _tokens_per_row(plan: Plan) -> float:
    """On average of all the source's rows, those that a sample leaves out included."""
    found = probe_documents(plan.source, plan.tokeniser)
    return max(1.0, found.tokens / max(1, found.documents)) * (plan.job.data.sample or 1.0)


def _most(plan: Plan, tokens: int) -> int:
    """So many, or as many as there is room for."""
    free = plan.estimate.free_bytes
    room = MOST_BYTES if free is None else min(MOST_BYTES, free / 10)
    return max(1, min(tokens, round(room / max(1, plan.estimate.bytes_per_row))))
