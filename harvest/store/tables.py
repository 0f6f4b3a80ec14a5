"""The tables of a shard as Parquet: `tokens` says which token each row is, `documents` accounts for every document."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from harvest.errors import DamageError
from harvest.records import DocumentRow, TokenColumns
from harvest.store.files import Files

TOKENS_SCHEMA = pa.schema(
    [
        pa.field("document", pa.int64(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("token", pa.int32(), nullable=False),
        pa.field("chunk", pa.int32(), nullable=False),
        pa.field("special", pa.bool_(), nullable=False),
    ]
)
VARIANT = pa.field("variant", pa.int8(), nullable=False)
"""Which sequence of a document; a further column of both tables where `data.contrast` makes two of each."""
RUN = pa.field("run", pa.int32(), nullable=False)
"""A further column of both tables of several runs that are read as one: which of them, from 0."""
LOGIT_DIFF = pa.field("logit_diff", pa.float64())
"""Of the documents table of a job with answers: what speaks for the right one at the end of the sequence."""
SPAN = pa.field("span", pa.dictionary(pa.int32(), pa.string()))
"""A further column of the token table where the job uses spans: the innermost one around the token, null outside."""
DOCUMENTS_SCHEMA = pa.schema(
    [
        pa.field("document", pa.int64(), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("status", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field("reason", pa.string()),
    ]
)
"""The kept columns follow, typed by their values."""
ROW_GROUP_ROWS = 65_536
"""A read of a few rows decodes this many at most."""
PREFIX = "column."
"""Of a kept column whose name is one of ours."""
ENCODINGS = {"position": "DELTA_BINARY_PACKED"}
"""Positions count up by one: a few bits each. Documents and chunks repeat, which the dictionary's run lengths catch."""


def tokens_schema(*, spans: bool, variants: bool = False) -> pa.Schema:
    """Of the token table of a job that uses spans, or a contrast, or neither."""
    return pa.schema([*TOKENS_SCHEMA, *([VARIANT] if variants else []), *([SPAN] if spans else [])])


def documents_schema(*, variants: bool = False, logit_diffs: bool = False) -> pa.Schema:
    """Of the documents table, before the kept columns."""
    schema = DOCUMENTS_SCHEMA.insert(1, VARIANT) if variants else DOCUMENTS_SCHEMA
    return schema.append(LOGIT_DIFF) if logit_diffs else schema


def tokens_table(columns: TokenColumns) -> pa.Table:
    """The token table of a shard, row by row with its arrays."""
    arrays = [pa.array(getattr(columns, field.name), field.type) for field in TOKENS_SCHEMA]
    if columns.variant is not None:
        arrays.append(pa.array(columns.variant, VARIANT.type))
    if columns.span is not None:
        codes = pa.array(columns.span, SPAN.type.index_type, mask=columns.span < 0)
        arrays.append(pa.DictionaryArray.from_arrays(codes, pa.array(columns.span_names, pa.string())))
    schema = tokens_schema(spans=columns.span is not None, variants=columns.variant is not None)
    return pa.Table.from_arrays(arrays, schema=schema)


def sequence_numbers(document: np.ndarray, variant: np.ndarray | None) -> np.ndarray:
    """int64 [n], rising: equal for rows of one sequence, given int64 [n] and int8 [n] in dataset order.

    Without variants a document is one sequence, and this its id.
    """
    if variant is None or not len(document):
        return document
    changes = (np.diff(document) != 0) | (np.diff(variant) != 0)
    return np.concatenate([[0], np.cumsum(changes)])


def keys_digest(
    document: np.ndarray, position: np.ndarray, token: np.ndarray, variant: np.ndarray | None = None
) -> str:
    """Hash of a shard's keys in row order (int64 [n], int32 [n], int32 [n]; int8 [n] where documents have two
    sequences): equal for runs over the same tokens."""
    digest = hashlib.blake2b(digest_size=16)
    keys = [(document, "<i8"), (position, "<i4"), (token, "<i4")]
    for column, dtype in keys if variant is None else [*keys, (variant, "<i1")]:
        digest.update(memoryview(np.ascontiguousarray(column, dtype)))  # type: ignore[arg-type]  # a buffer
    return digest.hexdigest()


