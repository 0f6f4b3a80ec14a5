"""One small view of a folder, local or remote: objects are created, replaced or swapped whole, or not at all.

Paths are POSIX and relative to the folder's root. Nothing outside the root is ever read, written or deleted.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from harvest.errors import WorkError

Bytes = bytes | memoryview


class Sink(Protocol):
    """One object being written from front to back."""

    def write(self, data: Bytes | np.ndarray) -> None:
        """Appends the bytes of `data` (C-contiguous); does not keep a reference to them."""

    def close(self) -> None:
        """Makes the object durable; only after this does it count as written."""

    def abort(self) -> None:
        """Gives up: nothing of the object remains, as far as the store allows. Harmless after close."""


class Files(Protocol):
    """A run's folder. A missing file is FileNotFoundError everywhere; a full disk is OSError ENOSPC."""

    url: str
    """What messages and `open_files` call the root."""
    local: bool
    """The root is a folder of this machine's file system."""
    exclusive: bool
    """`create` and `swap` hold against other processes and machines; where not, one worker at most."""

    def read(self, path: str) -> bytes: ...

    def read_range(self, path: str, start: int, length: int) -> bytes:
        """`length` bytes from `start`; fewer where the object ends before."""

    def map(self, path: str) -> np.ndarray | None:
        """uint8 [size], mapped read-only; None where the store cannot map."""

    def exists(self, path: str) -> bool: ...

    def size(self, path: str) -> int: ...

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """(path, bytes) of every file below the folder `prefix`, sorted by path; links are listed, never followed."""

    def create(self, path: str, data: bytes) -> bool:
        """Put if absent, atomic and durable; False where the path is taken, which then stays as it was."""

    def replace(self, path: str, data: bytes) -> None:
        """Rewrites the whole object: readers see the old bytes or the new ones, also after a power cut."""

    def swap(self, path: str, old: bytes, new: bytes) -> bool:
        """Replaces the object if it holds exactly `old`; False where it holds something else or is missing."""

    def open_write(self, path: str) -> Sink:
        """A new object, streamed. It may be seen half-written: only what a record vouches for counts.

        Raises FileExistsError where the path is taken (local stores).
        """

    def sync(self, prefix: str) -> None:
        """Makes the names of the files below the folder `prefix` as durable as their bytes."""

    def delete(self, path: str) -> None:
        """Removes one file; a missing one is no error."""

    def delete_tree(self, prefix: str, only: Callable[[str], bool] | None = None) -> None:
        """Removes the files below the folder `prefix` (those that `only` names) and the folders left empty."""

    def free_bytes(self) -> int | None:
        """Free space for this user, in bytes; None where the store has no such limit."""


def safe_path(path: str) -> str:
    """`path` as it came, when it cannot leave the root. Raises ValueError otherwise: a fault of ours."""
    parts = path.split("/")
    if not path or "\\" in path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{path!r} is not a path inside a run folder")
    return path


@contextlib.contextmanager
def naming_full_disk(where: str, needed: int) -> Iterator[None]:
    """Turns "no space left" and "quota exceeded" into a WorkError that names the path and the bytes needed."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise WorkError(f"disk full: {where}: {needed} more bytes are needed ({error.strerror})") from error
        raise
