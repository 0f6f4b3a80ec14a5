"""Which messages the tests have made, and which they have not: noted while tests run, then compared with the source.

    HARVEST_RAISED=/tmp/raised .venv/bin/python -m pytest -n 2
    .venv/bin/python tests/raised.py /tmp/raised

Any number of runs and workers may note into one folder; what has changed in the source since counts as not made. Only
what the tests' own processes do is noted: of commands and workers that a test starts as processes nothing is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from messages import PACKAGE, REASONS, Message, every_message

SKIPPED = (__file__, str(PACKAGE / "errors.py"))
"""Frames between an error and who makes it."""


def note(folder: Path) -> None:
    """From here on every place that makes an error of ours is noted in the folder, once a process."""
    from harvest.errors import HarvestError
    from harvest.source.textfiles import RowError
    from harvest.text.reasons import UnusableError

    folder.mkdir(parents=True, exist_ok=True)
    record, seen = folder / f"{os.getpid()}.txt", set[tuple[str, int]]()

    def watched(init: Callable[..., None]) -> Callable[..., None]:
        def made(error: BaseException, *args: Any, **more: Any) -> None:
            init(error, *args, **more)
            for place in {*_makers(sys._getframe(1)), *_validators(sys.exc_info()[1])} - seen:
                seen.add(place)
                with record.open("a", encoding="utf-8") as file:
                    file.write(f"{place[0]}:{place[1]}\n")

        return made

    for kind, init in ((HarvestError, Exception.__init__), (RowError, Exception.__init__)):
        kind.__init__ = watched(init)  # type: ignore[misc]
    UnusableError.__init__ = watched(UnusableError.__init__)  # type: ignore[method-assign]


def _makers(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    """Who makes the error, and who has asked for it: some are made in a function of their own."""
    while frame is not None and frame.f_code.co_filename in SKIPPED:
        frame = frame.f_back
    for _ in range(2):
        if frame is not None:
            yield frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back


def _validators(handled: BaseException | None) -> Iterator[tuple[str, int]]:
    """Where the ValueErrors were raised that pydantic has made its own error of, which is being turned into a line."""
    for told in handled.errors() if type(handled).__name__ == "ValidationError" else ():  # type: ignore[union-attr]
        trace: TracebackType | None = getattr(told.get("ctx", {}).get("error"), "__traceback__", None)
        while trace is not None:
            yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
            trace = trace.tb_next


def never_made(folder: Path) -> list[Message]:
    """Messages that no test has made, of all that there are."""
    made: dict[str, set[int]] = {}
    for record in folder.glob("*.txt"):
        for line in record.read_text(encoding="utf-8").splitlines():
            file, _, number = line.rpartition(":")
            if Path(file).is_relative_to(PACKAGE):
                made.setdefault(Path(file).relative_to(PACKAGE).as_posix(), set()).add(int(number))
    return [
        message
        for message in every_message()
        if message.file != REASONS  # words, which the others say
        and made.get(message.file, set()).isdisjoint(range(message.first, message.last + 1))
    ]


if (noted := os.environ.get("HARVEST_RAISED")) and __name__ != "__main__":
    note(Path(noted))

if __name__ == "__main__":
    left = never_made(Path(sys.argv[1]))
    for message in left:
        print(f"{message.file}:{message.first}: {message.error}: {message.text}")
    print(f"{len(left)} of {sum(message.file != REASONS for message in every_message())} messages are made by no test")
