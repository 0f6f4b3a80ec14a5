"""What a person sees while a run works: a bar on a terminal, a line now and then in a log, nothing when asked.

Speaks on stderr, so that stdout holds results alone.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from harvest.pipeline import Progress as Advance
from harvest.plan import Plan
from harvest.records import ShardRecord

LOG_SECONDS = 10.0
"""Between two lines of a log."""
BAR_SECONDS = 0.1
"""Between two looks of a bar that is told of every write."""


class Observer(Protocol):
    """Hears of everything that happens in a run; the calls come from one thread at a time."""

    def started(self, plan: Plan, committed: list[ShardRecord]) -> None:
        """The plan stands and the earlier lives' shards are known; the model is still to be loaded."""

    def loaded(self, seconds: float) -> None:
        """The model is there; `seconds` since the command began."""

    def joined(self, worker: str, workers: int) -> None:
        """A worker of a crew is ready; `workers` are, with it."""

    def left(self, worker: str, workers: int) -> None:
        """A worker of a crew is lost, by name and reason; `workers` are still ready."""

    def waiting(self, text: str) -> None:
        """Nothing happens for a while, and why that may be."""

    def advanced(self, advance: Advance) -> None:
        """Some batches have been captured."""

    def committed(self, record: ShardRecord) -> None:
        """A shard exists."""

    def retried(self, shard: str, error: str) -> None:
        """A try failed and the shard will be tried again."""

    def gave_up(self, shard: str, error: str) -> None:
        """A shard failed for good."""

    def finished(self, summary: dict[str, Any]) -> None:
        """The run is complete."""

    def warned(self, text: str) -> None:
        """Something went wrong that does not end the run."""

    def stopped(self, error: BaseException) -> None:
        """The run ended early."""


class Silent:
    """Hears everything and says nothing."""

    def started(self, plan: Plan, committed: list[ShardRecord]) -> None: ...
    def loaded(self, seconds: float) -> None: ...
    def joined(self, worker: str, workers: int) -> None: ...
    def left(self, worker: str, workers: int) -> None: ...
    def waiting(self, text: str) -> None: ...
    def advanced(self, advance: Advance) -> None: ...
    def committed(self, record: ShardRecord) -> None: ...
    def retried(self, shard: str, error: str) -> None: ...
    def gave_up(self, shard: str, error: str) -> None: ...
    def finished(self, summary: dict[str, Any]) -> None: ...
    def warned(self, text: str) -> None: ...
    def stopped(self, error: BaseException) -> None: ...


class Quiet(Silent):
    """Says only what went wrong without ending the run."""

    def warned(self, text: str) -> None:
        print(f"harvest: warning: {text}", file=sys.stderr, flush=True)


class Rates:
    """Totals of this life, and what they come to per second."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.tokens = self.bytes = 0
        self.forward_seconds = 0.0
        self.expected_tokens: int | None = None
        self._expected_documents: int | None = None
        self._documents = self._document_tokens = 0
        self.earlier_tokens = 0
        self.workers = 1

    def start(self, plan: Plan, committed: list[ShardRecord]) -> None:
        """Counts from now; what earlier lives committed is part of the way but not of the speed."""
        self.begin = time.monotonic()
        self.expected_tokens, self._expected_documents = plan.estimate.tokens, plan.estimate.documents
        self.earlier_tokens = sum(record.tokens for record in committed)
        for record in committed:
            self.learn(record)

    def learn(self, record: ShardRecord) -> None:
        """The plan judged the whole from its first documents; the committed shards know better."""
        self._documents += record.documents
        self._document_tokens += record.tokens
        if self._expected_documents and self._documents:
            self.expected_tokens = round(self._document_tokens / self._documents * self._expected_documents)

    def add(self, advance: Advance) -> None:
        """One more batch."""
        self.tokens += advance.tokens
        self.bytes += advance.bytes
        self.forward_seconds += advance.forward_seconds

    @property
    def text(self) -> str:
        """`12,345 tokens/s  93 % of the bare forward  45 MB/s`: the share is forward-busy time over wall time."""
        wall = max(time.monotonic() - self.begin, 1e-9)
        share = min(100, round(100 * self.forward_seconds / wall / max(self.workers, 1)))
        return f"{self.tokens / wall:,.0f} tokens/s  {share} % of the bare forward  {self.bytes / wall / 1e6:,.0f} MB/s"


class Terminal(Quiet):
    """A bar with tokens/s, bytes/s and the time left."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._rates = Rates()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[rates]}"),
            console=Console(file=stream),
        )
        self._task = self._bar.add_task("loading the model", total=None, rates="")

    def started(self, plan: Plan, committed: list[ShardRecord]) -> None:
        self._rates.start(plan, committed)
        self._bar.start()
        if committed:
            self._bar.console.print(f"going on after {len(committed)} committed shards")

    def loaded(self, seconds: float) -> None:
        self._rates.begin = time.monotonic()
        self._bar.update(
            self._task,
            description="harvesting",
            total=self._rates.expected_tokens,
            completed=self._rates.earlier_tokens,
        )

    def joined(self, worker: str, workers: int) -> None:
        self._crew(workers)

    def left(self, worker: str, workers: int) -> None:
        self._bar.console.print(f"lost {worker}", markup=False)
        self._crew(workers)

    def waiting(self, text: str) -> None:
        self._bar.console.print(text, markup=False)

    def _crew(self, workers: int) -> None:
        self._rates.workers = workers
        self._bar.update(self._task, description=f"harvesting with {workers} worker{'s' if workers != 1 else ''}")

    def advanced(self, advance: Advance) -> None:
        self._rates.add(advance)
        self._bar.update(self._task, advance=advance.tokens, rates=self._rates.text)

    def committed(self, record: ShardRecord) -> None:
        self._rates.learn(record)
        self._bar.update(self._task, total=self._rates.expected_tokens)

    def retried(self, shard: str, error: str) -> None:
        self._bar.console.print(f"trying again: {error}", markup=False)

    def gave_up(self, shard: str, error: str) -> None:
        self._bar.console.print(f"gave up: {error}", markup=False)

    def finished(self, summary: dict[str, Any]) -> None:
        self._bar.update(self._task, total=1, completed=1)
        self._bar.stop()

    def stopped(self, error: BaseException) -> None:
        self._bar.stop()


