"""Work that an interrupt must not cut in two: what is written, and what is said of it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """A first interrupt is answered as soon as the block has ended, as it would have been at once; a second one at
    once. Outside the main thread, which alone hears of interrupts, and for what Python does not answer, this does
    nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    answers = {number: answer for number, answer in before.items() if callable(answer)}
    heard: list[tuple[int, FrameType | None]] = []
    impatient = False

    def wait(number: int, frame: FrameType | None) -> None:
        nonlocal impatient
        if not heard:
            heard.append((number, frame))
            return
        heard.clear()
        impatient = True
        put_back()
        answers[signal.Signals(number)](number, frame)

    def put_back() -> None:
        for number, answer in answers.items():
            signal.signal(number, answer)

    for number in answers:
        signal.signal(number, wait)
    try:
        yield
    finally:
        if not impatient:  # else what stands there is the answer to a second one
            put_back()
        for first, frame in heard:
            answers[signal.Signals(first)](first, frame)
