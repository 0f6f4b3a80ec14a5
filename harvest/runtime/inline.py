"""Shards in this process, one after the other in dataset order: tests, laptops, one GPU."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from harvest.environment import allow_open_files
from harvest.errors import RequestError, WorkError
from harvest.outcome import Progress, Watch
from harvest.pipeline import Pipeline
from harvest.plan import Plan
from harvest.records import Assignment, ShardText
from harvest.runtime.intake import Intake, facts_of_text, report_of
from harvest.runtime.progress import Observer
from harvest.runtime.schedule import Schedule
from harvest.store.files import Files
from harvest.store.lease import Lease
from harvest.store.ledger import Ledger


def run_inline(
    plan: Plan, model: Any, *, files: Files, lease: Lease, schedule: Schedule, observer: Observer, begin: float
) -> Any:
    """Runs the schedule to its end; returns the model that it ran. `model` None is loaded here, where there is
    anything to do; `begin` is when the command began (monotonic).

    Failures are left in `schedule.failures`; raises LostLeaseError when another coordinator has taken over.
    """
    if schedule.finished:
        return model
    allow_open_files()
    with threads_of(plan):
        loading = time.monotonic()
        if model is None:
            lease.tell("loading the model")
            observer.loading()
            model = loaded(plan)
        ready = time.monotonic()
        lease.tell("harvesting")
        observer.loaded(ready - begin, ready - loading)
        _Inline(plan, model, files, lease, schedule, observer, begin=begin, load_seconds=ready - loading).run()
    return model


@contextlib.contextmanager
def threads_of(plan: Plan) -> Iterator[None]:
    """torch computes with as many threads as the plan says."""
    threads = torch.get_num_threads()
    torch.set_num_threads(plan.resolved.threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def loaded(plan: Plan) -> Any:
    """The model of the plan."""
    from harvest.model.load import load_model  # what needs no model (a finished run) loads no transformers

    try:
        resolved, with_head = plan.resolved, bool(plan.answers)
        return load_model(plan.job.model, plan.config, resolved.dtype, resolved.device, with_head)
    except RequestError as error:  # too late for "nothing was written": the run has begun
        raise WorkError(str(error)) from error


class _Inline:
    """The schedule, guarded: the pipeline asks for shards from its reading thread."""

    def __init__(
        self,
        plan: Plan,
        model: Any,
        files: Files,
        lease: Lease,
        schedule: Schedule,
        observer: Observer,
        *,
        begin: float,
        load_seconds: float,
    ) -> None:
        watch = Watch(was_read=self._was_read, advanced=self._advanced, still_mine=lease.check)
        self._pipeline = Pipeline(plan, model, files, lease.life, watch, begin=begin, load_seconds=load_seconds)
        self._schedule = schedule
        self._intake = Intake(Ledger(files), lease, schedule, observer)
        self._lock = threading.Lock()
        self._observer, self._begin, self._moved = observer, begin, False

    def run(self) -> None:
        while not self._schedule.finished:  # again where a try failed after the last shard was handed out
            # Closed here also when an interrupt ends the loop: else its threads would go on reading and writing until
            # the traceback lets go of it, into an interpreter that ends and a lease that is given back.
            with contextlib.closing(self._pipeline.run(self._assignments())) as outcomes:
                for outcome in outcomes:
                    with self._lock:
                        self._intake.take([report_of(outcome)])

    def _assignments(self) -> Iterator[Assignment]:
        while True:
            with self._lock:
                assignment = self._schedule.next()
                self._intake.beat()
            if assignment is None:
                return
            yield assignment

    def _advanced(self, progress: Progress) -> None:
        if not self._moved:
            self._moved = True
            self._observer.first_forward(time.monotonic() - self._begin)
        self._observer.advanced(progress)

    def _was_read(self, assignment: Assignment, text: ShardText) -> None:
        with self._lock:
            self._schedule.read(assignment.shard.key, facts_of_text(text))
