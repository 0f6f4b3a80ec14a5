"""The path of a shard: read, tokenise, batch, forward, capture, reduce, write. Read this file first.

    source -> tokenise -> sort -> forward + capture -> reduce -> arrays, tables -> a record for the ledger
    `------ thread 1 ------'      `----------- this thread -------'  `------ thread 2 ------'

A shard is tokenised whole before its first forward, so the place of every row is known; batches depend on the shard
alone, so its bits do not depend on who works beside it. Rows gather in memory for one sort window, in dataset order,
and are reduced and written window by window. Nothing is committed here: the coordinator does that with the record.
"""

from __future__ import annotations

import functools
import platform
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

import harvest
from harvest.errors import DocumentError, HarvestError, LostLeaseError, RequestError
from harvest.model.capture import Capture
from harvest.overlap import Ahead, Behind
from harvest.plan import Plan
from harvest.records import FORMAT_VERSION, ArraySpec, Assignment, ShardRecord, ShardText, SortWindow
from harvest.reduce.base import Block, Reduction, save_states
from harvest.reduce.health import Health
from harvest.reduce.moments import Moments
from harvest.store.attempt import AttemptWriter
from harvest.store.files import Files
from harvest.store.layout import DOCUMENTS, STATES, TOKENS, attempt_name
from harvest.store.tables import documents_table, keys_digest, tokens_table
from harvest.text.batch import sort_windows

Rows = Mapping[str, torch.Tensor]
"""Name -> [rows, d] in the stored dtype, on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one try at a shard ended: with a record, or with an error."""

    assignment: Assignment
    record: ShardRecord | None = None
    error: BaseException | None = None

    @property
    def permanent(self) -> bool:
        """The error would repeat itself: another try is pointless."""
        return isinstance(self.error, DocumentError | RequestError)


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


class Pipeline:
    """One replica of the model, and the stages around it."""

    def __init__(self, plan: Plan, model: Any, files: Files, life: str, watch: Watch | None = None) -> None:
        self.plan, self.model, self.files, self.life = plan, model, files, life
        self.watch = watch or Watch()
        self.reductions: list[Reduction[Any]] = [Moments() if plan.job.statistics.moments else Health()]
        self._buffers = Buffers(plan)
        self._tries = 0

    def run(self, assignments: Iterable[Assignment]) -> Iterator[Outcome]:
        """Takes shards through the whole path, the next ones read and the last one written beside the forward.

        Yields one outcome per assignment, in order. A shard that fails does not stop the others; a lost lease does.
        """
        pending: deque[tuple[Assignment, Future[ShardRecord]]] = deque()
        with (
            Capture(self.model, self.plan.names) as capture,
            Ahead(map(self.read, assignments), depth=1, name="harvest-read") as texts,
            Behind(depth=4, name="harvest-write") as behind,
        ):
            for assignment, text in texts:
                pending.append((assignment, self.harvest(assignment, text, capture, behind)))
                while len(pending) > 1 or (pending and pending[0][1].done()):
                    yield _outcome(*pending.popleft())
            while pending:
                yield _outcome(*pending.popleft())

    def read(self, assignment: Assignment) -> tuple[Assignment, ShardText | Exception]:
        """Reads and tokenises a whole shard; its error travels along, for this shard alone."""
        shard = assignment.shard
        try:
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
        self._tries += 1
        attempt = attempt_name(assignment.shard.key, self.life, self._tries)
        work = ShardWork(self, assignment, text, attempt)
        try:
            for window in self.sort(text):
                rows = self._buffers.take(window.rows)
                try:
                    self.forward(window, capture, rows, work)
                except BaseException:
                    self._buffers.give_back(rows)
                    raise
                behind.submit(work.write, rows, self._buffers.give_back)
                work.raise_error()
        except Exception as error:
            return behind.submit(work.give_up, error)
        return behind.submit(work.finish)

    def forward(self, window: SortWindow, capture: Capture, rows: Rows, work: ShardWork) -> None:
        """Fills `rows` batch by batch, and adds them to the sums."""
        for batch in window.batches:
            with work.clock("forward") as clock:
                capture(batch, rows)
            self.watch.advanced(work.progress(batch, clock.seconds))
        with work.clock("forward"):
            capture.wait()
        with work.clock("reduce"):
            work.reduce(window, rows)

    def sort(self, text: ShardText) -> Iterator[SortWindow]:
        """The shard's windows as batches; what may be sorted together is bounded by memory."""
        return sort_windows(
            text.windows,
            tokens_per_batch=self.plan.resolved.tokens_per_batch,
            rows_per_window=self.plan.resolved.rows_per_sort_window,
        )


