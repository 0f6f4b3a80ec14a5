"""A store that fails on cue: drops, cuts or refuses what it is given, and counts what it was asked."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harvest.store.files import Bytes, Files, Sink


@dataclass
class Faults:
    """What goes wrong; every field at its default is a healthy store."""

    drop: Callable[[str], bool] = lambda path: False
    """Objects that are taken and forgotten."""
    cut: Callable[[str], int | None] = lambda path: None
    """Objects of which only the first so many bytes are kept, with success reported."""
    fail: Callable[[str], bool] = lambda path: False
    """Objects whose second write raises OSError EIO."""
    full_after: int | None = None
    """Bytes after which the disk is full, over all objects."""
    calls: Counter[str] = field(default_factory=Counter)
    """Operation -> how often it was asked for."""


class FaultyFiles:
    """A `Files` around another one."""

    def __init__(self, inner: Files, faults: Faults) -> None:
        self.inner, self.faults = inner, faults
        self.url, self.local, self.exclusive = inner.url, inner.local, inner.exclusive
        self.taken = 0

    def charge(self, size: int) -> None:
        """Raises ENOSPC once more was taken than the disk holds."""
        self.taken += size
        if self.faults.full_after is not None and self.taken > self.faults.full_after:
            raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        """Everything that is not made to fail goes to the inner store, counted."""
        found = getattr(self.inner, name)
        if callable(found):
            self.faults.calls[name] += 1
        return found

    def create(self, path: str, data: bytes) -> bool:
        self.faults.calls["create"] += 1
        self.charge(len(data))
        return True if self.faults.drop(path) else self.inner.create(path, data)

    def replace(self, path: str, data: bytes) -> None:
        self.faults.calls["replace"] += 1
        self.charge(len(data))
        if not self.faults.drop(path):
            self.inner.replace(path, data)

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        self.faults.calls["list"] += 1
        return self.inner.list(prefix)

    def open_write(self, path: str) -> FaultySink:
        self.faults.calls["open_write"] += 1
        return FaultySink(self, path)


class FaultySink:
    """One object of a faulty store."""

    def __init__(self, files: FaultyFiles, path: str) -> None:
        self.files, self.path = files, path
        self.left = files.faults.cut(path)
        self.writes = 0
        self.inner: Sink | None = None if files.faults.drop(path) else files.inner.open_write(path)

    def write(self, data: Bytes | np.ndarray) -> None:
        view = memoryview(data).cast("B")
        self.files.charge(len(view))
        self.writes += 1
        if self.writes == 2 and self.files.faults.fail(self.path):
            raise OSError(errno.EIO, "Input/output error")
        if self.left is not None:
            view = view[: self.left]
            self.left -= len(view)
        if self.inner is not None:
            self.inner.write(view)

    def close(self) -> None:
        if self.inner is not None:
            self.inner.close()

    def abort(self) -> None:
        if self.inner is not None:
            self.inner.abort()
