"""CSV and TSV: every cell is text as it stands (`NA`, `007`, dates), delimited as Python's `csv` module does."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from harvest.source.columns import FILE_COLUMN, require_columns
from harvest.source.lines import BOM, decode
from harvest.source.places import Place, split_suffix
from harvest.source.textfiles import Mark, Record, RowError, Scan, TextFile, TextReader, starts_of

# `csv` has one limit for the whole process, 128 KiB at first; a longer cell would be an error in the middle of a file
csv.field_size_limit(sys.maxsize)

_QUOTE, _LINE_FEED, _RETURN = b'"\n\r'


OTHERS = {";": "';'", "\t": "a tab", "|": "'|'", ",": "','"}
"""What other programs put between cells, and how it is called."""


def delimiter_of(place: Place) -> str:
    """What stands between cells."""
    return "\t" if split_suffix(place.path)[0] == ".tsv" else ","


class _Cells(NamedTuple):
    cells: list[str]
    problem: str | None


class CsvReader(TextReader):
    """Records as Python's `csv` module delimits them; empty lines are none."""

    def __init__(self, place: Place, mark: Mark, columns: Sequence[str], header: Sequence[str]) -> None:
        super().__init__(place, mark, columns)
        self.header = header
        self._at, self._line, self._exhausted = mark.byte, mark.line, False
        self._problem: str | None = None
        self._parser = csv.reader(self._lines(), delimiter=delimiter_of(place))

    def _lines(self) -> Iterator[str]:
        """The lines of the file; `_at` and `_line` follow what the parser has taken."""
        while data := self.stream.readline():
            # a carriage return alone ends a line too
            alone = data.find(b"\r", 0, -2) >= 0 or (data[-2:-1] == b"\r" and data[-1:] != b"\n")
            for piece in data.splitlines(keepends=True) if alone else (data,):
                self._at += len(piece)
                self._line += 1
                try:
                    yield decode(piece)
                except RowError as error:
                    self._problem = str(error)
                    yield piece.decode("utf-8", "surrogateescape")
        self._exhausted = True

    def fetch(self) -> Record | None:
        """The next record; its problem, if any, is told when it is parsed."""
        cells: list[str] = []
        while not cells:
            line, self._problem = self._line, None
            try:
                cells = next(self._parser)
            except StopIteration:
                return None
            except csv.Error as error:
                self._problem = f"not valid CSV: {error}"
                break
        if self._exhausted and cells:  # the parser asks for a line more only within quotes
            self._problem = "not valid CSV: a quoted cell is never closed"
        return Record(_Cells(cells, self._problem), line, self._at, self._line)

    def parse(self, content: _Cells) -> Mapping[str, str]:
        """Column -> cell."""
        if content.problem is not None:
            raise RowError(content.problem)
        if len(content.cells) != len(self.header):
            raise RowError(f"not valid CSV: {len(content.cells)} cells where the header has {len(self.header)}")
        return dict(zip(self.header, content.cells))


class CsvFile(TextFile):
    """A `.csv` or `.tsv` file, whose first line names the columns."""

    @cached_property
    def _header(self) -> tuple[tuple[str, ...], Mark]:
        start = len(BOM) if self.place.head(len(BOM)) == BOM else 0
        reader = CsvReader(self.place, Mark(0, start, 1), (), ())
        try:
            record = reader.fetch()
        finally:
            reader.close()
        if record is None:
            return (), Mark(0, start, 1)
        if record.content.problem is not None:
            raise self.place.refuse(f"line {record.line}, the header: {record.content.problem}")
        self._refuse_other_delimiter(record)
        return tuple(record.content.cells), Mark(0, record.byte_after, record.line_after)

    def _refuse_other_delimiter(self, record: Record) -> None:
        """A header of one cell that has what other programs put between cells in it, and no wanted column."""
        ours = "a tab" if delimiter_of(self.place) == "\t" else "','"
        only = record.content.cells[0] if len(record.content.cells) == 1 else ""
        found = next((told for sign, told in OTHERS.items() if sign in only and told != ours), None)
        if found is not None and any(column != FILE_COLUMN and column != only for column in self.wanted):
            raise self.place.refuse(
                f"line {record.line}, the header: {only[:80]!r} is one cell, and has {found} in it; allowed between "
                f"cells are ',' in .csv and a tab in .tsv: save it with {ours}"
            )

    def origin(self) -> Mark:
        """After the header, which must name the wanted columns."""
        header, mark = self._header
        if header:
            require_columns(self.wanted, header, self.name)
        for column in self.wanted:
            if header.count(column) > 1:
                raise self.place.refuse(f"the header names the column {column!r} more than once")
        return mark

    def columns(self) -> tuple[str, ...]:
        """What the header names."""
        return self._header[0]

    def open_at(self, mark: Mark) -> CsvReader:
        """A reader that knows the header."""
        return CsvReader(self.place, mark, self.wanted, self._header[0])

    def scan(self, piece: bytes, last: bool) -> Scan | None:
        """Records by line ends with an even number of quotes before them.

        That is what the parser finds too if every opening quote starts a cell and every closing one ends one;
        where one does not, None.
        """
        data = np.frombuffer(piece, dtype=np.uint8)
        breaks = data == _LINE_FEED
        returns = np.flatnonzero(data == _RETURN)
        if len(returns):
            following = data[np.minimum(returns + 1, len(data) - 1)]
            breaks[returns[following != _LINE_FEED]] = True
        if len(data) and not last:
            breaks[-1] = False  # what follows it is not known yet
        line_ends = np.flatnonzero(breaks) + 1
        quotes = np.flatnonzero(data == _QUOTE)
        ends = line_ends[np.searchsorted(quotes, line_ends) % 2 == 0]
        if last and len(data) and (not len(ends) or ends[-1] < len(data)):
            ends = np.append(ends, len(data))
        taken = int(ends[-1]) if len(ends) else 0
        if not self._plain_quotes(data, quotes[quotes < taken]):
            return None
        starts = starts_of(ends)
        final, before = data[ends - 1], data[np.maximum(ends - 2, 0)]
        two_bytes = (final == _LINE_FEED) & (before == _RETURN) & (ends - 2 >= starts)
        end_bytes = breaks[ends - 1].astype(np.int64) + two_bytes
        full = ends - starts > end_bytes  # an empty line is no record
        lines = np.searchsorted(line_ends, starts, side="right")
        return Scan(starts[full], lines[full], taken, int(np.searchsorted(line_ends, taken, side="right")))

    def _plain_quotes(self, data: np.ndarray, quotes: np.ndarray) -> bool:
        delimiter = ord(delimiter_of(self.place))
        border = np.zeros(256, dtype=np.bool_)
        border[[_QUOTE, _LINE_FEED, _RETURN, delimiter]] = True
        opening, closing = quotes[0::2], quotes[1::2]
        before = border[data[opening - 1]] | (opening == 0)
        after = border[data[np.minimum(closing + 1, len(data) - 1)]] | (closing == len(data) - 1)
        return bool(before.all() and after.all())
