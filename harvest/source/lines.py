"""JSON lines and plain text: a record is a line, ended by a line feed (with or without carriage return)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harvest.source.textfiles import Mark, Record, RowError, Scan, TextFile, TextReader, starts_of

BOM = b"\xef\xbb\xbf"
_NEWLINE = ord("\n")
_IS_SPACE = np.array([bytes([value]).isspace() for value in range(256)])


def decode(data: bytes) -> str:
    """UTF-8 or RowError that names the byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte 0x{data[error.start]:02x} at byte {error.start} of the line"
        raise RowError(f"not valid UTF-8: {where}; save the file as UTF-8") from None


def parse_object(data: bytes) -> Mapping[str, Any]:
    """A JSON object; NaN and lone surrogates pass, anything that is no object is a RowError."""
    try:
        value = json.loads(decode(data))
    except json.JSONDecodeError as error:
        raise RowError(f"not valid JSON: {error.msg.removesuffix(' at')} at character {error.pos}") from None
    except RecursionError:
        raise RowError("not valid JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise RowError(f"not a JSON object but a {type(value).__name__}")
    return value


class LineReader(TextReader):
    """Lines of text; all of them are rows."""

    skip_blank = False

    def fetch(self) -> Record | None:
        """The next line."""
        byte, line = self.byte, self.line
        while data := self.stream.readline():
            byte += len(data)
            if not (self.skip_blank and data.isspace()):
                return Record(data, line, byte, line + 1)
            line += 1
        return None

    def parse(self, content: bytes) -> Mapping[str, Any]:
        """One column `text`: the line without its end."""
        return {"text": decode(content.removesuffix(b"\n").removesuffix(b"\r"))}


class JsonLineReader(LineReader):
    """JSON lines; blank lines are no rows."""

    skip_blank = True

    def parse(self, content: bytes) -> Mapping[str, Any]:
        """The object on the line."""
        return parse_object(content)


class LineFile(TextFile):
    """A `.txt` or JSON lines file."""

    def origin(self) -> Mark:
        """After a byte order mark."""
        return Mark(0, len(BOM) if self.place.head(len(BOM)) == BOM else 0, 1)

    def open_at(self, mark: Mark) -> LineReader:
        """A reader of the file's format."""
        kind = LineReader if self.format == "txt" else JsonLineReader
        return kind(self.place, mark, self.wanted)

    def columns(self) -> tuple[str, ...]:
        """`text` for text, whatever the records have for JSON lines."""
        return ("text",) if self.format == "txt" else super().columns()

    def scan(self, piece: bytes, last: bool) -> Scan:
        """Lines by their line feeds; blank ones are told by looking at those that start with white space."""
        data = np.frombuffer(piece, dtype=np.uint8)
        ends = np.flatnonzero(data == _NEWLINE) + 1
        if last and len(data) and (not len(ends) or ends[-1] < len(data)):
            ends = np.append(ends, len(data))
        starts = starts_of(ends)
        taken = int(ends[-1]) if len(ends) else 0
        lines: NDArray[np.int64] = np.arange(len(ends))
        if self.format != "txt":
            suspects = np.flatnonzero(_IS_SPACE[data[starts]])
            blank = [at for at in suspects.tolist() if piece[starts[at] : ends[at]].isspace()]
            starts, lines = np.delete(starts, blank), np.delete(lines, blank)
        return Scan(starts, lines, taken, len(ends))
