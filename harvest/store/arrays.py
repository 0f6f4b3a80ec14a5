"""The arrays of an attempt: each object is a Zarr v3 shard and a raw C-order file at once.

An object holds the rows of its outer chunk as they are in memory (inner chunks span all columns, the last one
padded with zeros), then the chunk index: offset and size (uint64, little endian) per inner chunk and the
index's crc32c. Any Zarr v3 reader opens it, and anyone can map it. The zarr.json is written by hand: zarr-python
is not needed to write or to read here.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

from harvest.errors import DamageError
from harvest.records import ArraySpec
from harvest.store import layout
from harvest.store.files import Files

DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
"""Zarr data type -> numpy dtype of the bytes; bfloat16 travels as its bits."""
OBJECT_BYTES = 256 << 20
"""One object per array up to about this size, else several."""
GAP_BYTES = 64 << 10
"""Remote reads that lie closer than this are joined into one."""
ABSENT = np.uint64(2**64 - 1)
"""Offset and size of an inner chunk that an object does not hold."""


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
        """Exact size of object `number`."""
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
    sharding = {
        "chunk_shape": [grid.inner, spec.width],
        "codecs": [little],
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
        "fill_value": "NaN",
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": dict(spec.attributes),
    }


def chunk_index(grid: Grid, number: int) -> bytes:
    """What follows the rows of object `number`."""
    index = np.full((grid.outer // grid.inner, 2), ABSENT, "<u8")
    held = grid.padded_rows_of(number) // grid.inner
    index[:held, 1] = grid.inner * grid.row_bytes
    index[:held, 0] = np.arange(held, dtype="<u8") * np.uint64(grid.inner * grid.row_bytes)
    data = index.tobytes()
    return data + int(google_crc32c.value(data)).to_bytes(4, "little")


class StoredArray:
    """The rows of one array of a committed attempt; what is missing or short is an error, never zeros.

    Rows come in the stored dtype (bfloat16 as uint16 bits): mapped where the store is local, else by range reads.
    """

    def __init__(self, files: Files, attempt: str, name: str, spec: ArraySpec | None = None) -> None:
        """Reads the array's zarr.json; raises DamageError where it is missing, foreign or differs from `spec`."""
        self.files, self.name = files, name
        self.path = f"{layout.attempt_path(attempt)}/{layout.array_path(name)}"
        self.spec, self.grid = _parse_metadata(self._where(layout.ZARR), self._read_metadata())
        found = (self.spec.rows, self.spec.width, self.spec.dtype)
        if spec is not None and (spec.rows, spec.width, spec.dtype) != found:
            raise DamageError(
                f"{self._where(layout.ZARR)}: {self.spec.dtype} [{self.spec.rows}, {self.spec.width}], "
                f"the ledger says {spec.dtype} [{spec.rows}, {spec.width}]"
            )
        self.shape = (self.spec.rows, self.spec.width)
        self.dtype = self.spec.dtype
        self.numpy_dtype = np.dtype(DTYPES[self.dtype])
        self._mapped: dict[int, np.ndarray] = {}

    def __repr__(self) -> str:
        return f"StoredArray({self.name!r}, {self.dtype} [{self.shape[0]}, {self.shape[1]}])"

    def _where(self, inside: str) -> str:
        return f"{self.files.url}/{self.path}/{inside}"

    def _read_metadata(self) -> bytes:
        try:
            return self.files.read(f"{self.path}/{layout.ZARR}")
        except FileNotFoundError:
            raise DamageError(f"{self._where(layout.ZARR)}: missing") from None

    def check_object(self, number: int) -> str:
        """The path of an object that is there in full."""
        path = f"{self.path}/{layout.object_name(number)}"
        try:
            size = self.files.size(path)
        except FileNotFoundError:
            raise DamageError(f"{self.files.url}/{path}: missing") from None
        if size != self.grid.object_bytes(number):
            raise DamageError(f"{self.files.url}/{path}: {size} bytes, expected {self.grid.object_bytes(number)}")
        return path

    def check_index(self, number: int) -> None:
        """Raises DamageError unless an object that is there in full ends with the index that belongs to it.

        The checksum of the whole object cannot tell: an index that is followed by its own crc32c leaves it the same
        whatever the index says, also "this chunk was never written".
        """
        path, size = f"{self.path}/{layout.object_name(number)}", self.grid.index_bytes
        if self.files.read_range(path, self.grid.object_bytes(number) - size, size) != chunk_index(self.grid, number):
            raise DamageError(f"{self.files.url}/{path}: its chunk index is not the one that was written")

    def object_rows(self, number: int) -> np.ndarray | None:
        """The rows of object `number`, [n, width], mapped read-only; None where the store cannot map."""
        if number not in self._mapped:
            data = self.files.map(self.check_object(number))
            if data is None:
                return None
            used = self.grid.rows_of(number) * self.grid.row_bytes
            self._mapped[number] = data[:used].view(self.numpy_dtype).reshape(-1, self.spec.width)
        return self._mapped[number]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) as a new array [n, width]."""
        if not 0 <= start <= stop <= self.spec.rows:
            raise IndexError(f"rows {start} to {stop} of {self.name}, which has {self.spec.rows}")
        out = np.empty((stop - start, self.spec.width), self.numpy_dtype)
        row = start
        while row < stop:
            number, inside = divmod(row, self.grid.outer)
            count = min(self.grid.rows_of(number) - inside, stop - row)
            out[row - start : row - start + count] = self._rows(number, inside, count)
            row += count
        return out

    def _rows(self, number: int, inside: int, count: int) -> np.ndarray:
        mapped = self.object_rows(number)
        if mapped is not None:
            return mapped[inside : inside + count]
        path, row_bytes = f"{self.path}/{layout.object_name(number)}", self.grid.row_bytes
        data = self.files.read_range(path, inside * row_bytes, count * row_bytes)
        if len(data) != count * row_bytes:
            raise DamageError(f"{self.files.url}/{path}: ends inside row {inside + len(data) // row_bytes}")
        return np.frombuffer(data, self.numpy_dtype).reshape(count, self.spec.width)

    def gather(self, indices: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Rows at `indices` (ints in [0, rows), any order, repeats allowed) as [n, width], into `out` when given."""
        indices = np.asarray(indices, np.int64).reshape(-1)
        if len(indices) and (indices.min() < 0 or indices.max() >= self.spec.rows):
            raise IndexError(f"row {indices.min()} or {indices.max()} of {self.name}, which has {self.spec.rows}")
        if out is None:
            out = np.empty((len(indices), self.spec.width), self.numpy_dtype)
        numbers = indices // self.grid.outer
        for number in np.unique(numbers):
            wanted = np.nonzero(numbers == number)[0]
            inside = indices[wanted] - number * self.grid.outer
            mapped = self.object_rows(int(number))
            if mapped is None:
                out[wanted] = self._gather_remote(int(number), inside)
            elif len(wanted) == len(indices):
                np.take(mapped, inside, axis=0, out=out, mode="clip")  # "clip" spares a buffer; checked above
            else:
                out[wanted] = mapped[inside]
        return out

    def _gather_remote(self, number: int, inside: np.ndarray) -> np.ndarray:
        """Joins rows that lie close to one another, so that a batch costs few requests."""
        rows, back = np.unique(inside, return_inverse=True)
        gap = max(1, GAP_BYTES // self.grid.row_bytes)
        starts = np.concatenate([[0], np.nonzero(np.diff(rows) > gap)[0] + 1, [len(rows)]])
        found = np.empty((len(rows), self.spec.width), self.numpy_dtype)
        for start, stop in itertools.pairwise(starts.tolist()):
            first = int(rows[start])
            block = self._rows(number, first, int(rows[stop - 1]) - first + 1)
            found[start:stop] = block[rows[start:stop] - first]
        return found[back.reshape(-1)]


def map_rows(files: Files, attempt: str, name: str, spec: ArraySpec) -> list[np.ndarray]:
    """The rows of each object of a local array, [n, width] mapped read-only, uint16 bits for bfloat16.

    Raises DamageError naming an object that is missing or short, or metadata that differ from `spec`.
    """
    stored = StoredArray(files, attempt, name, spec)
    mapped = [stored.object_rows(number) for number in range(stored.grid.objects)]
    return [rows for rows in mapped if rows is not None]


def _parse_metadata(where: str, data: bytes) -> tuple[ArraySpec, Grid]:
    """The spec and grid of a zarr.json that `array_metadata` could have written, and of no other."""
    try:
        found = json.loads(data)
        (rows, width), dtype = found["shape"], found["data_type"]
        outer = found["chunk_grid"]["configuration"]["chunk_shape"][0]
        inner = found["codecs"][0]["configuration"]["chunk_shape"][0]
        spec = ArraySpec(rows=rows, width=width, dtype=dtype, attributes=found["attributes"])
        grid = Grid(rows=rows, row_bytes=width * np.dtype(DTYPES[dtype]).itemsize, inner=inner, outer=outer)
        if min(inner, outer) < 1 or outer % inner or found != array_metadata(spec, grid):
            raise ValueError("other codecs or chunks than this version writes")
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DamageError(f"{where}: not the metadata of an array of ours ({error})") from None
    return spec, grid
