"""`hf`: an Arrow folder that `datasets.load_from_disk` maps, a column per name beside the token columns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from harvest.export.folder import Folder
from harvest.export.format import Format
from harvest.export.formats.parquet import (
    CONFIG,
    column_array,
    column_type,
    file_ranges,
    rows_with_tokens,
    token_schema,
)
from harvest.export.selection import Selected


def write(selected: Selected, folder: Folder) -> Mapping[str, Any]:
    """One pass over the rows of all names together."""
    tokens = token_schema(selected)
    fields = [pa.field(column.label, column_type(column)) for column in selected.columns]
    features: dict[str, Any] = {field.name: {"dtype": _value(field.type), "_type": "Value"} for field in tokens}
    for column in selected.columns:
        item = {"dtype": column.dtype, "_type": "Value"}
        features[column.label] = {"feature": item, "length": column.width, "_type": "List"}
    schema = pa.schema([*tokens, *fields])

    def batches(start: int, stop: int) -> Iterator[pa.RecordBatch]:
        for block, table in rows_with_tokens(selected, start, stop):
            arrays = [column_array(column, block.values[column.label]) for column in selected.columns]
            flat = [column.combine_chunks() for column in table.columns]
            yield pa.RecordBatch.from_arrays([*flat, *arrays], names=schema.names)

    files = []
    ranges = file_ranges(selected)
    for number, (start, stop) in enumerate(ranges):
        files.append(f"data-{number:05d}-of-{len(ranges):05d}.arrow")
        write_stream(folder, files[-1], schema, features, batches(start, stop))
    write_description(folder, features, files)
    return {}


def _value(kind: pa.DataType) -> str:
    """How `datasets` spells a plain type."""
    return str(kind)


def write_stream(
    folder: Folder, path: str, schema: pa.Schema, features: Mapping[str, Any], batches: Iterator[pa.RecordBatch]
) -> None:
    """One Arrow IPC stream, with the features of `datasets` in its schema."""
    schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    with folder.open(path) as file, pa.ipc.new_stream(file, schema) as stream:
        for batch in batches:
            stream.write_batch(batch)


def write_description(folder: Folder, features: Mapping[str, Any], files: Sequence[str]) -> None:
    """dataset_info.json and state.json: without the latter there is no dataset."""
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    folder.blob("dataset_info.json", json.dumps(info, indent=2).encode())
    content = json.dumps({path: folder.files[path] for path in files}, sort_keys=True).encode()
    state: dict[str, Any] = {
        "_data_files": [{"filename": path} for path in files],
        "_fingerprint": hashlib.blake2b(content, digest_size=8).hexdigest(),
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    folder.blob("state.json", json.dumps(state, indent=2).encode())


FORMAT = Format(
    write=write,
    dtypes=("float32", "float16"),
    known=("float32", "float16"),
    opens='datasets.load_from_disk("{folder}").with_format("torch")["{label}"]',
    front=CONFIG.format(ending="arrow"),
)
