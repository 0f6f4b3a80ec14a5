"""The path of a shard: read, tokenise, batch, forward, capture, reduce, write. Read this file first.

    source -> tokenise -> batch -> forward + capture -> reduce -> arrays, tables -> a record for the ledger
    `------ thread 1 ------'       `----------- this thread -------'  `------ thread 2 ------'

A shard is tokenised whole before its first forward, so the place of every row is known; batches depend on the shard
alone, so its bits do not depend on who works beside it. Rows gather in memory for one sort window, in dataset order,
and are reduced and written window by window. Nothing is committed here: the coordinator does that with the record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from harvest.buffers import Buffers, Rows
from harvest.errors import DocumentError, HarvestError, LostLeaseError, MismatchError, RequestError
from harvest.examples import KeptExamples
from harvest.model.capture import Capture
from harvest.overlap import Ahead, Behind
from harvest.plan import Plan
from harvest.records import Assignment, Batch, Shard, ShardRecord, ShardText, SortWindow
from harvest.reduce.base import Reduction
from harvest.reduce.health import Health
from harvest.reduce.moments import Moments
from harvest.selfcheck import self_check
from harvest.shardwork import ShardWork
from harvest.store.files import Files
from harvest.store.layout import attempt_name
from harvest.storedrows import read_dtype
from harvest.text.batch import batching_of, unpadded
from harvest.tokengroups import embedded, holds_embeddings


class CalledOffError(Exception):
    """Nobody needs this try any more: another one has been faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one try at a shard ended: with a record, or with an error."""

    assignment: Assignment
    record: ShardRecord | None = None
    error: BaseException | None = None

    @property
    def permanent(self) -> bool:
        """The error would repeat itself: another try is pointless."""
        return isinstance(self.error, DocumentError | MismatchError | RequestError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one batch added, for whoever watches."""

    shard: str
    tokens: int
    """Real tokens that the forward read."""
    rows: int
    bytes: int
    """That go to the store."""
    forward_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What the pipeline tells and asks while it works; every call is cheap."""

    was_read: Callable[[Assignment, ShardText], None] = lambda assignment, text: None
    """A shard has been tokenised; its forward is still to come."""
    advanced: Callable[[Progress], None] = lambda progress: None
    still_mine: Callable[[], None] = lambda: None
    """Raises LostLeaseError when another coordinator has taken over; asked before each object that is written."""
    wanted: Callable[[Assignment], bool] = lambda assignment: True
    """Whether this try is still needed; asked before a shard is read, and before each window's forward."""
    ending: Callable[[], None] = lambda: None
    """The pipeline breaks off: the iterator that it takes shards from must not wait for another one."""


