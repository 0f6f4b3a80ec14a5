"""`safetensors`: OUT/<name>-00000.safetensors and so on, each with the key `activations`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from harvest.export.folder import Folder
from harvest.export.format import Format
from harvest.export.selection import Column, Selected
from harvest.store import layout

CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32"}
FILE_BYTES = 1 << 30
"""Of a file, about."""


def header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None) -> bytes:
    """What a file begins with: name -> (dtype, shape), which follow as raw bytes in that order."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = int(np.prod(shape)) * torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        described[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)  # the bytes that follow begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def pieces(selected: Selected, columns: list[Column], file_bytes: int = FILE_BYTES) -> Iterator[tuple[int, int, int]]:
    """(number, start, stop) of the files of about `file_bytes` for the widest of the columns, in units."""
    per_unit = max(column.row_bytes for column in columns) * selected.units.context
    step = max(1, file_bytes // per_unit)
    for number, start in enumerate(range(0, selected.units.count, step)):
        yield number, start, min(start + step, selected.units.count)


def raw(rows: torch.Tensor) -> np.ndarray:
    """Its bytes, for every dtype: numpy knows no bfloat16."""
    return rows.contiguous().view(torch.uint8).numpy()


def write(selected: Selected, folder: Folder) -> Mapping[str, Any]:
    """One pass over the rows per name."""
    for column in selected.columns:
        for number, start, stop in pieces(selected, [column]):
            shape = ((stop - start) * selected.units.context, column.width)
            with folder.open(f"{layout.array_path(column.label)}-{number:05d}.safetensors") as file:
                file.write(header({"activations": (column.dtype, shape)}, {"name": column.name}))
                for block in selected.blocks([column], start, stop):
                    file.write(raw(block.values[column.label]))
    return {}


FORMAT = Format(
    write=write,
    dtypes=("float32", "float16", "bfloat16"),
    known=("float32", "float16", "bfloat16"),
    opens='safetensors.torch.load_file("{folder}/{label}-00000.safetensors")["activations"]',
)
