"""`saelens`: the Arrow folder that SAELens trains from with `use_cached_activations`: a row is a context.

A column per hook, [C, d] a row, beside `token_ids`; without `--context` C is 1, and `--shuffle` shuffles tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from harvest.export.folder import Folder
from harvest.export.format import Format
from harvest.export.formats.hf import write_description, write_stream
from harvest.export.formats.parquet import ARROW, file_ranges, rows_with_tokens
from harvest.export.selection import Column, Selected

TOKENS = "token_ids"


def write(selected: Selected, folder: Folder) -> Mapping[str, Any]:
    """One pass over the rows of all names together."""
    context = selected.units.context
    features: dict[str, Any] = {}
    fields = []
    for column in selected.columns:
        features[column.label] = {"shape": [context, column.width], "dtype": column.dtype, "_type": "Array2D"}
        fields.append(_field(column, context))
    features[TOKENS] = {"feature": {"dtype": "int32", "_type": "Value"}, "length": context, "_type": "List"}
    fields.append(pa.field(TOKENS, pa.list_(pa.int32(), context)))
    schema = pa.schema(fields)

    def batches(start: int, stop: int) -> Iterator[pa.RecordBatch]:
        for block, table in rows_with_tokens(selected, start, stop):
            arrays = [_contexts(column, context, block.values[column.label]) for column in selected.columns]
            tokens = table.column("token").combine_chunks()
            arrays.append(pa.FixedSizeListArray.from_arrays(tokens, context))
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    files = []
    ranges = file_ranges(selected)
    for number, (start, stop) in enumerate(ranges):
        files.append(f"data-{number:05d}-of-{len(ranges):05d}.arrow")
        write_stream(folder, files[-1], schema, features, batches(start, stop))
    write_description(folder, features, files)
    return {"trains_with": {"context_size": context, "hook_names": [column.label for column in selected.columns]}}


def _field(column: Column, context: int) -> pa.Field:
    """Lists of lists, which `datasets` takes for an Array2D by the field's metadata alone."""
    described = {
        "ARROW:extension:name": "datasets.features.features.Array2DExtensionType",
        "ARROW:extension:metadata": json.dumps([[context, column.width], column.dtype]),
    }
    return pa.field(column.label, pa.list_(pa.list_(ARROW[column.dtype])), metadata=described)


def _contexts(column: Column, context: int, rows: torch.Tensor) -> pa.Array:
    """Rows [n * C, d] as n lists of C lists of d, the values without a copy."""
    inner = np.arange(len(rows) + 1, dtype=np.int32) * np.int32(column.width)
    outer = np.arange(len(rows) // context + 1, dtype=np.int32) * np.int32(context)
    lists = pa.ListArray.from_arrays(pa.array(inner), pa.array(rows.numpy().reshape(-1)))
    return pa.ListArray.from_arrays(pa.array(outer), lists)


FORMAT = Format(
    write=write,
    dtypes=("float32", "float16"),
    known=("float32", "float16"),
    naming="tl",
    opens=(
        "LanguageModelSAERunnerConfig(\n"
        '    use_cached_activations=True, cached_activations_path="{folder}", hook_name="{label}",\n'
        "    context_size={context}, ...)"
    ),
)
