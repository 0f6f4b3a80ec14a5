"""What a person sees while a run works: a bar on a terminal, elsewhere a line for each event and one now and then."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, RenderableType
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
from rich.text import Text

from harvest.runtime.progress import Lines, Observer, Quiet, plain
from harvest.runtime.tally import Expected, Tally, clock_text

if TYPE_CHECKING:
    from harvest.outcome import Progress as Advance
    from harvest.plan import Plan
    from harvest.records import ShardRecord

LOG_SECONDS = 10.0
"""Between two lines of a log that say how far it is."""
BAR_SECONDS = 0.1
"""Between two looks of a bar that is told of every write."""

STOPPING = (
    "stopping: committed shards are kept, those in work are dropped; interrupt again not to wait for what is being read"
)


def on_screen(stream: TextIO) -> bool:
    """Someone watches, and lines can be drawn anew."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def person(stream: TextIO) -> Observer:
    """Tells whoever reads the stream: on a terminal or in a log."""
    return Terminal(stream) if on_screen(stream) else Log(stream)


class Bar(Progress):
    """How far a tally is, and below it the counts and the speed; drawn anew ten times a second, as wide as there is."""

    def __init__(self, stream: TextIO, tally: Tally) -> None:
        self.tally = tally
        self.speed: Callable[[], str] = lambda: self.tally.speed_text
        self._complete = False
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}"),
            console=Console(file=stream),
            expand=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self.add_task("", total=None, left="")

    def say(self, description: str) -> None:
        """What is going on, before the bar."""
        self.update(self._task, description=plain(description))

    def tell(self, text: str) -> None:
        """A line of its own, above the bar."""
        self.console.print(Text(plain(text)), soft_wrap=True)

    def end(self, *, complete: bool) -> None:
        """Draws it for the last time."""
        if complete:
            self.say("complete")
        self._complete = complete
        self.stop()

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar at what the tally says now, and two lines that are cut where the terminal ends."""
        tally = self.tally
        for task in self.task_ids:  # the one, or none yet
            if self._complete:
                self.update(task, total=1, completed=1, left=f"after {clock_text(tally.seconds)}")
            else:
                self.update(task, total=tally.expected_tokens, completed=tally.tokens, left=tally.left_text)
        yield from super().get_renderables()
        for line in (tally.counts_text, self.speed()):
            yield Text(f"  {line}", no_wrap=True, overflow="ellipsis")


class _Failures:
    """Shards that failed for good: the error of the first is how the command ends, so that no one reads it twice."""

    def __init__(self) -> None:
        self._first: str | None = None

    def told(self, shard: str, error: str) -> str:
        """What to say of one now."""
        if self._first is None:
            self._first = error
            return f"gave up on shard {shard}; the end says why"
        return f"gave up: {error}"

    def left(self, end: BaseException) -> str | None:
        """What is still to be said where the command ends with something else."""
        return None if self._first is None or self._first in str(end) else f"gave up: {self._first}"


class Terminal(Quiet):
    """A bar, with a line above it for what happens now and then."""

    def __init__(self, stream: TextIO) -> None:
        self._tally = Tally()
        self._bar = Bar(stream, self._tally)
        self._bar.speed = lambda: _speed(self._tally)
        self._failures = _Failures()

    def started(self, plan: Plan, committed: list[ShardRecord]) -> None:
        self._tally.start(Expected.of(plan), committed)
        self._bar.say("planned")
        self._bar.start()
        if committed:
            self._bar.tell(f"going on after {_shards(len(committed))} committed earlier")

    def was_complete(self, run: str, rows: int) -> None:
        self._bar.tell(_already(run, rows))

    def ray_starts(self, address: str | None) -> None:
        self._bar.tell(_ray_starts(address))

    def workers_start(self, workers: int) -> None:
        self._bar.say(f"starting {_workers(workers)}")
        self._bar.tell(_workers_start(workers))

    def loading(self) -> None:
        self._bar.say("loading the model")
        self._bar.tell("loading the model")

    def loaded(self, seconds: float, took: float) -> None:
        self._tally.ready()
        self._bar.say("harvesting")
        self._bar.tell(_loaded(seconds, took))

    def first_forward(self, seconds: float) -> None:
        self._bar.tell(_first_forward(seconds))

    def joined(self, worker: str, where: str, workers: int) -> None:
        self._crew(workers)

    def left(self, worker: str, why: str, workers: int) -> None:
        self._bar.tell(f"lost {worker}: {why}")
        self._crew(workers)

    def _crew(self, workers: int) -> None:
        self._tally.crew(workers)
        self._bar.say(f"harvesting with {_workers(workers)}")

    def waiting(self, text: str) -> None:
        self._bar.tell(text)

    def advanced(self, advance: Advance) -> None:
        self._tally.advanced(advance)

    def committed(self, record: ShardRecord) -> None:
        self._tally.committed(record)

    def retried(self, shard: str, error: str) -> None:
        self._tally.retried()
        self._bar.tell(f"trying again: {error}")

    def gave_up(self, shard: str, error: str) -> None:
        self._tally.gave_up(shard)
        self._bar.tell(self._failures.told(shard, error))

    def warned(self, text: str) -> None:
        self._bar.tell(f"harvest: warning: {text}")

    def stopping(self) -> None:
        self._bar.tell(STOPPING)

    def finished(self, summary: dict[str, Any]) -> None:
        self._bar.end(complete=True)

    def stopped(self, error: BaseException) -> None:
        if left := self._failures.left(error):
            self._bar.tell(left)
        self._tally.drop()
        self._bar.say("stopped, kept is")
        self._bar.end(complete=False)


class Log(Quiet):
    """One line when something happens, and one every ten seconds of work."""

    def __init__(self, stream: TextIO) -> None:
        self._tally, self._lines, self._last = Tally(), Lines(stream), time.monotonic()
        self._failures = _Failures()

    def _say(self, text: str) -> None:
        self._lines.say(f"harvest: {text}")

    def started(self, plan: Plan, committed: list[ShardRecord]) -> None:
        self._tally.start(Expected.of(plan), committed)
        begun = f"going on after {_shards(len(committed))} committed earlier" if committed else "begins"
        self._say(f"{plan.job.run.path} {begun}: {len(plan.names)} names  {self._tally.counts_text}")

    def was_complete(self, run: str, rows: int) -> None:
        self._say(_already(run, rows))

    def ray_starts(self, address: str | None) -> None:
        self._say(_ray_starts(address))

    def workers_start(self, workers: int) -> None:
        self._say(_workers_start(workers))

    def loading(self) -> None:
        self._say("loading the model")

    def loaded(self, seconds: float, took: float) -> None:
        self._tally.ready()
        self._last = time.monotonic()
        self._say(_loaded(seconds, took))

    def first_forward(self, seconds: float) -> None:
        self._say(_first_forward(seconds))

    def joined(self, worker: str, where: str, workers: int) -> None:
        self._tally.crew(workers)
        self._say(f"{worker} ({where}) is ready, {workers} are")

    def left(self, worker: str, why: str, workers: int) -> None:
        self._tally.crew(workers)
        self._say(f"lost {worker}: {why}; {workers} are left")

    def waiting(self, text: str) -> None:
        self._say(text)

    def advanced(self, advance: Advance) -> None:
        self._tally.advanced(advance)
        if time.monotonic() - self._last >= LOG_SECONDS:
            self._last = time.monotonic()
            self._say(_standing(self._tally))

    def committed(self, record: ShardRecord) -> None:
        self._tally.committed(record)

    def retried(self, shard: str, error: str) -> None:
        self._tally.retried()
        self._say(f"trying again: {error}")

    def gave_up(self, shard: str, error: str) -> None:
        self._tally.gave_up(shard)
        self._say(self._failures.told(shard, error))

    def warned(self, text: str) -> None:
        self._say(f"warning: {text}")

    def stopping(self) -> None:
        self._say(STOPPING)

    def finished(self, summary: dict[str, Any]) -> None:
        self._say(f"complete after {clock_text(self._tally.seconds)}: {self._tally.counts_text}")

    def stopped(self, error: BaseException) -> None:
        if left := self._failures.left(error):
            self._say(left)
        self._tally.drop()
        self._say(f"stopped after {clock_text(self._tally.seconds)}; kept: {self._tally.counts_text}")


def _standing(tally: Tally) -> str:
    """All in one line."""
    share = "" if tally.share is None else f"{100 * tally.share:.0f} % done"
    parts = (share, tally.left_text, _workers(tally.workers), _speed(tally), tally.counts_text)
    return "  ".join(part for part in parts if part)


def _speed(tally: Tally) -> str:
    return f"{tally.speed_text}  {100 * tally.forward_share:.0f} % of the bare forward"


def _already(run: str, rows: int) -> str:
    return (
        f"already complete: {rows:,} rows in each name of {run}, nothing was done; harvest status {shlex.quote(run)} "
        "says more, --set run.path=PATH makes another run"
    )


def _ray_starts(address: str | None) -> str:
    return "starting Ray on this machine" if address is None else f"asking for Ray at {address}"


def _workers_start(workers: int) -> str:
    return f"starting {_workers(workers)}: each is a process that makes the plan again and loads the model"


def _loaded(seconds: float, took: float) -> str:
    return f"model loaded in {took:.1f} s, {seconds:.1f} s after the command began"


def _first_forward(seconds: float) -> str:
    return f"first forward {seconds:.1f} s after the command began"


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count != 1 else ''}"


def _shards(count: int) -> str:
    return f"{count:,} shard{'s' if count != 1 else ''}"


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