class ShardWork:
    """One try at a shard: its attempt's folder, its sums and its clocks."""

    def __init__(self, pipeline: Pipeline, assignment: Assignment, text: ShardText, attempt: str) -> None:
        self._plan, self._reductions = pipeline.plan, pipeline.reductions
        self._assignment, self._text, self.attempt = assignment, text, attempt
        self._states = [{str(name): reduction.zero() for name in self._plan.names} for reduction in self._reductions]
        self._error: Exception | None = None
        self.seconds: dict[str, float] = {"forward": 0.0, "reduce": 0.0, "write": 0.0}
        self._store, self._kept = self._plan.job.capture.store, self._plan.job.data.keep or ()
        self._writer = AttemptWriter(
            pipeline.files,
            attempt,
            array_specs(self._plan, len(text.tokens)) if self._store else {},
            chunk_bytes=self._plan.resolved.chunk_bytes,
            before_object=pipeline.watch.still_mine,
        )

    def clock(self, stage: str) -> Clock:
        """A context that adds its busy seconds to the stage's."""
        return Clock(self.seconds, stage)

    def progress(self, batch: Any, seconds: float) -> Progress:
        """What a batch added."""
        rows = len(batch.source)
        return Progress(
            shard=self._assignment.shard.key,
            tokens=int(batch.lengths.sum()),
            rows=rows,
            bytes=rows * self._plan.estimate.bytes_per_row if self._store else 0,
            forward_seconds=seconds,
        )

    def reduce(self, window: SortWindow, rows: Rows) -> None:
        """Adds a window's rows, as stored and in dataset order, to every sum."""
        at = slice(window.first_row, window.first_row + window.rows)
        tokens = self._text.tokens
        for reduction, states in zip(self._reductions, self._states):
            for name, block in rows.items():
                states[name] = reduction.update(
                    states[name],
                    Block(
                        rows=block,
                        special=tokens.special[at],
                        document=tokens.document[at],
                        position=tokens.position[at],
                    ),
                )

    def write(self, rows: Rows, give_back: Callable[[Rows], None]) -> None:
        """Appends a window to every array; after an error, which `finish` will raise, only gives the buffers back."""
        try:
            if self._error is None and self._store:
                with self.clock("write"):
                    for name, block in rows.items():
                        self._writer.append(name, as_numpy(block))
        except Exception as error:
            self._error = error
        finally:
            give_back(rows)

    def raise_error(self) -> None:
        """Raises what has gone wrong behind, so that no forward runs in vain."""
        if self._error is not None:
            raise self._error

    def give_up(self, error: Exception) -> ShardRecord:
        """Drops the attempt, and raises the error."""
        self._writer.abort()
        raise error

    def finish(self) -> ShardRecord:
        """Writes tables and sums, makes everything durable, and says what is there."""
        try:
            self.raise_error()
            with self.clock("write"):
                if self._store:
                    self._writer.table(TOKENS, tokens_table(self._text.tokens))
                self._writer.table(DOCUMENTS, documents_table(self._text.documents, self._kept))
                self._writer.blob(STATES, save_states(zip(self._reductions, self._states)))
                objects = self._writer.close()
        except Exception as error:
            return self.give_up(error)
        return self._record(objects)

    def _record(self, objects: Mapping[str, Any]) -> ShardRecord:
        text, health = self._text, self._states[0]
        return ShardRecord(
            format=FORMAT_VERSION,
            shard=self._assignment.shard,
            attempt=self.attempt,
            rows=len(text.tokens),
            documents=len(text.documents),
            skipped=Counter(row.reason or "" for row in text.documents if row.status == "skipped"),
            tokens=text.tokens_run,
            dropped_tokens=text.dropped_tokens,
            forward_tokens=text.forward_tokens,
            non_finite={name: n for name, state in health.items() if (n := state.non_finite_values)},
            zero_rows={name: n for name, state in health.items() if (n := state.zero_rows)},
            objects=objects,
            keys_digest=keys_digest(text.tokens.document, text.tokens.position, text.tokens.token),
            source_digest=text.source_digest,
            ended=text.ended,
            cut=text.cut,
            cursor=text.cursor,
            environment=environment(self._plan),
            seconds={stage: round(seconds, 6) for stage, seconds in self.seconds.items()},
        )