def kept_names(kept: Sequence[str], schema: pa.Schema = DOCUMENTS_SCHEMA) -> list[str]:
    """What the kept columns are called in the documents table: their own name unless one of ours has it."""
    taken = set(schema.names)
    names = []
    for name in kept:
        while name in taken:
            name = PREFIX + name
        taken.add(name)
        names.append(name)
    return names


def documents_table(
    documents: Sequence[DocumentRow], kept: Sequence[str] = (), *, variants: bool = False, logit_diffs: bool = False
) -> pa.Table:
    """One row per document, or per sequence of it, then the `kept` columns in that order, null where it lacks them.

    A column of one type keeps it; lists and mappings, and everything in a column of mixed types that is not text,
    become JSON text; whole numbers among floats become floats while that is exact.
    """
    schema = documents_schema(variants=variants, logit_diffs=logit_diffs)
    arrays = [pa.array([getattr(document, field.name) for document in documents], field.type) for field in schema]
    fields = list(schema)
    for column, name in zip(kept, kept_names(kept, schema)):
        array = _typed([document.kept.get(column) for document in documents])
        arrays.append(array)
        fields.append(pa.field(name, array.type))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _typed(values: list[Any]) -> pa.Array:
    values = [value.item() if isinstance(value, np.generic) else value for value in values]
    kinds = {type(value) for value in values if value is not None}
    if kinds == {str}:
        return pa.array([_text(value) for value in values], pa.string())
    if not kinds & {str, list, dict, tuple}:
        try:
            if kinds == {int, float} and all(float(value) == value for value in values if type(value) is int):
                return pa.array(values, pa.float64())
            if len(kinds) <= 1:
                return pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
            pass  # beyond int64, mixed time zones, types unknown to Arrow: as text
    return pa.array([_text(value) for value in values], pa.string())


def _text(value: Any) -> str | None:
    """Text as it is, with broken unicode escaped so that one kept cell never stops a run; the rest as JSON."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def concat_documents(tables: Iterable[pa.Table]) -> pa.Table:
    """The documents tables of several shards as one; a kept column typed differently among them becomes text.

    Float and int become float while every int is exact; all-null columns take the type of the others.
    """
    tables = list(tables)
    if not tables:
        return DOCUMENTS_SCHEMA.empty_table()
    names = list(dict.fromkeys(name for table in tables for name in table.column_names))
    columns = {name: _concat([_column(table, name) for table in tables]) for name in names}
    nullable = {field.name for table in tables for field in table.schema if field.nullable}
    return pa.table(columns, schema=pa.schema([pa.field(n, columns[n].type, n in nullable) for n in names]))


def documents_of_runs(tables: Sequence[pa.Table], own: Sequence[pa.Schema]) -> pa.Table:
    """The documents tables of several runs as one, and `run`; `own`: the columns of each before its kept ones.

    A kept column that is called like one of ours is renamed as in a single run, also where only another run has ours.
    Documents of a run without variants are variant 0.
    """
    has = {name for schema in own for name in schema.names}
    variants = VARIANT.name in has
    ours = documents_schema(variants=variants, logit_diffs=LOGIT_DIFF.name in has).append(RUN)
    parts = []
    for table, schema in zip(tables, own, strict=True):
        first, kept = table.column_names[: len(schema)], table.column_names[len(schema) :]
        table = table.rename_columns([*first, *kept_names(kept, ours)])
        if variants and VARIANT.name not in first:
            table = table.add_column(1, VARIANT, pa.array(np.zeros(len(table), np.int8)))
        parts.append(table)
    numbers = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
    return concat_documents(parts).append_column(RUN, pa.array(numbers))


def _column(table: pa.Table, name: str) -> pa.ChunkedArray:
    if name in table.column_names:
        return table.column(name)
    return pa.chunked_array([pa.nulls(len(table))])


def _concat(parts: list[pa.ChunkedArray]) -> pa.ChunkedArray:
    kinds = {part.type for part in parts if not pa.types.is_null(part.type)}
    if len(kinds) > 1:
        kind = pa.float64() if kinds == {pa.int64(), pa.float64()} and all(map(_exact, parts)) else pa.string()
    else:
        kind = kinds.pop() if kinds else pa.null()
    chunks = [chunk for part in parts for chunk in _cast(part, kind).chunks]
    if pa.types.is_dictionary(kind):
        return pa.chunked_array(chunks, kind).unify_dictionaries()
    return pa.chunked_array(chunks, kind)


def _exact(part: pa.ChunkedArray) -> bool:
    """Whether the column survives as float64."""
    if not pa.types.is_int64(part.type) or part.null_count == len(part):
        return True
    limits = pc.min_max(part).as_py()
    return bool(max(abs(limits["min"]), abs(limits["max"])) <= 2**53)


def _cast(part: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if part.type == kind:
        return part
    if pa.types.is_string(kind) and not pa.types.is_null(part.type):
        return pa.chunked_array([pa.array(map(_text, part.to_pylist()), kind)])
    return part.cast(kind)


def statistics_table(statistics: Mapping[str, Any]) -> pa.Table:
    """One row per name and set of rows (`all`, `ordinary`: without special tokens), one column per figure.

    `statistics`: name -> NameStatistics, whose fields this follows; mean and variance are lists of float64 [d].
    """
    rows = []
    for name, found in statistics.items():
        for which, part in (("all", found.all), ("ordinary", found.ordinary)):
            figures = {field.name: getattr(part, field.name) for field in dataclasses.fields(found.ordinary)}
            figures["norm_quantiles"] = [
                {"share": share, "norm": norm} for share, norm in figures["norm_quantiles"].items()
            ]
            rows.append({"name": name, "rows": which, **figures})
    return pa.Table.from_pylist(rows)


def parquet_bytes(table: pa.Table) -> bytes:
    """The table as one Parquet file; the same table gives the same bytes under the same pyarrow."""
    sink = io.BytesIO()
    encodings = {name: coding for name, coding in ENCODINGS.items() if name in table.column_names}
    plain = {field.name for field in table.schema if pa.types.is_boolean(field.type)}
    dictionary = [name for name in table.column_names if name not in encodings and name not in plain]
    pq.write_table(
        table,
        sink,
        row_group_size=ROW_GROUP_ROWS,
        compression="zstd",
        compression_level=1,
        use_dictionary=dictionary,
        column_encoding=encodings or None,
        write_page_checksum=True,
    )
    return sink.getvalue()


def whole_object(files: Files, path: str) -> pa.Buffer:
    """An object's bytes, mapped where the store can."""
    mapped = files.map(path)
    return pa.py_buffer(files.read(path) if mapped is None else mapped)


