"""One pass over a slice of a file: the kept rows in order, a hash of what was read, and where to go on.

A format provides a `DataFile`, which opens a `Reader` at any row; everything else is the same for all formats.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from harvest.records import SourceFile, SourceRow

Keep = Callable[[int, int], NDArray[np.bool_]]
"""(start, stop) -> bool [stop - start]: which rows of a file are wanted."""
_BLOCK = 4096


class Reader(Protocol):
    """A position in one file that only moves forward."""

    row: int
    """The row that is read next."""

    def read(self, stop: int, keep: Keep) -> Iterator[SourceRow]:
        """The kept rows from `row` up to `stop` or the end of the file; rows that are not kept are not parsed."""
        ...

    def at_end(self) -> bool:
        """No further row is known to exist; may be False at the very end where only reading on would tell."""
        ...

    def cursor(self) -> Mapping[str, Any] | None:
        """Where another reader can go on (JSON); None for files that are sought without."""
        ...

    def close(self) -> None:
        """Frees the file."""
        ...


class DataFile(Protocol):
    """One file (or object) of the dataset."""

    name: str
    path: str
    format: str

    @property
    def continues(self) -> bool:
        """Going on with a reader costs less than opening one at its row."""
        ...

    def count(self) -> int | None:
        """Rows in the file; None where only reading to the end can tell."""
        ...

    def fingerprint(self) -> str:
        """Changes when the content does."""
        ...

    def stamp(self) -> str:
        """Changes with every write to the file, as far as can be told at little cost; FileNotFoundError without it."""
        ...

    def columns(self) -> tuple[str, ...]:
        """Names of the columns, nested ones dotted; empty where the file has no readable row to tell."""
        ...

    def reader(self, start: int, cursor: Mapping[str, Any] | None) -> Reader:
        """A reader at that row, or at the end of the file where it has fewer rows."""
        ...


class Rows(Protocol):
    """One pass over a slice."""

    ended: bool
    """Valid once exhausted: the file is known to end within the slice or exactly with it."""
    cursor: Mapping[str, Any] | None
    """Valid once exhausted: JSON for the next slice's `rows()`; None where it seeks by itself."""

    @property
    def digest(self) -> str:
        """Hex hash over row number and values (or error) of the rows yielded so far, however they were reached."""
        ...

    def __iter__(self) -> Iterator[SourceRow]:
        """The rows that `data.sample` keeps, in row order; MismatchError where the file has changed meanwhile."""
        ...


class Source(Protocol):
    """The dataset: numbered files and their rows."""

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """Sorted and numbered; the first use counts the rows of local files (one scan) and reads footers."""
        ...

    def rows(self, file: int, start: int, stop: int, cursor: Mapping[str, Any] | None = None) -> Rows:
        """The kept rows of the slice; `cursor` is what an earlier slice of the file ended with."""
        ...

    def mark(self, file: int, row: int) -> Mapping[str, Any] | None:
        """A cursor close before a row, for a reader elsewhere; None where a reader needs none, or there is none."""
        ...

    def kept(self, file: int, start: int, stop: int) -> int:
        """How many row numbers of the range the sample keeps; nothing is read."""
        ...

    def columns(self) -> tuple[str, ...]:
        """Names of the columns of the first file that has any, nested ones dotted."""
        ...


def one_line(error: object) -> str:
    """The text of an error on one line."""
    return " ".join(str(error).split())


def wanted_rows(keep: Keep, start: int, stop: int) -> Iterator[bool]:
    """`keep`, row by row, hashed in blocks; `stop` may lie far beyond the end of the file."""
    for at in range(start, stop, _BLOCK):
        yield from keep(at, min(at + _BLOCK, stop)).tolist()


class Slice:
    """The rows of a slice; `borrow` gives the reader at its start, `give_back` takes it at its end.

    `check` raises where the file is no longer the one that was opened; asked before the first row and after the last.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        keep: Keep,
        *,
        borrow: Callable[[], Reader],
        give_back: Callable[[Reader], None],
        check: Callable[[], None],
    ) -> None:
        self.ended = False
        self.cursor: Mapping[str, Any] | None = None
        self._start, self._stop, self._keep = start, stop, keep
        self._borrow, self._give_back, self._check = borrow, give_back, check
        self._hash = hashlib.blake2b(digest_size=16)

    def __iter__(self) -> Iterator[SourceRow]:
        self._hash = hashlib.blake2b(digest_size=16)
        self._check()
        reader = self._borrow()
        try:
            for row in reader.read(self._stop, self._keep):
                self._hash.update(_row_bytes(row))
                yield row
            self.ended, self.cursor = reader.at_end(), reader.cursor()
            self._check()
        except BaseException:  # also GeneratorExit: a pass that was not finished leaves no reader behind
            reader.close()
            raise
        self._give_back(reader)

    @property
    def digest(self) -> str:
        """Hex hash over the rows yielded so far."""
        return self._hash.hexdigest()


def _row_bytes(row: SourceRow) -> bytes:
    parts = [struct.pack("<q", row.row)]
    _encode(row.values if row.error is None else row.error, parts)
    return b"".join(parts)


def _encode(value: Any, parts: list[bytes]) -> None:
    """A value as bytes with its type and length, so that different values never look the same."""
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        data = value
    elif isinstance(value, Mapping):
        parts.append(b"map %d;" % len(value))
        for key, inner in value.items():
            _encode(key, parts)
            _encode(inner, parts)
        return
    elif isinstance(value, Sequence):
        parts.append(b"list %d;" % len(value))
        for inner in value:
            _encode(inner, parts)
        return
    elif hasattr(value, "tolist"):  # numpy and torch values out of objects of the caller's
        _encode(value.tolist(), parts)
        return
    else:
        data = repr(value).encode("utf-8", "surrogatepass")
    parts.append(b"%s %d;" % (type(value).__name__.encode(), len(data)))
    parts.append(data)
