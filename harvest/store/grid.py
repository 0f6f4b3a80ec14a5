"""How the rows of an array are cut into objects and inner chunks, and the zarr.json that says so.

An object holds the rows of its outer chunk as they are in memory (inner chunks span all columns, the last one
padded with zeros), then the chunk index: offset and size (uint64, little endian) per inner chunk and the
index's crc32c. Any Zarr v3 reader opens it, and anyone can map it. Compressed, each inner chunk is a zstd frame of the
same bytes, which nobody can map. The zarr.json is written by hand: zarr-python is not needed to write or to read here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from harvest.errors import DamageError
from harvest.records import ArraySpec
from harvest.store.chunks import ZSTD, index_bytes

DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int8": "i1"}
"""Zarr data type -> numpy dtype of the bytes; bfloat16 travels as its bits."""
FILLS = {"int8": -128}
"""What a chunk that is gone reads as elsewhere, NaN by default: never zeros, and of int8 a code that is not used."""
OBJECT_BYTES = 256 << 20
"""One object per array up to about this size, else several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How the rows of one array are cut; every number follows from the spec and the two size limits."""

    rows: int
    """Rows of the array."""
    row_bytes: int
    """Bytes of a row."""
    inner: int
    """Rows of an inner chunk."""
    outer: int
    """Rows of an object, a multiple of `inner`; the last object may hold fewer."""

    @property
    def objects(self) -> int:
        return math.ceil(self.rows / self.outer)

    @property
    def index_bytes(self) -> int:
        return self.outer // self.inner * 16 + 4

    def rows_of(self, number: int) -> int:
        """Rows of the array in object `number`."""
        return min(self.outer, self.rows - number * self.outer)

    def padded_rows_of(self, number: int) -> int:
        """The same with the padding of the last inner chunk."""
        return math.ceil(self.rows_of(number) / self.inner) * self.inner

    def object_bytes(self, number: int) -> int:
        """Exact size of object `number`, uncompressed."""
        return self.padded_rows_of(number) * self.row_bytes + self.index_bytes


def plan_grid(spec: ArraySpec, chunk_bytes: int, object_bytes: int = OBJECT_BYTES) -> Grid:
    """Inner chunks of up to `chunk_bytes`, objects of up to `object_bytes`, both evened out: little is padded."""
    row_bytes = spec.width * np.dtype(DTYPES[spec.dtype]).itemsize
    if spec.rows == 0:
        return Grid(rows=0, row_bytes=row_bytes, inner=1, outer=1)
    chunks = math.ceil(spec.rows / max(1, chunk_bytes // row_bytes))
    inner = math.ceil(spec.rows / chunks)
    chunks = math.ceil(spec.rows / inner)
    objects = math.ceil(chunks / max(1, object_bytes // (inner * row_bytes)))
    return Grid(rows=spec.rows, row_bytes=row_bytes, inner=inner, outer=inner * math.ceil(chunks / objects))


def array_metadata(spec: ArraySpec, grid: Grid) -> dict[str, Any]:
    """The array's zarr.json. The fill value is NaN: a chunk that is gone never reads as zeros anywhere."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    plain: dict[str, Any] = {"name": "bytes"} if spec.dtype == "int8" else little
    sharding = {
        "chunk_shape": [grid.inner, spec.width],
        "codecs": [plain, ZSTD] if spec.compression == "zstd" else [plain],
        "index_codecs": [little, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [spec.rows, spec.width],
        "data_type": spec.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [grid.outer, spec.width]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": FILLS.get(spec.dtype, "NaN"),
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": dict(spec.attributes),
    }


def chunk_index(grid: Grid, number: int) -> bytes:
    """What follows the rows of object `number` where they are not compressed."""
    held = grid.padded_rows_of(number) // grid.inner
    return index_bytes([grid.inner * grid.row_bytes] * held, grid.outer // grid.inner)


def parse_metadata(where: str, data: bytes) -> tuple[ArraySpec, Grid]:
    """The spec and grid of a zarr.json that `array_metadata` could have written, and of no other."""
    try:
        found = json.loads(data)
        (rows, width), dtype = found["shape"], found["data_type"]
        outer = found["chunk_grid"]["configuration"]["chunk_shape"][0]
        inner = found["codecs"][0]["configuration"]["chunk_shape"][0]
        compression = "zstd" if len(found["codecs"][0]["configuration"]["codecs"]) > 1 else "none"
        spec = ArraySpec(rows=rows, width=width, dtype=dtype, compression=compression, attributes=found["attributes"])
        grid = Grid(rows=rows, row_bytes=width * np.dtype(DTYPES[dtype]).itemsize, inner=inner, outer=outer)
        if min(inner, outer) < 1 or outer % inner or found != array_metadata(spec, grid):
            raise ValueError("other codecs or chunks than this version writes")
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DamageError(f"{where}: not the metadata of an array of ours ({error})") from None
    return spec, grid