class Pipeline:
    """One replica of the model, and the stages around it."""

    def __init__(self, plan: Plan, model: Any, files: Files, life: str, watch: Watch | None = None) -> None:
        self.plan, self.model, self.files, self.life = plan, model, files, life
        self.watch = watch or Watch()
        self.reductions: list[Reduction[Any]] = [Moments() if plan.job.statistics.moments else Health()]
        self._buffers = Buffers(
            {str(name): name.width for name in plan.names},
            read_dtype(plan.resolved.store_dtype),
            pinned=plan.resolved.device == "cuda",
        )
        self._batching = batching_of(plan.resolved.batching, plan.resolved.switches)
        self._dtype: torch.dtype = getattr(torch, plan.resolved.dtype)
        self._checked = False

    def run(self, assignments: Iterable[Assignment]) -> Generator[Outcome]:
        """Takes shards through the whole path, the next ones read and the last one written beside the forward.

        Yields one outcome per assignment, in order. A shard that fails does not stop the others; a lost lease does.
        """
        pending: deque[tuple[Assignment, Future[ShardRecord]]] = deque()
        with (
            Capture(self.model, self.plan.names, self.plan.answers) as capture,
            Ahead(map(self.read, assignments), depth=1, name="harvest-read") as texts,
            Behind(depth=4, name="harvest-write") as behind,
        ):
            try:
                for item in texts:
                    if item is not None:
                        assignment, text = item
                        future = self.harvest(assignment, text, capture, behind)
                        pending.append((assignment, future))
                        future.add_done_callback(lambda _: texts.wake())  # its outcome must not wait for the next shard
                    while len(pending) > 1 or (pending and pending[0][1].done()):
                        yield _outcome(*pending.popleft())
                while pending:
                    yield _outcome(*pending.popleft())
            except BaseException:
                self.watch.ending()
                raise

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
        self, assignment: Assignment, text: ShardText | Exception, capture: Capture, behind: Behind
    ) -> Future[ShardRecord]:
        """Forward, capture and reduce a shard here, write it behind; the future is its record, or its error."""
        if isinstance(text, Exception):
            return _failed(text)
        work = self.begin(assignment, text)
        try:
            if not self._checked and text.windows:
                work.self_check = self_check(capture, text.windows, self._dtype, self._batching)
                self._checked = True
            for window in self.batches(text):
                self._require_wanted(assignment)
                rows = self._buffers.take(window.rows)
                try:
                    self.forward(window, capture, rows, work)
                except BaseException:
                    self._buffers.give_back(rows)
                    raise
                behind.submit(work.write, window, rows, self._buffers.give_back)
                work.raise_error()
        except Exception as error:
            return behind.submit(work.give_up, error)
        return behind.submit(work.finish)

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
        )

    def _embedded(self, shard: Shard) -> Mapping[str, KeptExamples]:
        """Rows of embeddings that this shard keeps, for directions between tokens."""
        if not holds_embeddings(shard, self.plan.source.files):
            return {}
        return embedded(self.plan.job.directions, self.plan.token_groups, self.model)

    def forward(self, window: SortWindow, capture: Capture, rows: Rows, work: ShardWork) -> None:
        """Fills `rows` batch by batch, and adds them to the sums.

        Where a value is no finite number, its window runs once more in a line of its own: attention weighs what it
        must not see with zero, and zero times NaN is NaN, so it may come from a neighbour or from the padding.
        """
        for batch in window.batches:
            with work.clock("forward") as clock:
                self._run(batch, window, capture, rows, work)
            self.watch.advanced(self._progress(work, batch, clock.seconds))
        with work.clock("forward"):
            capture.wait()
        with work.clock("reduce"):
            work.round(window, rows)
            sums = work.reduced(window, rows)
        if not work.all_finite(sums, window, rows):
            again = list(unpadded(window.batches, work.odd_rows(window, rows)))
            with work.clock("forward"):
                for batch in again:
                    self._run(batch, window, capture, rows, work)
                capture.wait()
            with work.clock("reduce"):
                for batch in again:
                    work.round(window, rows, batch.rows)
                sums = work.reduced(window, rows)
        with work.clock("reduce"):
            work.add(sums, window, rows)

    def _run(self, batch: Batch, window: SortWindow, capture: Capture, rows: Rows, work: ShardWork) -> None:
        """One forward; as far as the head only where a sequence ends at which an answer is asked for."""
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


def _failed(error: Exception) -> Future[ShardRecord]:
    future: Future[ShardRecord] = Future()
    future.set_exception(error)
    return future


def _outcome(assignment: Assignment, future: Future[ShardRecord]) -> Outcome:
    error = future.exception()
    if error is None:
        return Outcome(assignment=assignment, record=future.result())
    if isinstance(error, LostLeaseError) or not isinstance(error, Exception):
        raise error
    return Outcome(assignment=assignment, error=error)


def describe(assignment: Assignment, error: BaseException) -> str:
    """One line that names the shard and what happened."""
    text = str(error) if isinstance(error, HarvestError) else f"{type(error).__name__}: {error}"
    if isinstance(error, DocumentError) and error.where:  # as read; a value that the store cannot hold has no place
        text += "; data.on_bad = 'skip' leaves such documents out and lists them"
    return f"shard {assignment.shard.key}: {' '.join(text.split())}"
