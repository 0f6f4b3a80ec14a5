"""Parquet and Arrow: rows by position, in small batches of the wanted columns; footers give the counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harvest.errors import WorkError
from harvest.records import SourceRow
from harvest.source.columns import project, require_columns, top_level
from harvest.source.places import Place
from harvest.source.rows import Keep, one_line

_PIECE = 1024
_BATCH_BYTES = 16 << 20
_BUFFER = 1 << 20
_UNREADABLE = (ValueError, NotImplementedError, OverflowError)
"""What a value that Python cannot hold raises: bytes that are no text, a date beyond the year 9999."""


class BatchReader:
    """Rows out of consecutive record batches, the first of which holds `start` or lies before it."""

    def __init__(
        self, name: str, columns: Sequence[str], batches: Iterator[tuple[int, Any]], start: int, rows: int | None
    ) -> None:
        self.row = start
        self._name, self._columns, self._batches, self._rows = name, columns, batches, rows
        self._first, self._batch = start, None
        self._over = False

    def _advance(self) -> bool:
        """Makes the batch that holds `row` the current one; False at the end of the file."""
        while self._batch is None or self.row >= self._first + self._batch.num_rows:
            following = None if self._over else self._next_batch()
            if following is None:
                self._over, self._batch = True, None
                return False
            self._first, self._batch = following
        return True

    def _next_batch(self) -> tuple[int, Any] | None:
        try:
            return next(self._batches, None)
        except (pa.ArrowException, OSError) as error:
            raise WorkError(f"{self._name}: cannot be read from row {self.row} on: {one_line(error)}") from error

    def read(self, stop: int, keep: Keep) -> Iterator[SourceRow]:
        """The kept rows up to `stop` or the end; only those become Python values, one at a time."""
        while self.row < stop and self._advance():
            assert self._batch is not None
            at, first = self.row - self._first, self.row
            count = min(stop - first, self._batch.num_rows - at, _PIECE)
            batch = self._batch
            self.row += count
            for place in np.flatnonzero(keep(first, first + count)).tolist():
                yield self._source_row(batch, at + place, first + place)

    def _source_row(self, batch: Any, at: int, row: int) -> SourceRow:
        try:
            record = {name: batch.column(i)[at].as_py() for i, name in enumerate(batch.schema.names)}
        except _UNREADABLE as error:
            return SourceRow(row=row, values={}, error=f"{self._name} row {row}: {one_line(error)}")
        return SourceRow(row=row, values=project(record, self._columns, self._name))

    def at_end(self) -> bool:
        """By the row count; where that is unknown, by having met the end."""
        return self.row >= self._rows if self._rows is not None else self._over

    def cursor(self) -> Mapping[str, Any] | None:
        """None: reached by position."""
        return None

    def close(self) -> None:
        """Lets go of the batches."""
        self._batch, self._over = None, True


class TableFile:
    """What Parquet and Arrow files have in common: nothing of them stays in memory between two readers."""

    continues = True

    def __init__(self, place: Place, columns: Sequence[str]) -> None:
        self.place, self.wanted = place, tuple(columns)
        self.name, self.path, self.format = place.name, place.path, place.format

    def fingerprint(self) -> str:
        """As its place says."""
        return self.place.fingerprint()

    def stamp(self) -> str:
        """As its place says."""
        return self.place.stamp()

    def projection(self, schema: Any) -> list[str]:
        """The top-level columns to read; raises RequestError where a wanted column is in none of them."""
        require_columns(self.wanted, list(_field_names(schema)), self.name)
        for column in (wanted := top_level(self.wanted, schema.names)):
            if wanted.count(column) > 1:
                raise self.place.refuse(f"the schema names the column {column!r} more than once")
        # without any column a batch would not say how many rows it has
        return wanted or schema.names[:1]


def _field_names(fields: Any, prefix: str = "") -> Iterator[str]:
    """Names in a schema, fields of structs dotted."""
    for field in fields:
        yield prefix + field.name
        if pa.types.is_struct(field.type):
            inner = [field.type.field(i) for i in range(field.type.num_fields)]
            yield from _field_names(inner, f"{prefix}{field.name}.")


class ParquetFile(TableFile):
    """Row groups are sought by their counts and read in batches, however large they are."""

    def _open(self) -> Any:
        try:
            source = self.path if self.place.local else self.place.open_raw()
            return pq.ParquetFile(source, buffer_size=_BUFFER, pre_buffer=False)
        except pa.ArrowInvalid as error:
            raise self.place.refuse(f"not a readable Parquet file: {one_line(error)}") from None

    def columns(self) -> tuple[str, ...]:
        """From the footer."""
        with self._open() as file:
            return tuple(_field_names(file.schema_arrow))

    def count(self) -> int:
        """From the footer; the wanted columns are checked by the way."""
        with self._open() as file:
            self.projection(file.schema_arrow)
            return int(file.metadata.num_rows)

    def reader(self, start: int, cursor: Mapping[str, Any] | None) -> BatchReader:
        """From the row group that holds `start`."""
        file = self._open()
        batches = _group_batches(file, start, self.projection(file.schema_arrow))
        return BatchReader(self.name, self.wanted, batches, start, int(file.metadata.num_rows))


def _group_batches(file: Any, start: int, columns: list[str]) -> Iterator[tuple[int, Any]]:
    """(first row, batch) from the row group that holds `start` on."""
    row = 0
    with file:
        for index in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(index)
            if row + group.num_rows <= start:
                row += group.num_rows
                continue
            bytes_per_row = max(1, group.total_byte_size / max(1, group.num_rows))
            batch_rows = int(min(max(_BATCH_BYTES / bytes_per_row, 1), 4096))
            for batch in file.iter_batches(batch_rows, [index], columns, use_threads=False):
                yield row, batch
                row += batch.num_rows


class ArrowFile(TableFile):
    """IPC files and streams; local ones are memory-mapped, so that batches cost nothing until their rows are read."""

    def _open(self) -> tuple[Any, Iterator[Any]]:
        """The schema and the record batches."""
        source = pa.memory_map(self.path) if self.place.local else self.place.open_raw()
        try:
            if source.read(6) == b"ARROW1":
                source.seek(0)
                file = pa.ipc.open_file(source)
                return file.schema, (file.get_batch(i) for i in range(file.num_record_batches))
            source.seek(0)
            stream = pa.ipc.open_stream(source)
            return stream.schema, iter(stream)
        except pa.ArrowInvalid as error:
            raise self.place.refuse(f"not a readable Arrow file: {one_line(error)}") from None

    def columns(self) -> tuple[str, ...]:
        """From the schema."""
        return tuple(_field_names(self._open()[0]))

    def count(self) -> int | None:
        """By the headers of the batches; None for a remote file, which would have to be read for it."""
        schema, batches = self._open()
        self.projection(schema)
        if not self.place.local:
            return None
        try:
            return sum(int(batch.num_rows) for batch in batches)
        except (pa.ArrowException, OSError) as error:
            raise self.place.refuse(f"not a readable Arrow file: {one_line(error)}") from None

    def reader(self, start: int, cursor: Mapping[str, Any] | None) -> BatchReader:
        """From the batch that holds `start`, passing over those before it."""
        schema, batches = self._open()
        placed = _placed(batches, start, self.projection(schema))
        return BatchReader(self.name, self.wanted, placed, start, self.count())


def _placed(batches: Iterator[Any], start: int, columns: list[str]) -> Iterator[tuple[int, Any]]:
    """(first row, batch) from the batch that holds `start` on."""
    row = 0
    for batch in batches:
        if row + batch.num_rows > start:
            yield row, batch.select(columns)
        row += batch.num_rows
