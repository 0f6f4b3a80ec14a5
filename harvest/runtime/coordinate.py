"""One run from its first line to `complete.json`: checks the request, takes the lease, lets an executor work, merges.

The order of what is written makes every line a safe place to die: lease, run.json, attempts, records, merged results,
complete.json. What a reader sees is always a set of whole shards.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import harvest
from harvest.concepts.steercheck import SteerCheck, refuse_check
from harvest.config import Job, load_job
from harvest.errors import RequestError, WorkError
from harvest.plan import Plan, make_plan, refuse_at_once
from harvest.planning.lock import forgives
from harvest.reading.reader import Run, open_run
from harvest.records import ShardRecord
from harvest.results import write_results
from harvest.runtime.executor import cluster_address, device_elsewhere, refuse_executor, uses_cluster
from harvest.runtime.finish import report_after_run
from harvest.runtime.inline import loaded, run_inline, threads_of
from harvest.runtime.progress import Observer, Quiet
from harvest.runtime.resume import grown, refuse_difference, refuse_other_job
from harvest.runtime.schedule import Schedule
from harvest.store import folder, layout
from harvest.store.files import Files
from harvest.store.lease import Lease
from harvest.store.ledger import Ledger, RunRecord
from harvest.store.opening import open_files

SHARDS_PER_WORKER = 2
"""That a worker of a crew holds: one under way, and the next, which is read and tokenised beside it."""


def run(
    job: Job | Mapping[str, Any] | str | Path,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    overrides: Iterable[str] = (),
    observer: Observer | None = None,
    begin: float | None = None,
) -> Run:
    """Runs a job, or resumes it where its ledger ends; a finished run is opened and nothing changes.

    Ends with the run's report, which may fail: the run is complete without it.

    `model`, `tokenizer` and `data` (a list of texts or records, a `datasets` object, an iterable) stand in for what
    the job names. `begin`: when the command began (monotonic), now by default. Raises RequestError (wrong request,
    nothing written), WorkError (the work failed; the same call resumes) and LostLeaseError (another coordinator took
    the run over).
    """
    begin, observer = time.monotonic() if begin is None else begin, observer or Quiet()
    job = load_job(_with_stand_ins(job, model, data), overrides)
    files = open_files(job.run.path, job.run.storage)
    on_cluster = uses_cluster(job)
    refuse_executor(job, files, on_cluster, brought=[model, tokenizer, data])
    address = cluster_address(job) if on_cluster else None
    if address:
        observer.ray_starts(address)
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(device_elsewhere(job))
        plan, earlier = _checked(job, files, model, tokenizer, data, device)
        if earlier is not None and Ledger(files).completion() is not None and not grown(plan, earlier):
            found = open_run(files)
            if not files.exists(layout.REPORT):  # its life ended before it was written
                report_after_run(found, observer, plan.tokeniser.pieces)
            observer.was_complete(job.run.path, found.summary()["rows"])
            return found
        workers = None
        if on_cluster:
            if address is None:
                observer.ray_starts(None)
            from harvest.runtime import cluster  # ray takes its time

            stack.enter_context(cluster.connected(job, address))
            workers = cluster.crew_size(plan)
        lease = stack.enter_context(Lease.acquire(files))
        _Coordinator(plan, files, lease, observer, begin, workers).run(model)
        found = open_run(files)
        report_after_run(found, observer, plan.tokeniser.pieces, lease.check)
    return found


def plan_run(job: Job | Mapping[str, Any] | str | Path, overrides: Iterable[str] = ()) -> Plan:
    """What `run` would do with a job, after refusing whatever `run` would refuse; nothing is written."""
    job = load_job(job, overrides)
    files = open_files(job.run.path, job.run.storage)
    refuse_executor(job, files, uses_cluster(job), brought=[])
    with device_elsewhere(job) as device:
        return _checked(job, files, None, None, None, device)[0]


def _checked(
    job: Job, files: Files, model: Any, tokenizer: Any, data: Any, device: str | None
) -> tuple[Plan, RunRecord | None]:
    """The plan of a job that may run in this folder, and the run that is there already."""
    refuse_at_once(job)
    if model is None:  # else nothing is loaded, and what does not go with an object is refused first
        refuse_other_job(job)
    if data is None:
        _refuse_run_inside_data(job, files)
    ledger, free = Ledger(files), files.free_bytes()
    earlier = ledger.read_run() if folder.require_run_or_empty(files) and not job.run.overwrite else None
    if earlier is None or ledger.completion() is None:
        folder.require_writable(files)
    if free is not None and earlier is not None:
        free += _committed_bytes(ledger)  # what is there already needs no room again
    plan = make_plan(
        _same_threads(job, earlier), model=model, tokenizer=tokenizer, data=data, free_bytes=free, device=device
    )
    refuse_check(plan, uses_cluster(job))
    if earlier is not None:
        refuse_difference(plan, earlier)
    return plan, earlier


def _same_threads(job: Job, earlier: RunRecord | None) -> Job:
    """A resumed run computes with as many threads as it began with: its last bits depend on them."""
    if earlier is None or job.run.threads != "auto":
        return job
    threads = earlier.plan["resolved"]["threads"]
    return job.model_copy(update={"run": job.run.model_copy(update={"threads": threads})})


def _refuse_run_inside_data(job: Job, files: Files) -> None:
    """What a run writes must not be found as its own data by the next life."""
    base = Path(os.path.abspath(os.path.expanduser(job.data.path.partition("**")[0])))
    inside = files.local and job.data.files is None and (base.is_dir() and base in Path(files.url).parents)
    if inside and ("**" in job.data.path or os.path.isdir(os.path.expanduser(job.data.path))):
        raise RequestError(
            f"run.path = {job.run.path!r}: lies inside data.path = {job.data.path!r}, where what the run writes "
            "would be read as data; choose a folder outside, or name the files with a glob"
        )


def _with_stand_ins(job: Any, model: Any, data: Any) -> Any:
    """A job given as a mapping need not name what the caller hands over."""
    if not isinstance(job, Mapping):
        return job
    settings = dict(job)
    if model is not None:
        settings["model"] = {"name": type(model).__name__, **settings.get("model", {})}
    if data is not None:
        settings["data"] = {"path": type(data).__name__, **settings.get("data", {})}
    return settings


def _committed_bytes(ledger: Ledger) -> int:
    return sum(item.bytes for record in ledger.records().values() for item in record.objects.values())


class _Coordinator:
    """What happens while the lease is held."""

    def __init__(
        self, plan: Plan, files: Files, lease: Lease, observer: Observer, begin: float, workers: int | None
    ) -> None:
        """`workers`: how many there are on the cluster; None where the work is done in this process."""
        self.plan, self.files, self.lease, self.observer, self.begin = plan, files, lease, observer, begin
        self.workers = workers
        self.ledger = Ledger(files)

    def run(self, model: Any) -> None:
        committed = self._open()
        self.observer.started(self.plan, list(committed.values()))
        schedule = self._schedule(committed)
        try:
            model = self._work(schedule, model)
            if schedule.failures:
                raise WorkError(_failures_text(schedule))
            summary = self._complete(model)
        except BaseException as error:
            self.observer.stopped(error)
            raise
        self.observer.finished(summary)

    def _schedule(self, committed: dict[str, ShardRecord]) -> Schedule:
        data, resolved = self.plan.job.data, self.plan.resolved
        return Schedule(
            self.plan.source.files,
            shard_documents=resolved.shard_documents,
            attempts=self.plan.job.run.attempts,
            kept=self.plan.source.kept,
            limit=data.limit,
            max_tokens=data.max_tokens,
            committed=committed,
            depth=None if self.workers is None else SHARDS_PER_WORKER,
            mark=self.plan.source.mark,
            before=self.plan.groups_before,
        )

    def _work(self, schedule: Schedule, model: Any) -> Any:
        """Runs the schedule to its end, here or with a crew; returns the model where it is here."""
        about: dict[str, Any] = {
            "files": self.files,
            "lease": self.lease,
            "schedule": schedule,
            "observer": self.observer,
            "begin": self.begin,
        }
        if self.workers is None:
            return run_inline(self.plan, model, **about)
        from harvest.runtime.cluster import run_cluster

        run_cluster(self.plan, self.workers, reserve_memory=cluster_address(self.plan.job) is not None, **about)
        return None

    def _open(self) -> dict[str, ShardRecord]:
        """Settles what earlier lives left; what stands committed afterwards is what this life builds on."""
        record = run_record(self.plan)
        if self.plan.job.run.overwrite:
            folder.clear_run(self.files, keep_run=True)
            self.ledger.replace_run(record)
        earlier = self.ledger.read_run()
        if earlier is None:
            self.ledger.create_run(record)
        else:
            refuse_difference(self.plan, earlier)  # again: it may have been written while the lease was free
        if earlier is not None and grown(self.plan, earlier):
            # In this order a crash on any line leaves either the old limits, or no cut shard.
            self.ledger.reopen()
            for key, shard in self.ledger.records().items():
                if shard.cut:
                    self.ledger.remove(key)
            self.ledger.replace_run(record)
        elif earlier is not None and forgives(earlier.fingerprint, self.plan.job):
            self.ledger.replace_run(record)  # from now on there may be what the stricter job refuses
        committed = self.ledger.records()
        folder.remove_strays(self.files, [shard.attempt for shard in committed.values()], self.lease.life)
        return committed

    def _complete(self, model: Any) -> dict[str, Any]:
        """Merges the sums in shard order, and says that everything is there."""
        self.lease.check()
        self.lease.tell("merging what the shards hold")
        if self.workers is not None:  # what is left of workers that died, or that another was faster than
            folder.remove_strays(self.files, [record.attempt for record in self.ledger.records().values()])
        if not any(direction.check for direction in self.plan.job.directions):
            return write_results(self.files)
        with threads_of(self.plan):
            return write_results(self.files, SteerCheck(self.plan, loaded(self.plan) if model is None else model))


def run_record(plan: Plan) -> RunRecord:
    """What run.json says."""
    return RunRecord(
        job=plan.job.model_dump(mode="json"),
        plan={
            "resolved": {
                key: list(value) if isinstance(value, tuple) else value for key, value in asdict(plan.resolved).items()
            },
            "names": {str(name): {"width": name.width, "module": name.module} for name in plan.names},
            "files": [{"name": file.name, "rows": file.rows} for file in plan.source.files],
            "documents": plan.estimate.documents,
            "shards": plan.estimate.shards,
            "tokens": plan.estimate.tokens,
            "judged": plan.estimate.judged,
        },
        fingerprint=plan.lock(),
        provenance={"harvest": harvest.__version__, "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
    )


def _failures_text(schedule: Schedule) -> str:
    first, *others = schedule.failures
    more = f" (and {len(others)} more shards)" if others else ""
    tries = f" after {first.attempts} attempts" if first.attempts > 1 else ""
    return f"{first.error}{tries}{more}" + ("" if first.permanent else "; the same command resumes")
