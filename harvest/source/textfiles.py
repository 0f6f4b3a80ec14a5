"""Text files: every record is read whole and alone, and any row of a local file is reached from a mark close before it.

A bad record is one bad row: the rows around it are read. Formats differ in how a record is found (`TextReader.fetch`,
and `TextFile.scan` where that can be done for many records at once) and in what it says (`TextReader.parse`).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harvest.records import SourceRow
from harvest.source.columns import column_names, missing_columns, project
from harvest.source.places import TORN, Place
from harvest.source.rows import Keep, wanted_rows

_FIRST_SPACING = 256
_MOST_MARKS = 1024
_CHUNK = 8 << 20
_PEEK_ROWS = 64


class Mark(NamedTuple):
    """Where a row of a text file can be reached."""

    row: int
    byte: int
    """Offset in the decompressed file at which only blank lines may come before the row's record."""
    line: int
    """Number of the line at that offset, from 1."""


class Record(NamedTuple):
    """A record as it stands in the file."""

    content: Any
    """What `parse` takes; a RowError where the record could not even be delimited."""
    line: int
    """Line on which it starts, from 1."""
    byte_after: int
    line_after: int


class RowError(ValueError):
    """Why a record is not a row."""


class Scan(NamedTuple):
    """The complete records in a piece of a file that starts where a record may."""

    starts: NDArray[np.int64]
    """Offset of each record."""
    lines: NDArray[np.int64]
    """Line of each record, counted from 0 at the start of the piece."""
    bytes: int
    """Bytes that these records and the blank lines among them take."""
    line_count: int
    """Lines that they take."""


