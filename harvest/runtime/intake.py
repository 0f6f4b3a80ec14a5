"""What workers report, put where it belongs: the ledger, the schedule, the lease, and whoever watches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harvest.errors import DocumentError, MismatchError, WorkError
from harvest.interrupt import undivided
from harvest.outcome import Outcome, describe
from harvest.records import Assignment, ShardRecord, ShardText
from harvest.runtime.progress import Observer
from harvest.runtime.schedule import Schedule
from harvest.runtime.slices import ReadFacts
from harvest.store.lease import Lease
from harvest.store.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a try at a shard ended, in plain values that travel between processes."""

    assignment: Assignment
    record: ShardRecord | None = None
    error: str = ""
    """One line that names the shard; empty where there is a record."""
    permanent: bool = False
    """The error would repeat itself."""
    stops: bool = False
    """Nothing more is handed out: `data.on_bad = "fail"` means stop, not fail and go on."""


def report_of(outcome: Outcome) -> Report:
    """The same outcome in plain values."""
    if outcome.record is not None:
        return Report(assignment=outcome.assignment, record=outcome.record)
    assert outcome.error is not None
    return Report(
        assignment=outcome.assignment,
        error=describe(outcome.assignment, outcome.error),
        permanent=outcome.permanent,
        stops=isinstance(outcome.error, DocumentError | MismatchError),
    )


def facts_of_text(text: ShardText) -> ReadFacts:
    """What a tokenised shard tells about those that follow it."""
    return ReadFacts(documents=text.listed, tokens=text.tokens_run, ended=text.ended, cut=text.cut, cursor=text.cursor)


class Intake:
    """The coordinator's desk. One thread at a time."""

    def __init__(self, ledger: Ledger, lease: Lease, schedule: Schedule, observer: Observer) -> None:
        self._ledger, self._lease, self._schedule, self._observer = ledger, lease, schedule, observer

    def take(self, reports: Sequence[Report], now: float = 0.0) -> None:
        """Commits the shards of some reports, or notes their failures.

        The first report of a shard wins; one that comes later is about a try that nobody needs. Raises LostLeaseError
        instead of committing after a takeover.
        """
        self._commit([report for report in reports if report.record is not None], now)
        for report in reports:
            if report.record is None and self._schedule.wants(report.assignment):
                goes_on = self._schedule.failed(report.assignment, report.error, permanent=report.permanent)
                self._tell(report.assignment, report.error, goes_on=goes_on)
                if report.stops and not goes_on:
                    self._schedule.stop()
        self.beat()

    def lost(self, worker: str, error: str, *, blame: bool = True) -> None:
        """A worker is gone; its shards go to others, or are given up by name."""
        for assignment, goes_on in self._schedule.lost(worker, error, blame=blame):
            self._tell(assignment, f"shard {assignment.shard.key}: {error}", goes_on=goes_on)
        self.beat()

    def beat(self) -> None:
        """What the lease's next heartbeat says about the run."""
        self._lease.heartbeat(
            self._schedule.running, {failure.shard.key: failure.error for failure in self._schedule.failures}
        )

    def _tell(self, assignment: Assignment, error: str, *, goes_on: bool) -> None:
        tell = self._observer.retried if goes_on else self._observer.gave_up
        tell(assignment.shard.key, error)

    def _commit(self, reports: Sequence[Report], now: float) -> None:
        """The one place where shards come to exist."""
        first: dict[str, Report] = {}
        for report in reports:
            first.setdefault(report.assignment.shard.key, report)
        wanted = [report for report in first.values() if self._schedule.wants(report.assignment)]
        records = [report.record for report in wanted if report.record is not None]
        if not records:
            return
        self._lease.check()
        errors: list[tuple[Assignment, Exception]] = []
        with undivided():  # else a shard might stand in the ledger of which nobody was told
            for report, record, end in zip(wanted, records, self._ledger.commit_all(records)):
                error = self._settled(record, end)
                if error is None:
                    self._schedule.committed(record, now)
                    self._observer.committed(record)
                else:
                    errors.append((report.assignment, error))
        for assignment, error in errors:
            if isinstance(error, OSError):  # a disk that takes no record ends the run: by the name of the shard
                raise WorkError(describe(assignment, error)) from error
            raise error

    def _settled(self, record: ShardRecord, end: bool | Exception) -> Exception | None:
        """Why a shard does not exist now, after a try to commit it that ended so."""
        if end is not False:
            return end if isinstance(end, Exception) else None
        # The lease is ours and the shard was not there when we took it: a coordinator that was frozen between its last
        # look at the lease and its commit has left a record, whose attempt is a stray.
        try:
            self._ledger.remove(record.shard.key)
            self._ledger.commit(record)
        except Exception as error:
            return error
        return None
