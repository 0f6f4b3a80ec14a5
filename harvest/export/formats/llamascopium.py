"""`llamascopium`: OUT/<hook>/chunk-00000000.safetensors and so on, as its CachedActivationLoader reads them.

With `--context C` its two-dimensional activations, [contexts, C, d]; without, the one-dimensional ones, [rows, d].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from harvest.export.folder import Folder
from harvest.export.format import Format
from harvest.export.formats.safetensors import header, pieces, raw
from harvest.export.selection import Column, Selected
from harvest.store import layout

CHUNK_BYTES = 256 << 20
"""Of a chunk, which the loader holds whole, several at a time."""


def write(selected: Selected, folder: Folder) -> Mapping[str, Any]:
    """One pass over the rows per hook; the same chunks, with the same tokens, for each."""
    chunks = list(pieces(selected, selected.columns, CHUNK_BYTES))
    for column in selected.columns:
        for number, start, stop in chunks:
            path = f"{layout.array_path(column.label)}/chunk-{number:08d}.safetensors"
            _write_chunk(selected, column, folder, path, start, stop)
    return {"chunks": len(chunks)}


def _write_chunk(selected: Selected, column: Column, folder: Folder, path: str, start: int, stop: int) -> None:
    context = selected.units.context
    shape = (stop - start,) if context == 1 else (stop - start, context)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "activation": (column.dtype, (*shape, column.width)),
        "tokens": ("int64", shape),
        "mask": ("int32", shape),
        "attention_mask": ("int32", shape),
    }
    with folder.open(path) as file:
        file.write(header(tensors))
        for block in selected.blocks([column], start, stop):
            file.write(raw(block.values[column.label]))
        for table in selected.tokens(["token"], start, stop):
            file.write(table.column("token").to_numpy().astype("<i8"))
        file.write(np.ones((2, *shape), "<i4"))  # every row is a real token: both masks


FORMAT = Format(
    write=write,
    dtypes=("float32", "float16", "bfloat16"),
    known=("float32", "float16", "bfloat16"),
    naming="tl",
    opens='CachedActivationLoader({{"{label}": "{folder}/{label}"}}).process()',
)
