"""Threads beside another, all bounded: ahead of the consumer, behind the producer, and waited for only so long."""

from __future__ import annotations

import contextlib
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


class Ahead(Generic[T]):
    """Iterates in a thread of its own, at most `depth` items ahead of whoever takes them.

    An error of the iteration is raised where the items are taken. Leaving the context stops the thread after the
    item that it is on. Whoever waits for the next item can be woken: it is then given None.
    """

    def __init__(self, items: Iterable[T], *, depth: int, name: str) -> None:
        self._items = items
        self._queue: queue.Queue[T | _End | None] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def __enter__(self) -> Ahead[T]:
        self._thread.start()
        return self

    def wake(self) -> None:
        """Gives None to whoever waits; where an item is there already, nobody waits long."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        while self._thread.is_alive():
            try:  # makes room for a producer that waits to put its item
                self._queue.get(timeout=0.05)
            except queue.Empty:
                self._thread.join(timeout=0.05)

    def __iter__(self) -> Iterator[T | None]:
        while True:
            item = self._queue.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item

    def _work(self) -> None:
        end = _End(None)
        try:
            for item in self._items:
                self._queue.put(item)
                if self._stop.is_set():
                    return
        except BaseException as error:  # carried to the consumer, which raises it
            end = _End(error)
        self._queue.put(end)


class Behind:
    """Calls functions one after the other in a thread of its own; `submit` waits while `depth` of them are pending."""

    def __init__(self, *, depth: int, name: str) -> None:
        self._room = threading.BoundedSemaphore(depth)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def __enter__(self) -> Behind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Queues a call. Its error stays in the future."""
        self._room.acquire()
        future = self._pool.submit(function, *args)
        future.add_done_callback(lambda _: self._room.release())
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
