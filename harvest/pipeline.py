"""The path of a shard: read, tokenise, batch, forward, capture, reduce, write. Read this file first.

    source -> tokenise -> batch -> forward + capture -> reduce -> arrays, tables -> a record for the ledger
    `------ thread 1 ------'       `----------- this thread -------'  `------ thread 2 ------'
                                   (an accelerator's rows are reduced in a thread between these two)

A shard is tokenised whole before its first forward, so the place of every row is known; batches depend on the shard
alone, so its bits do not depend on who works beside it. Rows gather in memory for one sort window, in dataset order,
and are reduced and written window by window. Nothing is committed here: the coordinator does that with the record.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from harvest.buffers import Buffers, Rows, sets_for, writers_for
from harvest.concepts.examples import KeptExamples
from harvest.concepts.tokengroups import embedded, holds_embeddings
from harvest.errors import LostLeaseError
from harvest.interrupt import undivided
from harvest.model.capture import Capture
from harvest.outcome import CalledOffError, Outcome, Progress, Watch
from harvest.overlap import Ahead, Behind, Later
from harvest.plan import Plan
from harvest.records import Assignment, Batch, Shard, ShardRecord, ShardText, SortWindow
from harvest.reduce.known import reductions_of
from harvest.selfcheck import self_check
from harvest.shardwork import ShardWork
from harvest.stages import REDUCED_BESIDE, Clock, Spent, waited
from harvest.store.files import Files
from harvest.store.layout import attempt_name
from harvest.store.storedrows import read_dtype
from harvest.text.batch import batching_of, unpadded


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    """What a shard passes through while the pipeline runs."""

    capture: Capture
    reducing: Behind | None
    """Sums are made beside the next rows' forward; None where that is on the same cores, and waits for them."""
    writing: Behind
    ended: Callable[[], None]
    """Called when a shard has been written, or given up."""