class Buffers:
    """Two sets of row buffers: one fills while the other is written; a third waits: back-pressure."""

    SETS = 2

    def __init__(self, plan: Plan) -> None:
        self._names = plan.names
        self._dtype: torch.dtype = getattr(torch, plan.resolved.store_dtype)
        self._pinned = plan.resolved.device == "cuda"
        self._free: queue.Queue[dict[str, torch.Tensor]] = queue.Queue()
        for _ in range(self.SETS):
            self._free.put({})
        self._lent: dict[int, dict[str, torch.Tensor]] = {}

    def take(self, rows: int) -> Rows:
        """Name -> [rows, d], contents undefined; waits until a set is free."""
        buffers = self._free.get()
        for name in self._names:
            held = buffers.get(str(name))
            if held is None or len(held) < rows:
                buffers[str(name)] = torch.empty(rows, name.width, dtype=self._dtype, pin_memory=self._pinned)
        views = {name: buffer[:rows] for name, buffer in buffers.items()}
        self._lent[id(views)] = buffers
        return views

    def give_back(self, views: Rows) -> None:
        """Frees what `take` returned."""
        self._free.put(self._lent.pop(id(views)))


class Clock:
    """Adds the time spent inside to a stage's seconds."""

    def __init__(self, seconds: dict[str, float], stage: str) -> None:
        self._total, self._stage, self.seconds = seconds, stage, 0.0

    def __enter__(self) -> Clock:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self._total[self._stage] += self.seconds


def array_specs(plan: Plan, rows: int) -> dict[str, ArraySpec]:
    """What a shard's arrays are, before they are written."""
    return {
        str(name): ArraySpec(
            rows=rows,
            width=name.width,
            dtype=plan.resolved.store_dtype,
            attributes={
                "model": plan.job.model.name,
                "site": name.site,
                "layer": name.layer,
                "module": name.module,
                "dtype": plan.resolved.store_dtype,
            },
        )
        for name in plan.names
    }


def as_numpy(rows: torch.Tensor) -> np.ndarray:
    """The rows as the store takes them: bfloat16 as its bits (uint16), everything else as it is; no copy."""
    array: np.ndarray = (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()
    return array


def environment(plan: Plan) -> dict[str, str]:
    """What the last bits depend on besides the job: hardware, libraries, threads."""
    device = torch.cuda.get_device_name() if plan.resolved.device == "cuda" else cpu_name()
    return {
        "harvest": harvest.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device,
        "threads": str(plan.resolved.threads),
    }


@functools.cache
def cpu_name() -> str:
    """Model and instruction set of the processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        model = ""
    return f"{model or platform.processor() or platform.machine()} ({torch.backends.cpu.get_cpu_capability()})"


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
    return f"shard {assignment.shard.key}: {' '.join(text.split())}"
