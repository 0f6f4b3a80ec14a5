"""A JSON file that is one array of records: read record by record, never as a whole."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from harvest.source.lines import BOM, parse_object
from harvest.source.places import TORN, Place
from harvest.source.textfiles import Mark, Record, RowError, TextFile, TextReader

_SPACE = b" \t\r\n"
_STRUCTURE = re.compile(rb'["\[\]{},]')
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_SEPARATORS = re.compile(rb"[\s,]*+")
_CHUNK = 1 << 20
HEAD = 64 << 10
"""Bytes within which a file shows what it is."""


def opening(head: bytes) -> int | None:
    """Offset behind the bracket that opens an array; None where the file starts with something else."""
    start = len(BOM) if head.startswith(BOM) else 0
    inside = len(head) - len(head[start:].lstrip(_SPACE))
    return inside + 1 if head[inside : inside + 1] == b"[" else None


class ArrayReader(TextReader):
    """Elements of the array, delimited by brackets, strings and commas alone, so that a broken one is one bad row."""

    def __init__(self, place: Place, mark: Mark, columns: Sequence[str]) -> None:
        super().__init__(place, mark, columns)
        self._buffer, self._start, self._finished = b"", 0, False
        self._consumed = 0
        self._torn: Exception | None = None

    def _fill(self) -> bool:
        """Reads on, twice as far each time, so that a record of any length is looked at a few times only."""
        left = self._buffer[self._start :]
        more = self._read(max(_CHUNK, len(left)))
        self._buffer, self._start = left + more, 0
        return bool(more)

    def _read(self, size: int) -> bytes:
        """Up to `size` bytes; what can be read of a damaged file comes first, then its error."""
        if self._torn is not None:
            raise self._torn
        found: list[bytes] = []
        try:
            while size > 0 and (more := cast(Any, self.stream).read1(size)):
                found.append(more)
                size -= len(more)
        except TORN as error:
            if not found:
                raise
            self._torn = error
        return b"".join(found)

    def fetch(self) -> Record | None:
        """The next element; a file that ends before its array does is one bad row at the end."""
        if self._finished:
            return None
        before = 0
        while True:
            separators = _SEPARATORS.match(self._buffer, self._start)
            end = separators.end() if separators else self._start
            before += self._buffer.count(b"\n", self._start, end)
            self._pass(end)
            if end < len(self._buffer):
                break
            if not self._fill():
                self._finished = True
                return self._bad("the file ends before its array does", before)
        if self._buffer[self._start : self._start + 1] == b"]":
            self._finished = True
            return self._bad("text behind the end of the array", before) if self._rest() else None
        return self._element(before)

    def _pass(self, end: int) -> None:
        self._consumed += end - self._start
        self._start = end

    def _element(self, before: int) -> Record:
        length = self._length()
        line = self.line + before
        if length is None:
            self._finished = True
            return self._bad("not valid JSON: the file ends within this record", before)
        content = self._buffer[self._start : self._start + length]
        self._pass(self._start + length)
        return Record(content, line, self._take_bytes(), line + content.count(b"\n"))

    def _take_bytes(self) -> int:
        """Offset in the file of what is read next."""
        after, self._consumed = self.byte + self._consumed, 0
        return after

    def _bad(self, reason: str, before: int) -> Record:
        return Record(RowError(reason), self.line + before, self._take_bytes(), self.line + before)

    def _rest(self) -> bytes:
        rest = self._buffer[self._start + 1 :].strip(_SPACE)
        while not rest and (more := self._read(_CHUNK)):
            rest = more.strip(_SPACE)
        return rest

    def _length(self) -> int | None:
        """Bytes of the element at `_start`; None where the file ends within it."""
        at, depth = 0, 0
        while True:
            token = _STRUCTURE.search(self._buffer, self._start + at)
            if token is None:
                at = len(self._buffer) - self._start
                if not self._fill():
                    return None
                continue
            sign, at = token.group(), token.start() - self._start
            if sign == b'"':
                string = _STRING.match(self._buffer, self._start + at)
                if string is not None:
                    at = string.end() - self._start
                elif not self._fill():
                    return None
                continue
            if depth == 0 and sign in b",]}":
                return max(at, 1)
            depth += 1 if sign in b"[{" else -1 if sign in b"]}" else 0
            at += 1
            if depth == 0 and sign != b",":
                return at

    def parse(self, content: bytes) -> Mapping[str, Any]:
        """The object."""
        return parse_object(content)


class ArrayFile(TextFile):
    """A `.json` file that starts with a bracket."""

    def origin(self) -> Mark:
        """Behind the bracket."""
        head = self.place.head(HEAD)
        inside = opening(head) or 0
        return Mark(0, inside, 1 + head.count(b"\n", 0, inside))

    def open_at(self, mark: Mark) -> ArrayReader:
        """A reader within the array."""
        return ArrayReader(self.place, mark, self.wanted)
