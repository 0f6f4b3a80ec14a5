"""Threads beside another, all bounded: ahead of the consumer, behind the producer, and waited for only so long."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, TypeVar

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


class Behind:
    """Calls functions one after the other in a thread of its own; `submit` waits while `depth` of them are pending."""

    def __init__(self, *, depth: int, name: str) -> None:
        self._room = _room(depth)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def __enter__(self) -> Behind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Queues a call. Its error stays in the future."""
        self._room.get()
        future = self._pool.submit(function, *args)
        future.add_done_callback(lambda _: self._room.put(None))
        return future

    def submit_after(self, first: Behind | None, function: Callable[..., T], *args: Any) -> Future[T]:
        """The same, once `first` has done all that it was given before; at once without it.

        `first` waits where there is no room here, and ends before this one does.
        """
        if first is None:
            return self.submit(function, *args)
        ended: Future[T] = Future()
        first.submit(lambda: self.submit(function, *args).add_done_callback(lambda done: _pass_on(done, ended)))
        return ended


def _pass_on(done: Future[T], to: Future[T]) -> None:
    """How a call ended; one that was cancelled never does, for then nobody waits any more."""
    if done.cancelled():
        return
    error = done.exception()
    if error is None:
        to.set_result(done.result())
    else:
        to.set_exception(error)


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
