"""Parquet and Arrow: rows by position, in small batches of the wanted columns; footers give the counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from harvest.errors import WorkError
from harvest.records import SourceRow
from harvest.source.columns import project, require_columns, top_level
from harvest.source.places import Place
from harvest.source.rows import Keep

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
            raise WorkError(f"{self._name}: cannot be read from row {self.row} on: {error}") from error

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
            return SourceRow(row=row, values={}, error=f"{self._name} row {row}: {error}")
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
    """What Parquet and Arrow files have in common."""

    continues = True

    def __init__(self, place: Place, columns: Sequence[str]) -> None:
        self.place, self.wanted = place, tuple(columns)
        self.name, self.path, self.format = place.name, place.path, place.format

    @property
    def schema(self) -> Any:
        """The file's Arrow schema."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """As its place says."""
        return self.place.fingerprint()

    def columns(self) -> tuple[str, ...]:
        """Names in the schema, fields of structs dotted."""
        return tuple(_field_names(self.schema))

    @cached_property
    def projection(self) -> list[str]:
        """The top-level columns to read; raises RequestError where a wanted column is in none of them."""
        require_columns(self.wanted, self.columns(), self.name)
        # without any column a batch would not say how many rows it has
        return top_level(self.wanted, self.schema.names) or self.schema.names[:1]


def _field_names(fields: Any, prefix: str = "") -> Iterator[str]:
    for field in fields:
        yield prefix + field.name
        if pa.types.is_struct(field.type):
            inner = [field.type.field(i) for i in range(field.type.num_fields)]
            yield from _field_names(inner, f"{prefix}{field.name}.")


class ParquetFile(TableFile):
    """Row groups are sought by their counts and read in batches, however large they are."""

    def _open(self, metadata: Any = None) -> Any:
        try:
            source = self.path if self.place.local else self.place.open_raw()
            return pq.ParquetFile(source, metadata=metadata, buffer_size=_BUFFER, pre_buffer=False)
        except pa.ArrowInvalid as error:
            raise self.place.refuse(f"not a readable Parquet file: {error}") from None

    @cached_property
    def _footer(self) -> tuple[Any, Any]:
        with self._open() as file:
            return file.metadata, file.schema_arrow

    @property
    def schema(self) -> Any:
        """From the footer."""
        return self._footer[1]

    def count(self) -> int:
        """From the footer; the wanted columns are checked by the way."""
        _ = self.projection
        return int(self._footer[0].num_rows)

    @cached_property
    def _group_starts(self) -> NDArray[np.int64]:
        metadata = self._footer[0]
        return np.cumsum([0] + [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)])

    def reader(self, start: int, cursor: Mapping[str, Any] | None) -> BatchReader:
        """From the row group that holds `start`."""
        return BatchReader(self.name, self.wanted, self._batches(start, self.projection), start, self.count())

    def _batches(self, start: int, columns: list[str]) -> Iterator[tuple[int, Any]]:
        metadata, starts = self._footer[0], self._group_starts
        with self._open(metadata) as file:
            first_group = max(0, int(np.searchsorted(starts, start, side="right")) - 1)
            for group in range(first_group, metadata.num_row_groups):
                row = int(starts[group])
                for batch in file.iter_batches(self._batch_rows(group), [group], columns, use_threads=False):
                    yield row, batch
                    row += batch.num_rows

    def _batch_rows(self, group: int) -> int:
        """Rows that take about 16 MiB in memory, by the group's own figures."""
        metadata = self._footer[0].row_group(group)
        bytes_per_row = metadata.total_byte_size / max(1, metadata.num_rows)
        return int(min(max(_BATCH_BYTES / max(1, bytes_per_row), 1), 4096))


class ArrowFile(TableFile):
    """IPC files and streams; local ones are memory-mapped, so that batches cost nothing until their rows are read."""

    def _open(self) -> tuple[Any, list[Any] | Iterator[Any]]:
        """The schema and the record batches."""
        source = pa.memory_map(self.path) if self.place.local else self.place.open_raw()
        try:
            if source.read(6) == b"ARROW1":
                file = pa.ipc.open_file(source)
                return file.schema, (file.get_batch(i) for i in range(file.num_record_batches))
            source.seek(0)
            stream = pa.ipc.open_stream(source)
            return stream.schema, iter(stream)
        except pa.ArrowInvalid as error:
            raise self.place.refuse(f"not a readable Arrow file: {error}") from None

    @cached_property
    def schema(self) -> Any:
        """Of every batch."""
        return self._open()[0]

    @cached_property
    def _mapped(self) -> tuple[list[Any], NDArray[np.int64]]:
        """A local file's batches (views of the mapped file) and the row at which each starts."""
        try:
            batches = list(self._open()[1])
        except (pa.ArrowInvalid, OSError) as error:
            raise self.place.refuse(f"not a readable Arrow file: {error}") from None
        return batches, np.cumsum([0] + [batch.num_rows for batch in batches])

    def count(self) -> int | None:
        """By the headers of the batches; None for a remote file, which would have to be read for it."""
        _ = self.projection
        return int(self._mapped[1][-1]) if self.place.local else None

    def reader(self, start: int, cursor: Mapping[str, Any] | None) -> BatchReader:
        """From the batch that holds `start`; a remote file is passed over up to there."""
        columns = self.projection
        return BatchReader(self.name, self.wanted, self._batches(start, columns), start, self.count())

    def _batches(self, start: int, columns: list[str]) -> Iterator[tuple[int, Any]]:
        if self.place.local:
            batches, starts = self._mapped
            first = max(0, int(np.searchsorted(starts, start, side="right")) - 1)
            for row, batch in zip(starts[first:].tolist(), batches[first:]):
                yield row, batch.select(columns)
            return
        row = 0
        for batch in self._open()[1]:
            if row + batch.num_rows > start:
                yield row, batch.select(columns)
            row += batch.num_rows