class StoredTable:
    """One Parquet file of a committed attempt, read a few row groups at a time; mapped where the store is local."""

    def __init__(self, files: Files, path: str) -> None:
        """Raises DamageError naming a file that is missing or not Parquet."""
        self.where = f"{files.url}/{path}"
        try:
            self._file = pq.ParquetFile(pa.BufferReader(whole_object(files, path)), page_checksum_verification=True)
        except FileNotFoundError:
            raise DamageError(f"{self.where}: missing") from None
        except (pa.ArrowException, OSError) as error:
            raise self._damage(error) from None
        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._ends = np.cumsum([0, *sizes])
        self.rows = int(metadata.num_rows)
        self.schema: pa.Schema = self._file.schema_arrow

    def _damage(self, error: BaseException) -> DamageError:
        return DamageError(f"{self.where}: not a readable Parquet file ({' '.join(str(error).split())[:200]})")

    def read(self, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None) -> pa.Table:
        """Rows [start, stop) of the columns, all by default."""
        stop = self.rows if stop is None else stop
        if not 0 <= start <= stop <= self.rows:
            raise IndexError(f"rows {start} to {stop} of {self.where}, which has {self.rows}")
        if start == stop:
            groups = range(0)
        else:
            first = int(np.searchsorted(self._ends, start, side="right")) - 1
            groups = range(first, int(np.searchsorted(self._ends, stop, side="left")))
        try:
            table = self._file.read_row_groups(list(groups), columns=None if columns is None else list(columns))
        except (pa.ArrowException, OSError) as error:
            raise self._damage(error) from None
        return table.slice(start - int(self._ends[groups.start]), stop - start)


def schemas() -> Mapping[str, pa.Schema]:
    """Arrow schema by the file's name, with the columns that only some jobs have."""
    return {
        "tokens": tokens_schema(spans=True, variants=True),
        "documents": documents_schema(variants=True, logit_diffs=True),
    }


def columns_of(table: pa.Table) -> dict[str, np.ndarray]:
    """Column -> its values; names as text, None for none."""
    found = {}
    for name, column in zip(table.column_names, table.columns):
        # pyarrow makes no numpy array of nulls whose dictionary is empty
        plain = column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
        found[name] = plain.to_numpy(zero_copy_only=False)
    return found
