"""Who hears of what happens in a run, and the lines that are said of it, which nobody need be there to read.

What people read goes to stderr, so that stdout holds results alone.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:  # torch, which whoever tells of a job that is wrong by itself does without
    from harvest.outcome import Progress as Advance
    from harvest.plan import Plan
    from harvest.records import ShardRecord


class Lines:
    """A stream that takes whole lines until nobody reads them any more; the work goes on without."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream

    def say(self, text: str) -> None:
        """One line, at once; control characters of data or of another program's message are spelt out."""
        if self._stream is None:
            return
        try:
            self._stream.write(plain(text) + "\n")  # one piece: an interrupt cannot come between text and end
            self._stream.flush()
        except OSError:  # the reader is gone, or its disk is full
            _forget(self._stream)
            self._stream = None


def plain(text: str) -> str:
    """The text as one line without control characters."""
    line = " ".join(text.split("\n"))
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def _forget(stream: TextIO) -> None:
    """What the stream still holds goes nowhere: Python would try once more at its end, and fail with status 120."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except OSError:
        return


class Observer(Protocol):
    """Hears of everything that happens in a run; the calls come from one thread at a time."""

    def was_complete(self, run: str, rows: int) -> None:
        """The run was complete before, with so many rows in each name: nothing is done."""

    def ray_starts(self, address: str | None) -> None:
        """Ray is about to start on this machine, or to be asked at an address."""

    def started(self, plan: Plan, committed: list[ShardRecord]) -> None:
        """The plan stands and the earlier lives' shards are known; the model is still to be loaded."""

    def workers_start(self, workers: int) -> None:
        """So many processes of a crew are asked for; each makes the plan again, and loads the model."""

    def loading(self) -> None:
        """The model is being loaded: here, or by the first worker."""

    def loaded(self, seconds: float, took: float) -> None:
        """The model is there, `seconds` after the command began; loading it `took` so many of them."""

    def first_forward(self, seconds: float) -> None:
        """A first batch is through the model, `seconds` after the command began."""

    def joined(self, worker: str, where: str, workers: int) -> None:
        """A worker of a crew is ready, on a machine and in a process; `workers` are, with it."""

    def left(self, worker: str, why: str, workers: int) -> None:
        """A worker of a crew is lost, and where and why; `workers` are still ready."""

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

    def stopping(self) -> None:
        """An interrupt was heard; called from a signal's handler, whatever else is being told."""

    def finished(self, summary: dict[str, Any]) -> None:
        """The run is complete."""

    def warned(self, text: str) -> None:
        """Something went wrong that does not end the run."""

    def stopped(self, error: BaseException) -> None:
        """The run ended early."""


class Silent:
    """Hears everything and says nothing."""

    def was_complete(self, run: str, rows: int) -> None: ...
    def ray_starts(self, address: str | None) -> None: ...
    def started(self, plan: Plan, committed: list[ShardRecord]) -> None: ...
    def workers_start(self, workers: int) -> None: ...
    def loading(self) -> None: ...
    def loaded(self, seconds: float, took: float) -> None: ...
    def first_forward(self, seconds: float) -> None: ...
    def joined(self, worker: str, where: str, workers: int) -> None: ...
    def left(self, worker: str, why: str, workers: int) -> None: ...
    def waiting(self, text: str) -> None: ...
    def advanced(self, advance: Advance) -> None: ...
    def committed(self, record: ShardRecord) -> None: ...
    def retried(self, shard: str, error: str) -> None: ...
    def gave_up(self, shard: str, error: str) -> None: ...
    def stopping(self) -> None: ...
    def finished(self, summary: dict[str, Any]) -> None: ...
    def warned(self, text: str) -> None: ...
    def stopped(self, error: BaseException) -> None: ...


class Quiet(Silent):
    """Says only what went wrong without ending the run."""

    def warned(self, text: str) -> None:
        Lines(sys.stderr).say(f"harvest: warning: {text}")