class Pipeline:
    """One replica of the model, and the stages around it."""

    def __init__(
        self,
        plan: Plan,
        model: Any,
        files: Files,
        life: str,
        watch: Watch | None = None,
        *,
        begin: float | None = None,
        load_seconds: float = 0.0,
    ) -> None:
        """`begin`: when the work on this replica began (monotonic), now by default; `load_seconds`, of them, went into
        loading the model."""
        self.plan, self.model, self.files, self.life = plan, model, files, life
        self.watch = watch or Watch()
        self.reductions = reductions_of(plan.job.statistics)
        sets = sets_for(plan.resolved.device)
        self._buffers = Buffers(
            {str(name): name.width for name in plan.names},
            read_dtype(plan.resolved.store_dtype),
            sets=sets,
            pinned=plan.resolved.device == "cuda",
        )
        self._beside = sets > 2
        """Sums are made while an accelerator is at the next rows."""
        self._team = ThreadPoolExecutor(plan.resolved.threads, "harvest-reduce")
        """While it works, a forward on the same cores waits: they keep as many cores busy as one of them."""
        writers = writers_for(plan.resolved.device, local=files.local)
        self._writers = ThreadPoolExecutor(writers, "harvest-object") if writers > 1 else None
        self._turn = threading.Lock()
        """Held while the model runs: it may be asked again for rows that are being reduced."""
        self._batching = batching_of(plan.resolved.batching, plan.resolved.switches)
        self._dtype: torch.dtype = getattr(torch, plan.resolved.dtype)
        self._checked = False
        self._begin, self._load_seconds = time.monotonic() if begin is None else begin, load_seconds
        self._spent = Spent()

    def run(self, assignments: Iterable[Assignment]) -> Generator[Outcome]:
        """Takes shards through the whole path, the next ones read and the last one written beside the forward.

        Yields one outcome per assignment, in order. A shard that fails does not stop the others; a lost lease does.
        """
        pending: deque[tuple[Assignment, Later[ShardRecord]]] = deque()
        self._spent.begin()
        with (
            Capture(self.model, self.plan.names, self.plan.answers) as capture,
            Ahead(self._read_all(assignments), depth=1, name="harvest-read") as texts,
            Behind(depth=4, name="harvest-write") as writing,
            Behind(depth=4, name="harvest-sums") if self._beside else contextlib.nullcontext() as reducing,
        ):
            # A shard's outcome must not wait for the next one's text.
            lines = _Lines(capture=capture, reducing=reducing, writing=writing, ended=texts.wake)
            try:
                for item in waited(texts, self._spent.clock("forward.idle")):
                    if item is not None:
                        assignment, text, seconds = item
                        pending.append((assignment, self.harvest(assignment, text, lines, seconds)))
                    while len(pending) > 1 or (pending and pending[0][1].done):
                        outcome = self._outcome(*pending.popleft())
                        with self._spent.clock("commit"):
                            yield outcome
                while pending:
                    yield self._outcome(*pending.popleft())
            except BaseException:
                self.watch.ending()
                raise

    def _read_all(
        self, assignments: Iterable[Assignment]
    ) -> Iterator[tuple[Assignment, ShardText | Exception, dict[str, float]]]:
        """Every shard as `read` gives it, and the seconds that went into it; in the reading thread."""
        idle: dict[str, float] = {}
        for assignment in waited(assignments, Clock(idle, "read.idle")):
            seconds, idle["read.idle"] = dict(idle), 0.0
            with Clock(seconds, "read"):
                read = self.read(assignment)
            yield *read, seconds

    def read(self, assignment: Assignment) -> tuple[Assignment, ShardText | Exception]:
        """Reads and tokenises a whole shard; its error travels along, for this shard alone."""
        shard = assignment.shard
        try:
            self._require_wanted(assignment)
            rows = self.plan.source.rows(shard.file, shard.start, shard.stop, assignment.cursor)
            text = self.plan.tokeniser.shard(
                rows,
                file=shard.file,
                name=self.plan.source.files[shard.file].name,
                limit=assignment.documents,
                max_tokens=assignment.tokens,
            )
        except Exception as error:
            return assignment, error
        self.watch.was_read(assignment, text)
        return assignment, text

    def harvest(
        self, assignment: Assignment, text: ShardText | Exception, lines: _Lines, seconds: Mapping[str, float]
    ) -> Later[ShardRecord]:
        """Forward, capture and reduce a shard, write it behind; later there is its record, or its error.

        `seconds`: what went into reading it.
        """
        if isinstance(text, Exception):
            return Later.failed(text)
        work = self.begin(assignment, text)
        work.seconds.update(seconds)
        try:
            if not self._checked and text.windows:
                self._check(work, text, lines.capture)
            for window in self.batches(text):
                self._require_wanted(assignment)
                with self._spent.clock("forward.blocked"):
                    rows = self._buffers.take(window.rows)
                try:
                    self.forward(window, lines.capture, rows, work)
                except BaseException:
                    self._buffers.give_back(rows)
                    raise
                self._hand_on(window, lines, rows, work)
                work.raise_error()
        except Exception as error:
            return lines.writing.submit(work.give_up, error, after=lines.reducing, then=lines.ended)
        return lines.writing.submit(work.finish, after=lines.reducing, then=lines.ended)

    def _hand_on(self, window: SortWindow, lines: _Lines, rows: Rows, work: ShardWork) -> None:
        """Captured rows are added to the sums, and then written behind; what fails there, the work remembers."""
        again = partial(self._again, window, lines.capture, rows, work)
        if lines.reducing is None:
            with undivided():  # the team's pool is not made to be torn
                work.take(window, rows, again)
        with self._spent.clock("forward.blocked"):
            if lines.reducing is not None:
                lines.reducing.submit(work.take, window, rows, again, REDUCED_BESIDE)
            lines.writing.submit(work.write, window, rows, self._buffers.give_back, after=lines.reducing)

    def _check(self, work: ShardWork, text: ShardText, capture: Capture) -> None:
        """The replica's own check, before its first forward."""
        with self._spent.clock("check"):
            work.self_check = self_check(capture, text.windows, self._dtype, self._batching)
        self._checked = True
        self._spent.add("start", time.monotonic() - self._begin)
        self._spent.add("load", self._load_seconds)

    def _outcome(self, assignment: Assignment, written: Later[ShardRecord]) -> Outcome:
        """Of a shard that has been written, or waited for; its record says what this thread spent since the last."""
        with self._spent.clock("forward.blocked"):
            error = written.error()
        if error is None:
            record = written.result()
            spent = {stage: round(seconds, 6) for stage, seconds in self._spent.take().items()}
            return Outcome(assignment=assignment, record=replace(record, seconds={**record.seconds, **spent}))
        if isinstance(error, LostLeaseError) or not isinstance(error, Exception):
            raise error
        return Outcome(assignment=assignment, error=error)

    def _require_wanted(self, assignment: Assignment) -> None:
        if not self.watch.wanted(assignment):
            raise CalledOffError(f"shard {assignment.shard.key}")

    def begin(self, assignment: Assignment, text: ShardText) -> ShardWork:
        """A new attempt at a shard, in a folder of its own."""
        return ShardWork(
            self.plan,
            assignment,
            text,
            reductions=self.reductions,
            files=self.files,
            attempt=attempt_name(assignment.shard.key, self.life, assignment.attempt),
            still_mine=self.watch.still_mine,
            embedded=self._embedded(assignment.shard),
            team=self._team,
            writers=self._writers,
        )

    def _embedded(self, shard: Shard) -> Mapping[str, KeptExamples]:
        """Rows of embeddings that this shard keeps, for directions between tokens."""
        if not holds_embeddings(shard, self.plan.source.files):
            return {}
        return embedded(self.plan.job.directions, self.plan.token_groups, self.model)

    def forward(self, window: SortWindow, capture: Capture, rows: Rows, work: ShardWork) -> None:
        """Fills `rows` batch by batch."""
        for batch in window.batches:
            seconds = self._run(batch, window, capture, rows, work)
            self.watch.advanced(self._progress(work, batch, seconds))
        with work.clock("forward"), self._turn:
            capture.wait()

    def _again(
        self, window: SortWindow, capture: Capture, rows: Rows, work: ShardWork, odd: np.ndarray
    ) -> Sequence[Batch]:
        """Runs the texts of these rows, bool [n], once more, each in a line of its own."""
        batches = list(unpadded(window.batches, odd))
        with self._turn:
            for batch in batches:
                self._capture(batch, window, capture, rows, work)
            capture.wait()
        return batches

    def _run(self, batch: Batch, window: SortWindow, capture: Capture, rows: Rows, work: ShardWork) -> float:
        """One forward; its seconds, without those of the copies to `rows`."""
        with self._turn:
            before = capture.copy_seconds
            with work.clock("forward") as clock:
                self._capture(batch, window, capture, rows, work)
            copied = capture.copy_seconds - before
        work.seconds["forward"] -= copied
        work.seconds["copy"] += copied
        return clock.seconds - copied

    def _capture(self, batch: Batch, window: SortWindow, capture: Capture, rows: Rows, work: ShardWork) -> None:
        """As far as the head only where a sequence ends at which an answer is asked for."""
        if work.logits is None:
            capture(batch, rows)
            return
        places = work.logits.places(batch, window)
        logits = capture(batch, rows, places)
        if logits is not None:
            work.logits.take(batch, window, places, logits)

    def _progress(self, work: ShardWork, batch: Batch, seconds: float) -> Progress:
        rows = len(batch.source)
        return Progress(
            shard=work.shard.key,
            attempt=work.attempt,
            tokens=int(batch.lengths.sum()),
            rows=rows,
            bytes=rows * self.plan.estimate.bytes_per_row if work.stores_rows else 0,
            forward_seconds=seconds,
        )

    def batches(self, text: ShardText) -> Iterator[SortWindow]:
        """The shard's windows as batches; what may be sorted or packed together is bounded by memory."""
        return self._batching(
            text.windows,
            tokens_per_batch=self.plan.resolved.tokens_per_batch,
            rows_per_window=self.plan.resolved.rows_per_sort_window,
        )
