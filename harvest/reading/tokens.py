"""The token table over all committed shards, as if it were one; only shards and columns that are asked for are read."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harvest.errors import RequestError
from harvest.records import DOCUMENTS_PER_FILE
from harvest.store import layout
from harvest.store.rawrows import Parts
from harvest.store.tables import RUN, StoredTable


class TokenRows:
    """Row i is the token that row i of every name belongs to."""

    def __init__(self, parts: Parts, schema: pa.Schema, *, several: bool = False) -> None:
        """`schema`: of the run's token tables; of `several` runs every column that one of them has."""
        self._parts, self._several = parts, several
        self.schema = schema.append(RUN) if several else schema

    def _schema(self, columns: Sequence[str]) -> pa.Schema:
        return pa.schema([self.schema.field(column) for column in columns])

    def between(self, columns: Sequence[str], start: int, stop: int) -> pa.Table:
        """Rows [start, stop) of the columns."""
        starts, tables = self._parts.starts, [self._schema(columns).empty_table()]
        for part, first in enumerate(starts[:-1]):
            low, high = max(start, int(first)), min(stop, int(starts[part + 1]))
            if low < high:
                tables.append(self._read(part, columns, low - int(first), high - int(first)))
        return _joined(tables)

    def take(self, columns: Sequence[str], rows: np.ndarray) -> pa.Table:
        """Rows int64 [n] in any order; each shard is read once."""
        order = np.argsort(rows, kind="stable")
        ordered, tables = rows[order], [self._schema(columns).empty_table()]
        for part, span in self._parts.split(ordered):
            inside = ordered[span] - self._parts.starts[part]
            table = self._read(part, columns, int(inside[0]), int(inside[-1]) + 1)
            tables.append(table.take(pa.array(inside - inside[0])))
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return _joined(tables).take(pa.array(back))

    def rows_of_documents(self, documents: int | Iterable[int]) -> np.ndarray:
        """Row numbers, rising; an id tells its shard, so no other is read. Raises RequestError for what are no ids."""
        ids = np.unique(_ids(documents))
        found = [np.zeros(0, np.int64)]
        for part, record in enumerate(self._parts.records):
            first = record.shard.file * DOCUMENTS_PER_FILE
            low, high = np.searchsorted(ids, [first + record.shard.start, first + record.shard.stop])
            if low < high:
                column = self._table(part).read(["document"]).column("document").to_numpy()
                found.append(np.flatnonzero(np.isin(column, ids[low:high])) + self._parts.starts[part])
        return np.concatenate(found)

    def where(self, expression: pc.Expression) -> np.ndarray:
        """Row numbers where a filter over the token table holds; one shard in memory at a time."""
        found = [np.zeros(0, np.int64)]
        for part, first in enumerate(self._parts.starts[:-1]):
            table = self._read(part, self.schema.names)
            numbered = table.append_column("__row__", pa.array(np.arange(len(table), dtype=np.int64)))
            try:
                kept = numbered.filter(expression)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
                raise RequestError(f"where: {' '.join(str(error).split())[:200]}") from None
            found.append(kept.column("__row__").to_numpy() + first)
        return np.concatenate(found)

    def digests(self) -> set[tuple[int, int, str]]:
        """(first row, one past the last, hash of the keys) of each shard."""
        starts = self._parts.starts.tolist()
        return {(*ends, record.keys_digest) for ends, record in zip(itertools.pairwise(starts), self._parts.records)}

    def parts(self, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        """(first row, the columns) of each shard that has rows."""
        for part, first in enumerate(self._parts.starts[:-1]):
            yield int(first), self._read(part, columns)

    def _read(self, part: int, columns: Sequence[str], start: int = 0, stop: int | None = None) -> pa.Table:
        """Rows [start, stop) of a shard; a column that only other runs have is null, `variant` 0."""
        table, schema = self._table(part), self._schema(columns)
        rows = (table.rows if stop is None else stop) - start
        made = {}
        if self._several:
            lacks = [field for field in schema if field.name not in table.schema.names]
            zeros = pa.array(np.zeros(rows, np.int8))
            made = {field.name: pa.nulls(rows, field.type) if field.nullable else zeros for field in lacks}
            made[RUN.name] = pa.array(np.full(rows, self._parts.runs[part], np.int32))
        read = [column for column in columns if column not in made]
        found = table.read(read, start, stop) if read else None
        arrays = [made[name] if found is None or name in made else found.column(name) for name in columns]
        return pa.table([array.cast(field.type) for array, field in zip(arrays, schema)], schema=schema)

    def _table(self, part: int) -> StoredTable:
        record = self._parts.records[part]
        return StoredTable(self._parts.files[part], f"{layout.attempt_path(record.attempt)}/{layout.TOKENS}")


def _ids(documents: Any) -> np.ndarray:
    """int64 [n] of one id, or of several."""
    if isinstance(documents, Iterable) and not isinstance(documents, str) and not hasattr(documents, "__array__"):
        documents = list(documents)
    try:
        ids = np.atleast_1d(np.asarray(documents))
    except ValueError:  # lists of several lengths
        ids = np.array([None])
    if ids.size and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
        raise RequestError(f"documents = {documents!r:.100}: allowed are ids: a whole number, or several")
    return ids.astype(np.int64)


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    """One table; each shard counts its spans in names of its own."""
    return pa.concat_tables(tables).unify_dictionaries()