class Log(Quiet):
    """One line when something happens, and one every ten seconds of work."""

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._rates, self._stream, self._last = Rates(), stream, time.monotonic()

    def _say(self, text: str) -> None:
        print(f"harvest: {text}", file=self._stream, flush=True)

    def started(self, plan: Plan, committed: list[ShardRecord]) -> None:
        self._rates.start(plan, committed)
        self._say(f"{plan.job.run.path}: {len(plan.names)} names, {len(committed)} shards committed earlier")

    def loaded(self, seconds: float) -> None:
        self._rates.begin = time.monotonic()
        self._say(f"model loaded, first forward {seconds:.1f} s after the start")

    def joined(self, worker: str, workers: int) -> None:
        self._rates.workers = workers
        self._say(f"{worker} is ready, {workers} are")

    def left(self, worker: str, workers: int) -> None:
        self._rates.workers = workers
        self._say(f"lost {worker}; {workers} are left")

    def waiting(self, text: str) -> None:
        self._say(text)

    def advanced(self, advance: Advance) -> None:
        self._rates.add(advance)
        if time.monotonic() - self._last >= LOG_SECONDS:
            self._last = time.monotonic()
            self._say(f"at {advance.shard}  {self._rates.text}{self._share()}")

    def _share(self) -> str:
        if not self._rates.expected_tokens:
            return ""
        done = self._rates.earlier_tokens + self._rates.tokens
        return f"  {min(100, 100 * done // self._rates.expected_tokens)} % done"

    def committed(self, record: ShardRecord) -> None:
        self._rates.learn(record)

    def retried(self, shard: str, error: str) -> None:
        self._say(f"trying again: {error}")

    def gave_up(self, shard: str, error: str) -> None:
        self._say(f"gave up: {error}")


@contextlib.contextmanager
def writing(what: str, stream: TextIO | None = None) -> Iterator[Callable[[int, int], None]]:
    """Yields what to tell (bytes written, bytes expected): a bar on a terminal, a line every ten seconds elsewhere."""
    stream = stream or sys.stderr
    begin = last = time.monotonic()

    def due(seconds: float) -> bool:
        nonlocal last
        now = time.monotonic()
        if now - last < seconds:
            return False
        last = now
        return True

    def said(done: int, expected: int) -> None:
        if due(LOG_SECONDS):
            rate = done / max(time.monotonic() - begin, 1e-9) / 1e6
            share = min(100, 100 * done // max(1, expected))
            print(f"harvest: {what}: {done / 1e6:,.0f} MB  {share} % done  {rate:,.0f} MB/s", file=stream, flush=True)

    if not stream.isatty():
        yield said
        return
    columns = (BarColumn(), TaskProgressColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        TextColumn("{task.description}"), *columns, TimeRemainingColumn(compact=True), console=Console(file=stream)
    ) as bar:
        task = bar.add_task(what, total=None)

        def shown(done: int, expected: int) -> None:
            if due(BAR_SECONDS):
                bar.update(task, completed=done, total=max(done, expected))

        yield shown
