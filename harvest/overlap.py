"""Threads beside another, all bounded: ahead of the consumer, behind the producer, and waited for only so long."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class _End:
    """Marks the end of an iteration, with the error that ended it, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def _room(depth: int) -> queue.SimpleQueue[None]:
    """A semaphore that an interrupt cannot tear: in C, a place is taken or it is not.

    In those of `threading` and in `queue.Queue` an interrupt of the main thread may fall between what changed and who
    is told of it; the other thread then waits for ever, and whoever waits for that thread, too.
    """
    room: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(depth):
        room.put(None)
    return room


class Ahead(Generic[T]):
    """Iterates in a thread of its own, at most `depth` items ahead of whoever takes them.

    An error of the iteration is raised where the items are taken. Leaving the context stops the thread after the
    item that it is on. Whoever waits for the next item can be woken: it is then given None.
    """

    def __init__(self, items: Iterable[T], *, depth: int, name: str) -> None:
        self._items = items
        self._queue: queue.SimpleQueue[T | _End | None] = queue.SimpleQueue()
        self._room = _room(depth)
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def __enter__(self) -> Ahead[T]:
        self._thread.start()
        return self

    def wake(self) -> None:
        """Gives None to whoever waits, or will."""
        self._queue.put(None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        self._room.put(None)  # to a thread that waits to put its item
        self._thread.join()

    def __iter__(self) -> Iterator[T | None]:
        while True:
            item = self._queue.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            if item is not None:
                self._room.put(None)
            yield item

    def _work(self) -> None:
        end = _End(None)
        try:
            for item in self._items:
                self._room.get()
                if self._stopped:
                    return
                self._queue.put(item)
        except BaseException as error:  # carried to the consumer, which raises it
            end = _End(error)
        self._queue.put(end)


class Later(Generic[T]):
    """What a call will have come to."""

    def __init__(self) -> None:
        self._end: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    @classmethod
    def failed(cls, error: BaseException) -> Later[T]:
        """Of a call that was not made."""
        later = cls()
        later.end(None, error)
        return later

    def end(self, value: T | None, error: BaseException | None = None) -> None:
        """The call has ended so."""
        self._end.put((value, error))

    @property
    def done(self) -> bool:
        """It has ended."""
        return not self._end.empty()

    def error(self) -> BaseException | None:
        """Waits for its end: what it raised, if it did."""
        return self._wait()[1]

    def result(self) -> T:
        """Waits for its end: what it returned. Raises what it raised."""
        value, error = self._wait()
        if error is not None:
            raise error
        return cast("T", value)

    def _wait(self) -> tuple[T | None, BaseException | None]:
        end = self._end.get()
        self._end.put(end)
        return end


class Behind:
    """Calls functions one after the other in a thread of its own; who submits waits while `depth` of them are pending.

    Leaving the context waits for them all, or after an error for the one that is under way: the others are dropped.
    """

    def __init__(self, *, depth: int, name: str) -> None:
        self._room = _room(depth)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._dropping = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def __enter__(self) -> Behind:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dropping = kind is not None
        self._calls.put(None)
        self._thread.join()

    def submit(
        self,
        function: Callable[..., T],
        *args: Any,
        after: Behind | None = None,
        then: Callable[[], None] | None = None,
    ) -> Later[T]:
        """Queues a call; with `after`, behind all that this one has been given before, which then waits for room here.

        `then` is called in the thread once the call has ended. `after` must be left before this one is.
        """
        later: Later[T] = Later()

        def call() -> None:
            try:
                later.end(function(*args))
            except BaseException as error:  # it travels to whoever asks
                later.end(None, error)
            if then is not None:
                then()

        if after is None:
            self._give(call)
        else:
            after._give(lambda: self._give(call))
        return later

    def _give(self, call: Callable[[], None]) -> None:
        self._room.get()
        self._calls.put(call)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._dropping:
                call()
            self._room.put(None)


def within(seconds: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises; TimeoutError after so long, while it ends by itself and unheard."""
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # raised below, unless nobody waits any more
            outcome.set_exception(error)

    threading.Thread(target=work, name="harvest-within", daemon=True).start()
    try:
        return outcome.result(seconds)
    except TimeoutError:
        if outcome.done():
            raise
        raise TimeoutError(f"no answer within {seconds:g} s") from None