def starts_of(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where records start that follow each other and end there."""
    return np.concatenate([np.zeros(min(1, len(ends)), dtype=np.int64), ends[:-1]])


class TextReader(ABC):
    """Reads records one after the other from a mark on."""

    def __init__(self, place: Place, mark: Mark, columns: Sequence[str]) -> None:
        self.row, self.byte, self.line = mark
        self.place, self.columns = place, columns
        self.stream: BinaryIO = place.open_text(mark.byte)
        self._ahead: Record | None = None
        self._over = False

    @abstractmethod
    def fetch(self) -> Record | None:
        """The next record, read from `stream`, which stands at `byte` on `line`; None at the end."""

    @abstractmethod
    def parse(self, content: Any) -> Mapping[str, Any]:
        """The record's columns; raises ValueError (RowError, or what json and codecs raise)."""

    def _peek(self) -> Record | None:
        if self._ahead is None and not self._over:
            try:
                self._ahead = self.fetch()
            except TORN as error:
                if not self.place.compressed:
                    raise  # a disk or network that fails is no property of the data
                self._ahead = Record(
                    RowError(f"the file is cut off or damaged: {error}"), self.line, self.byte, self.line
                )
                self._over = True
            self._over = self._over or self._ahead is None
        return self._ahead

    def skip_to(self, row: int) -> None:
        """Passes over records without parsing them, up to `row` or the end."""
        while self.row < row and self._take() is not None:
            pass

    def _take(self) -> Record | None:
        record = self._peek()
        if record is not None:
            self._ahead = None
            self.row, self.byte, self.line = self.row + 1, record.byte_after, record.line_after
        return record

    def read(self, stop: int, keep: Keep) -> Iterator[SourceRow]:
        """The kept rows up to `stop` or the end."""
        for wanted in wanted_rows(keep, self.row, stop):
            record = self._take()
            if record is None:
                return
            if wanted:
                yield self._source_row(self.row - 1, record)

    def records(self) -> Iterator[Mapping[str, Any]]:
        """The good records that follow, whole."""
        while (record := self._take()) is not None:
            try:
                yield self._parsed(record)
            except ValueError:
                continue  # reported as rows when they are read

    def _source_row(self, row: int, record: Record) -> SourceRow:
        try:
            values = project(self._parsed(record), self.columns, self.place.name)
        except ValueError as error:
            return SourceRow(row=row, values={}, error=f"{self.place.name} line {record.line}: {error}")
        return SourceRow(row=row, values=values)

    def _parsed(self, record: Record) -> Mapping[str, Any]:
        if isinstance(record.content, RowError):
            raise record.content
        return self.parse(record.content)

    def at_end(self) -> bool:
        """No further record: looks one ahead."""
        return self._peek() is None

    def cursor(self) -> Mapping[str, Any] | None:
        """The mark of the next row; None for files with an index."""
        return None if self.place.seekable else {"row": self.row, "byte": self.byte, "line": self.line}

    def close(self) -> None:
        """Closes the file."""
        self.stream.close()


class TextFile(ABC):
    """A text file; the index of a plain local one grows as far as it is asked for."""

    continues = True

    def __init__(self, place: Place, columns: Sequence[str]) -> None:
        self.place, self.wanted = place, tuple(columns)
        self.name, self.path, self.format = place.name, place.path, place.format
        self._marks: list[Mark] = []
        self._spacing = _FIRST_SPACING
        self._scanned: Mark | None = None
        self._complete = False
        self._scans = True
        self._lock = threading.Lock()

    @abstractmethod
    def origin(self) -> Mark:
        """The first row's mark: after a byte order mark, a header, an opening bracket."""

    @abstractmethod
    def open_at(self, mark: Mark) -> TextReader:
        """A reader that starts at a mark."""

    def scan(self, piece: bytes, last: bool) -> Scan | None:
        """The complete records of a piece, the open one at its end too if it is the `last`; None: read to tell."""
        return None

    @cached_property
    def _origin(self) -> Mark:
        return self.origin()

    def fingerprint(self) -> str:
        """As its place says."""
        return self.place.fingerprint()

    def stamp(self) -> str:
        """As its place says."""
        return self.place.stamp()

    def columns(self) -> tuple[str, ...]:
        """The columns of the first records: of one, if it has all that are wanted, else of up to 64."""
        reader = self.open_at(self._origin)
        names: dict[str, None] = {}
        try:
            for _, record in zip(range(_PEEK_ROWS), reader.records()):
                names.update(dict.fromkeys(column_names(record)))
                if not missing_columns(self.wanted, names):
                    break
        finally:
            reader.close()
        return tuple(names)

    def count(self) -> int | None:
        """Rows, by one scan of a plain local file; None for others."""
        return self._extend(None).row if self.place.seekable else None

    def mark(self, row: int) -> Mapping[str, Any] | None:
        """A cursor close before a row, from the index as far as it has grown; None for files without one."""
        return self._closest(row)._asdict() if self.place.seekable else None

    def _closest(self, row: int) -> Mark:
        at = bisect_right(self._marks, row, key=lambda mark: mark.row) - 1
        return self._marks[at] if at >= 0 else self._origin

    def reader(self, start: int, cursor: Mapping[str, Any] | None) -> TextReader:
        """From the cursor; without one, from the closest mark before `start`, or from the beginning."""
        if cursor is not None and cursor["row"] <= start:
            mark = Mark(**cursor)
        elif self.place.seekable:
            self._extend(start)
            mark = self._closest(start)
        else:
            mark = self._origin
        reader = self.open_at(mark)
        reader.skip_to(start)
        return reader

    def _extend(self, row: int | None) -> Mark:
        """Scans until `row` has a mark before it, or to the end; where the scan stands then."""
        with self._lock:
            position = self._scanned or self._origin
            if not self._complete and (row is None or position.row < row):
                position = self._scan_from(position, row)
                self._scanned = position
            return position

    def _scan_from(self, position: Mark, row: int | None) -> Mark:
        if self._scans:
            with self.place.open_text(position.byte) as file:
                rest = b""
                while row is None or position.row < row:
                    # as much again as is left over, so that a record of any length is looked at twice at most
                    more = file.read(max(_CHUNK, len(rest)))
                    piece = rest + more if rest else more
                    found = self.scan(piece, not more)
                    if found is None:
                        self._scans = False
                        break
                    self._add_marks(position, found)
                    position = Mark(
                        position.row + len(found.starts), position.byte + found.bytes, position.line + found.line_count
                    )
                    if not more:
                        self._complete = True
                        break
                    rest = piece[found.bytes :]
        return position if self._scans else self._walk_from(position, row)

    def _add_marks(self, position: Mark, found: Scan) -> None:
        for at in range(len(found.starts))[-position.row % self._spacing :: self._spacing]:
            self._add_mark(
                Mark(position.row + at, position.byte + int(found.starts[at]), position.line + int(found.lines[at]))
            )

    def _add_mark(self, mark: Mark) -> None:
        """Keeps it if its row is due; a long file has its marks further apart, never more of them."""
        if mark.row % self._spacing or (self._marks and self._marks[-1].row >= mark.row):
            return
        self._marks.append(mark)
        if len(self._marks) >= _MOST_MARKS:
            self._spacing *= 2
            self._marks = [mark for mark in self._marks if mark.row % self._spacing == 0]

    def _walk_from(self, position: Mark, row: int | None) -> Mark:
        """The same by reading record after record: slower, and right for every file."""
        reader = self.open_at(position)
        try:
            while row is None or reader.row < row:
                position = Mark(reader.row, reader.byte, reader.line)
                self._add_mark(position)
                reader.skip_to(position.row + 1)
                if reader.row == position.row:
                    self._complete = True
                    break
            return Mark(reader.row, reader.byte, reader.line)
        finally:
            reader.close()
