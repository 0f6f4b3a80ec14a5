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
from pathlib import Path
from typing import Any

import torch

from harvest.config import Job
from harvest.errors import RequestError, WorkError
from harvest.estimate import PROBE_DOCUMENTS
from harvest.forecast import Forecast, Measured, forecast
from harvest.plan import Plan
from harvest.reader import open_run
from harvest.records import ShardRecord
from harvest.results import write_results
from harvest.runtime.coordinate import run_record
from harvest.runtime.finish import report_after_run
from harvest.runtime.inline import run_inline
from harvest.runtime.progress import Silent
from harvest.runtime.schedule import Schedule
from harvest.stages import Stages, stages_of
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


def calibrate(plan: Plan, workers: int | None = None, *, begin: float, seconds: float = SECONDS) -> Forecast:
    """Harvests a part of the job for so many seconds, and says what the whole comes to for `workers`, by default the
    job's own. `begin`: when the command began (monotonic).

    Raises RequestError where this machine cannot, WorkError where the part fails.
    """
    job = plan.job
    _refuse_elsewhere(plan)
    with _scratch(job) as place:
        since = time.monotonic()
        model, warm = _harvest(plan, None, place("warm"), WARM_BATCHES * plan.resolved.tokens_per_batch, begin)
        start = warm.stages.start
        left = max(seconds / 2, seconds - (time.monotonic() - since - warm.stages.load))
        per_second = warm.tokens / max(1e-9, warm.stages.worker_seconds - warm.stages.check)
        files = place("part")
        _, measured = _harvest(plan, model, files, _most(plan, round(left * per_second)), time.monotonic())
        end = _end(plan, files)
    return forecast(plan, measured, workers, tokens=_tokens(plan), start=start, end=end)


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
