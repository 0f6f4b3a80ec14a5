"""`parquet`: OUT/data-00000-of-00001.parquet, a column per name (lists of fixed length) beside the token columns.

`datasets.load_dataset(OUT)` reads the folder, also from a hub; `tokens.parquet` holds the token columns alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from harvest.export.folder import Folder, Writer
from harvest.export.format import Format
from harvest.export.selection import Block, Column, Selected
from harvest.store import layout
from harvest.store.tables import ROW_GROUP_ROWS

FILE_BYTES = 1 << 30
"""Of a file, about."""
GROUP_BYTES = 32 << 20
"""Of a row group, about: a reader of one row decodes as much."""
ARROW = {"float32": pa.float32(), "float16": pa.float16()}
CONFIG = "---\nconfigs:\n- config_name: default\n  data_files: data-*.{ending}\n---\n"


def write_tokens(selected: Selected, folder: Folder) -> None:
    """OUT/tokens.parquet, which every export has: the columns of `tokens()`, row by row with the data."""
    schema = selected.run.tokens(slice(0, 0)).schema
    with (
        folder.open(layout.TOKENS) as file,
        pq.ParquetWriter(file, schema, compression="zstd", compression_level=1) as writer,
    ):
        for table in selected.tokens():
            writer.write_table(table.cast(schema), row_group_size=ROW_GROUP_ROWS)


def column_type(column: Column) -> pa.DataType:
    """Of a row of a name: a list of fixed length."""
    return pa.list_(pa.field("item", ARROW[column.dtype]), column.width)


def column_array(column: Column, rows: torch.Tensor) -> pa.Array:
    """Rows [n, d] without a copy."""
    flat = pa.array(rows.numpy().reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, type=column_type(column))


def token_schema(selected: Selected) -> pa.Schema:
    """The token columns, spans as plain text."""
    fields = selected.run.tokens(slice(0, 0)).schema
    plain = [
        pa.field(field.name, field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in fields
    ]
    return pa.schema([pa.field(field.name, field.type) for field in plain])


def file_ranges(selected: Selected, file_bytes: int = FILE_BYTES) -> list[tuple[int, int]]:
    """Units [start, stop) of each file."""
    unit_bytes = sum(column.row_bytes for column in selected.columns) * selected.units.context
    step = max(1, file_bytes // unit_bytes)
    count = selected.units.count
    return [(start, min(start + step, count)) for start in range(0, count, step)]


def rows_with_tokens(selected: Selected, start: int, stop: int) -> Iterator[tuple[Block, pa.Table]]:
    """Blocks of units [start, stop) beside their part of the token table."""
    schema = token_schema(selected)
    slabs = selected.tokens(start=start, stop=stop)
    slab, first = schema.empty_table(), start * selected.units.context
    context = selected.units.context
    for block in selected.blocks(start=start, stop=stop):
        row, end = block.start * context, (block.start + block.units) * context
        while first + len(slab) < end:
            rest = slab.slice(row - first)
            slab, first = pa.concat_tables([rest, next(slabs).cast(schema)]), row
        yield block, slab.slice(row - first, end - row)


def write(selected: Selected, folder: Folder) -> Mapping[str, Any]:
    """One pass over the rows of all names together."""
    tokens = token_schema(selected)
    fields = [pa.field(column.label, column_type(column)) for column in selected.columns]
    schema = pa.schema([*tokens, *fields])
    ranges = file_ranges(selected)
    for number, (start, stop) in enumerate(ranges):
        with folder.open(f"data-{number:05d}-of-{len(ranges):05d}.parquet") as file:
            _write_file(selected, file, schema, tokens.names, start, stop)
    return {}


def _write_file(selected: Selected, file: Writer, schema: pa.Schema, plain: list[str], start: int, stop: int) -> None:
    # Dictionaries and statistics of activations cost most of the time and find nothing.
    with pq.ParquetWriter(file, schema, compression="none", use_dictionary=plain, write_statistics=plain) as writer:
        held: list[pa.Table] = []
        for block, tokens in rows_with_tokens(selected, start, stop):
            arrays = [column_array(column, block.values[column.label]) for column in selected.columns]
            held.append(pa.Table.from_arrays([*tokens.columns, *arrays], schema=schema))
            if sum(table.nbytes for table in held) >= GROUP_BYTES:
                _write_group(writer, held)
                held = []
        _write_group(writer, held)


def _write_group(writer: Any, held: list[pa.Table]) -> None:
    if held:
        table = pa.concat_tables(held)
        writer.write_table(table, row_group_size=max(1, len(table)))


FORMAT = Format(
    write=write,
    dtypes=("float32", "float16"),
    known=("float32", "float16"),
    opens='datasets.load_dataset("{folder}", split="train").with_format("numpy")["{label}"]',
    front=CONFIG.format(ending="parquet"),
)
