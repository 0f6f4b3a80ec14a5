"""Mends a damaged run: the damaged shards are harvested again, nothing else is, and it ends with a clean run's bits.

Checked before anything changes: the job of run.json still gives this run, and the rows of the damaged shards are those
that were harvested. Then the damaged shards are un-committed, which leaves a run that `harvest run` can finish, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harvest.checking.findings import Report
from harvest.checking.verify import verify_run
from harvest.config import Job, load_job
from harvest.errors import DamageError, MismatchError, RequestError
from harvest.plan import Plan, make_plan
from harvest.planning.lock import differences
from harvest.reading.reader import open_run
from harvest.records import ShardRecord
from harvest.results import write_results
from harvest.runtime.coordinate import run as run_job
from harvest.runtime.finish import report_after_run
from harvest.runtime.progress import Observer, Quiet
from harvest.store import folder, layout
from harvest.store.files import Files
from harvest.store.lease import Lease
from harvest.store.ledger import Ledger, RunRecord
from harvest.store.opening import open_files
from harvest.store.tables import keys_digest

MOST_DIFFERENCES = 5
"""That a refusal lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """What was found, what was done about it, and how the run stands."""

    before: Report
    harvested: tuple[str, ...]
    """Keys of the shards that were harvested again, or for the first time."""
    removed: tuple[str, ...]
    """Objects and attempts that no record vouches for, and that only a run writes."""
    after: Report
    """The run as a whole and the shards harvested; of a sound run the same as `before`."""

    @property
    def text(self) -> str:
        """What was found, a line for each thing done, and how it ended."""
        if self.after is self.before:
            return self.before.text
        done = [f"harvested again: {key}" for key in self.harvested] + [f"removed: {path}" for path in self.removed]
        return "\n".join([self.before.text, *done, self.after.text])

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        done = {"harvested": list(self.harvested), "removed": list(self.removed)}
        return {"before": self.before.data, **done, "after": self.after.data, "damaged": self.after.damaged}


def repair_run(
    run: str | Path,
    storage: Mapping[str, Any] | None = None,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    observer: Observer | None = None,
) -> Repair:
    """Verifies a run and harvests again what is damaged; of an unfinished run also what is missing.

    `model`, `tokenizer` and `data` as they were given to `harvest.run`, where the run was made with objects. Raises
    RequestError where the run cannot be harvested again as it was, MismatchError naming file and shard where its data
    has changed, DamageError where what is damaged is not a run's to mend; then nothing was changed.
    """
    files = open_files(str(run), storage, setting="path")
    before = verify_run(files)
    _refuse_unmendable(before)
    damaged = {finding.shard for finding in before.findings if finding.damage and finding.shard is not None}
    wanted = sorted({*damaged, *before.missing})
    record, finished = Ledger(files).read_run(), files.exists(layout.COMPLETE)
    assert record is not None  # it has just been verified
    if not before.findings and finished:
        return Repair(before=before, harvested=(), removed=(), after=before)
    job = _job(record, run, storage)
    if wanted:
        _refuse_changes(_plan(job, record, model, tokenizer, data), files, damaged)
    with Lease.acquire(files) as lease:
        if before.damaged or not finished:
            _uncommit(files, before, damaged)
        removed = _tidy(files, lease.life)
        unfinished = before.damaged or not finished
        again = bool(wanted) or (unfinished and any(direction.check for direction in job.directions))
        if not again and unfinished:
            write_results(files)
            report_after_run(open_run(files), observer or Quiet(), still_mine=lease.check)
    if again:  # shards, or only what needs the model
        run_job(job, model=model, tokenizer=tokenizer, data=data, observer=observer)
    after = verify_run(files, only=wanted)
    harvested = [key for key in wanted if _readable(Ledger(files), key) is not None]
    return Repair(before=before, harvested=tuple(harvested), removed=tuple(removed), after=after)


def _refuse_unmendable(report: Report) -> None:
    """A file of someone else's among the records would stop the next run; it is not ours to delete."""
    for finding in report.findings:
        if finding.damage and finding.shard is None and finding.object.startswith(f"{layout.LEDGER}/"):
            raise DamageError(f"{report.run}: {finding.object}: {finding.what}")


