"""Follows a run of another process until it is complete, or nobody is at work on it any more; changes nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from harvest.errors import InterruptError, RequestError, WorkError
from harvest.runtime.progress import Lines
from harvest.runtime.status import Follower
from harvest.runtime.tally import Tally
from harvest.runtime.terminal import Bar, on_screen
from harvest.store.lease import INTERVAL_SECONDS, SILENT_SECONDS, Holder

EVERY_SECONDS = 5.0
"""Between two looks; the coordinator gives a sign of life as often."""
LEAST_SECONDS = 0.1
Seen = Callable[[dict[str, Any], Tally], None]
"""What to do with each look: how the run stands, and what that comes to."""


def watch(path: str, every: float | None, seen: Seen, clock: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """Looks every so many seconds; returns the last look, at a complete run.

    Raises RequestError where there is no run, WorkError where it is not complete and nobody is at work on it, and
    InterruptError when it is told to stop.
    """
    every = EVERY_SECONDS if every is None else every
    if not LEAST_SECONDS <= every < float("inf"):
        raise RequestError(f"--every {every}: allowed are seconds from {LEAST_SECONDS} on")
    try:
        follower, pulse = Follower(path), Pulse(clock)
        while True:
            status = follower.look()
            seen(status, follower.tally)
            if status["state"] == "complete":
                return status
            if (why := pulse.gone(follower.holder)) is not None:
                failed = "".join(f"; {error}" for error in [*status["failed"].values()][:1])
                at = f"{_shards(status['committed'])} committed"
                raise WorkError(f"{path}: nobody is at work on it: {why}; {at}{failed}; harvest run JOB resumes it")
            time.sleep(every)
    except KeyboardInterrupt:
        raise InterruptError(f"{path} is not watched any more; the run goes on") from None


class Pulse:
    """Whether a run's coordinator lives, by the rule by which another one may take the run over."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: tuple[str, float] | None = None
        self._since = clock()

    def gone(self, holder: Holder | None) -> str | None:
        """Why nobody is at work, as far as this look and the earlier ones tell; None where somebody is."""
        if holder is None:
            return "it has no coordinator"
        who = f"pid {holder.pid} on {holder.host}"
        if holder.released:
            return f"{who} has stopped"
        if holder.gone():
            return f"{who} is not running any more"
        heard = holder.life, holder.heartbeat
        if heard != self._heard:
            self._heard, self._since = heard, self._clock()
        silent, age = self._clock() - self._since, time.time() - holder.heartbeat
        # Clocks of two machines may differ: one that is long silent by its own clock is listened to for a while.
        if silent > (2 * INTERVAL_SECONDS if abs(age) > SILENT_SECONDS else SILENT_SECONDS):
            return f"{who} has given no sign of life for {max(silent, age):.0f} s"
        return None


@contextlib.contextmanager
def shown(stream: TextIO) -> Iterator[Seen]:
    """Shows each look to whoever reads the stream: a bar on a terminal, a line elsewhere."""
    if not on_screen(stream):
        lines = Lines(stream)
        yield lambda status, tally: lines.say(f"harvest: {_standing(status, tally)}")
        return
    bar = Bar(stream, Tally())
    complete = False

    def see(status: dict[str, Any], tally: Tally) -> None:
        nonlocal complete
        complete = status["state"] == "complete"
        bar.tally = tally
        bar.say(_under_way(status))
        bar.start()

    try:
        yield see
    finally:
        bar.end(complete=complete)


def _under_way(status: dict[str, Any]) -> str:
    """`running, 3 shards under way`."""
    running, failed = len(status["running"]), len(status["failed"])
    parts = [status["state"]]
    doing = (status["worker"] or {}).get("doing")
    if status["state"] == "running":
        parts.append(doing if doing and not running else f"{_shards(running)} under way")
    if failed:
        parts.append(f"{failed:,} failed")
    return ", ".join(parts)


def _shards(count: int) -> str:
    return f"{count:,} shard{'s' if count != 1 else ''}"


def _standing(status: dict[str, Any], tally: Tally) -> str:
    share = "" if tally.share is None else f"{100 * tally.share:.0f} % done"
    moving = (tally.left_text, tally.speed_text) if status["state"] == "running" else ()
    parts = (_under_way(status), share, *moving, tally.counts_text)
    return "  ".join(part for part in parts if part)
