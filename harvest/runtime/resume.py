"""A run goes on only with what it began with: what the job alone tells is compared before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harvest.config import Job
from harvest.errors import DamageError, RequestError
from harvest.planning.lock import GROWING, asked_differences, differences, limit_differences
from harvest.store.ledger import Ledger, RunRecord
from harvest.store.opening import open_files

if TYPE_CHECKING:  # torch
    from harvest.plan import Plan

MOST_DIFFERENCES = 5
"""Of two jobs, that a refusal lists."""


def refuse_other_job(job: Job) -> None:
    """Raises RequestError where a run is there that began with another job; needs neither torch nor model nor data."""
    if job.run.overwrite:
        return
    try:
        earlier = Ledger(open_files(job.run.path, job.run.storage)).read_run()
    except (DamageError, OSError):  # whoever plans the run says so
        return
    if earlier is not None:
        _refuse(job, asked_differences(earlier.fingerprint, job) + limit_differences(earlier.job["data"], job))


def refuse_difference(plan: Plan, earlier: RunRecord) -> None:
    """The same of everything, once there is a plan."""
    found = differences(earlier.fingerprint, plan.lock())
    # What every `auto` stands for follows from the rest, and is news only where it differs alone.
    different = [line for line in found if not line.startswith("resolved.")] or found
    was = {file["name"]: file["rows"] for file in earlier.plan["files"]}
    now = (
        {file.name: file.rows for file in plan.source.files}
        if any(line.startswith("data file ") for line in found)
        else {}
    )
    for name in was.keys() & now.keys():
        if None not in (was[name], now[name]) and was[name] != now[name]:
            start = f"data file {name}: "
            rows = f", {was[name]:,} rows -> {now[name]:,} rows"
            different = [line + rows if line.startswith(start) else line for line in different]
    _refuse(plan.job, different + limit_differences(earlier.job["data"], plan.job))


def grown(plan: Plan, earlier: RunRecord) -> bool:
    """A limit of the data is another than the run's."""
    return any(earlier.job["data"].get(key) != getattr(plan.job.data, key) for key in GROWING)


def _refuse(job: Job, different: Sequence[str]) -> None:
    if different:
        more = f" and {len(different) - MOST_DIFFERENCES} more" if len(different) > MOST_DIFFERENCES else ""
        shown = ", ".join(different[:MOST_DIFFERENCES]) + more
        raise RequestError(
            f"run.path = {job.run.path!r}: the run began with other settings: {shown}; "
            "undo that, choose another run.path, or run.overwrite = true to begin anew"
        )