def _job(record: RunRecord, run: str | Path, storage: Mapping[str, Any] | None) -> Job:
    """The job that made the run, in the folder where it is now."""
    settings = {**record.job["run"], "path": str(run), "overwrite": False}
    settings["threads"] = record.plan["resolved"]["threads"]  # the bits depend on it, whatever this machine has
    if storage is not None:
        settings["storage"] = dict(storage)
    return load_job({**record.job, "run": settings})


def _plan(job: Job, record: RunRecord, model: Any, tokenizer: Any, data: Any) -> Plan:
    """What the run began with, worked out anew. Raises RequestError naming what differs."""
    kinds = {key.split(".")[1] for key, value in record.fingerprint.items() if str(value).startswith("object:")}
    lacking = [what for what, given in (("model", model), ("data", data)) if what in kinds and given is None]
    if lacking:
        raise RequestError(
            f"run.path = {job.run.path!r}: the run was made with {' and '.join(lacking)} of the caller's own, which it "
            f"does not keep; give the same: harvest.checking.repair.repair_run({job.run.path!r}, model=..., data=...)"
        )
    plan = make_plan(job, model=model, tokenizer=tokenizer, data=data)
    found = differences(record.fingerprint, plan.lock())
    if found:
        more = f" and {len(found) - MOST_DIFFERENCES} more" if len(found) > MOST_DIFFERENCES else ""
        raise RequestError(
            f"run.path = {job.run.path!r}: cannot be harvested again as it was; different now: "
            f"{', '.join(found[:MOST_DIFFERENCES])}{more}"
        )
    return plan


def _refuse_changes(plan: Plan, files: Files, damaged: Collection[str]) -> None:
    """Reads and tokenises the damaged shards whose records can be read, and compares them with what was harvested."""
    ledger = Ledger(files)
    for key in sorted(damaged):
        record = _readable(ledger, key)
        if record is not None and record.shard.file < len(plan.source.files):
            before = replace(record.shard, index=record.shard.index - 1)
            forerunner = _readable(ledger, before.key) if before.index >= 0 else None
            _compare_rows(plan, record, None if forerunner is None else forerunner.cursor)


def _compare_rows(plan: Plan, record: ShardRecord, cursor: Mapping[str, Any] | None) -> None:
    shard = record.shard
    file = plan.source.files[shard.file]
    text = plan.tokeniser.shard(
        plan.source.rows(shard.file, shard.start, shard.stop, cursor),
        file=shard.file,
        name=file.name,
        limit=record.documents if record.cut else None,  # a cut shard's digest ends with its last document
    )
    where = f"shard {shard.key}: {file.name}, rows {shard.start} to {shard.stop}"
    if text.source_digest != record.source_digest:
        raise MismatchError(f"{where}: the data is not what was harvested; nothing was changed in the run")
    tokens = text.tokens
    if keys_digest(tokens.document, tokens.position, tokens.token, tokens.variant) != record.keys_digest:
        raise MismatchError(f"{where}: its tokens are not those that were harvested; nothing was changed in the run")


def _readable(ledger: Ledger, key: str) -> ShardRecord | None:
    try:
        return ledger.record(key)
    except (DamageError, FileNotFoundError):
        return None


def _uncommit(files: Files, report: Report, damaged: Iterable[str]) -> None:
    """The run is unfinished from here on: a crash on any line leaves one that lacks some shards, and says so."""
    ledger = Ledger(files)
    found = {layout.attempt_of(f"{finding.object}/") for finding in report.findings if finding.damage}
    ledger.reopen()
    for key in damaged:
        record = _readable(ledger, key)
        if record is None or record.attempt in found or _misplaced(report, key):
            ledger.remove(key)


def _misplaced(report: Report, key: str) -> bool:
    """The record itself is what is wrong."""
    return any(finding.damage and finding.object == layout.record_path(key) for finding in report.findings)


def _tidy(files: Files, life: str) -> list[str]:
    """Removes what no record vouches for, where its name is one that only a run gives; the rest is not ours."""
    records = Ledger(files).records().values()
    removed = folder.remove_strays(files, [record.attempt for record in records], life)
    paths = [layout.attempt_path(attempt) for attempt in removed]
    for record in records:
        attempt = layout.attempt_path(record.attempt)
        for path, _ in files.list(attempt):
            if path.removeprefix(f"{attempt}/") not in record.objects and layout.is_ours(path):
                files.delete(path)
                paths.append(path)
    return paths
