"""Shards in this process, one after the other in dataset order: tests, laptops, one GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from harvest.environment import allow_open_files
from harvest.errors import DocumentError, MismatchError, RequestError, WorkError
from harvest.pipeline import Pipeline, Watch, describe
from harvest.plan import Plan
from harvest.records import Assignment, ShardRecord, ShardText
from harvest.runtime.progress import Observer
from harvest.runtime.schedule import ReadFacts, Schedule
from harvest.store.files import Files
from harvest.store.lease import Lease
from harvest.store.ledger import Ledger


def run_inline(
    plan: Plan, model: Any, *, files: Files, lease: Lease, schedule: Schedule, observer: Observer, begin: float
) -> None:
    """Runs the schedule to its end. `model` None is loaded here; `begin` is when the command began (monotonic).

    Failures are left in `schedule.failures`; raises LostLeaseError when another coordinator has taken over.
    """
    if schedule.finished:
        return
    allow_open_files()
    threads = torch.get_num_threads()
    torch.set_num_threads(plan.resolved.threads)
    try:
        if model is None:
            from harvest.model.load import load_model  # what needs no model (a finished run) loads no transformers

            try:
                model = load_model(plan.job.model, plan.config, plan.resolved.dtype, plan.resolved.device)
            except RequestError as error:  # too late for "nothing was written": the run has begun
                raise WorkError(str(error)) from error
        observer.loaded(time.monotonic() - begin)
        _Inline(plan, model, files, lease, schedule, observer).run()
    finally:
        torch.set_num_threads(threads)


class _Inline:
    """The schedule, guarded: the pipeline asks for shards from its reading thread."""

    def __init__(
        self, plan: Plan, model: Any, files: Files, lease: Lease, schedule: Schedule, observer: Observer
    ) -> None:
        watch = Watch(was_read=self._was_read, advanced=observer.advanced, still_mine=lease.check)
        self._pipeline = Pipeline(plan, model, files, lease.life, watch)
        self._ledger, self._lease, self._schedule, self._observer = Ledger(files), lease, schedule, observer
        self._lock = threading.Lock()

    def run(self) -> None:
        while not self._schedule.finished:  # again where a try failed after the last shard was handed out
            for outcome in self._pipeline.run(self._assignments()):
                with self._lock:
                    if outcome.record is not None:
                        self._lease.check()
                        self._commit(outcome.assignment, outcome.record)
                        self._schedule.committed(outcome.record)
                        self._observer.committed(outcome.record)
                    else:
                        assert outcome.error is not None
                        self._failed(outcome.assignment, outcome.error, permanent=outcome.permanent)
                    self._lease.heartbeat(
                        self._schedule.running, {f.shard.key: f.error for f in self._schedule.failures}
                    )

    def _commit(self, assignment: Assignment, record: ShardRecord) -> None:
        try:
            self._ledger.commit(record)
        except OSError as error:  # a disk that takes no record ends the run: by the name of the shard
            raise WorkError(describe(assignment, error)) from error

    def _assignments(self) -> Iterator[Assignment]:
        while True:
            with self._lock:
                assignment = self._schedule.next()
            if assignment is None:
                return
            yield assignment

    def _was_read(self, assignment: Assignment, text: ShardText) -> None:
        with self._lock:
            facts = ReadFacts(
                documents=len(text.documents),
                tokens=text.tokens_run,
                ended=text.ended,
                cut=text.cut,
                cursor=text.cursor,
            )
            self._schedule.read(assignment.shard.key, facts)

    def _failed(self, assignment: Assignment, error: BaseException, *, permanent: bool) -> None:
        key, text = assignment.shard.key, describe(assignment, error)
        if self._schedule.failed(key, text, permanent=permanent):
            self._observer.retried(key, text)
            return
        self._observer.gave_up(key, text)
        if isinstance(error, DocumentError | MismatchError):  # data.on_bad = "fail" means stop, not: fail and go on
            self._schedule.stop()
