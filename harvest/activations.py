"""The rows of one name over all committed shards, as if they were one array; only what is asked for is read."""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from harvest.errors import RequestError
from harvest.records import ArraySpec, ShardRecord
from harvest.store.arrays import StoredArray
from harvest.store.files import Files
from harvest.store.grid import DTYPES
from harvest.store.mapped import MappedRows, can_map

MAX_OPEN_ARRAYS = 16_384
"""Arrays kept open by one run: each maps at least one object, and Linux allows 65,530 maps to a process."""
PIECE_BYTES = 1 << 20
"""What is worth handing to another thread."""
GATHER_THREADS = 4
"""At most. Ours and not torch's: its threads spin for one another, and beside a busy neighbour a gather on two of
them ran at a fifth of one."""
GUESSES = 4
"""Objects that a row may be off its guess before a search is cheaper."""
TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Parts:
    """Which rows of the run lie in which shard: shards in dataset order, rows counted through."""

    def __init__(self, files: Files, records: Sequence[ShardRecord]) -> None:
        self.files = files
        self.records = [record for record in records if record.rows]
        self.starts = np.cumsum([0, *(record.rows for record in self.records)], dtype=np.int64)
        self.rows = int(self.starts[-1])
        self._arrays: OrderedDict[tuple[str, str], StoredArray] = OrderedDict()
        self._lock = threading.Lock()

    def split(self, indices: np.ndarray) -> Iterator[tuple[int, slice]]:
        """(part, the slice of `indices` that lies in it) for rising row numbers int64 [n]."""
        cuts = np.searchsorted(indices, self.starts)
        for part in np.flatnonzero(np.diff(cuts)):
            yield int(part), slice(int(cuts[part]), int(cuts[part + 1]))

    def array(self, part: int, name: str, width: int, dtype: str) -> StoredArray:
        """The array of a name in a shard, kept open for the next call. Raises DamageError."""
        record = self.records[part]
        key = (record.attempt, name)
        with self._lock:
            found = self._arrays.pop(key, None)
            if found is None:
                spec = ArraySpec(rows=record.rows, width=width, dtype=dtype)
                found = StoredArray(self.files, record.attempt, name, spec)
                if len(self._arrays) >= MAX_OPEN_ARRAYS:
                    self._arrays.popitem(last=False)
            self._arrays[key] = found
        return found


def row_numbers(rows: Any, count: int, what: str = "rows") -> np.ndarray:
    """int64 [n] row numbers in [0, count) for a slice, range, int, mask or sequence; negative ones count from the end.

    Raises IndexError beyond the end and RequestError for anything that is no selection of rows.
    """
    if rows is None:
        return np.arange(count)
    if isinstance(rows, slice):
        return np.arange(count)[rows] if rows.step not in (None, 1) else np.arange(*rows.indices(count))
    if isinstance(rows, torch.Tensor):
        rows = rows.detach().cpu().numpy()
    array = np.asarray(rows)
    if array.dtype == bool and array.shape == (count,):
        return np.flatnonzero(array)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int64)
    if array.ndim > 1 or not np.issubdtype(array.dtype, np.integer):
        raise RequestError(
            f"{what} of {array.dtype} {list(array.shape)}: allowed are an int, a slice, whole numbers [n] "
            f"and a mask bool [{count}]"
        )
    array = array.reshape(-1).astype(np.int64)
    wrong = array[(array < -count) | (array >= count)]
    if len(wrong):
        raise IndexError(f"row {wrong[0]} is out of range: there are {count} rows")
    return np.where(array < 0, array + count, array)


class _Mapped:
    """Where the rows of the run lie in one mapped range."""

    def __init__(self, starts: np.ndarray, first_rows: np.ndarray, rows: np.ndarray) -> None:
        """int64 [objects]: the run's row that each object begins with, and the range's; `rows` [rows and gaps, d]."""
        self.rows, self._starts = rows, starts
        self._shifts = first_rows - starts
        self._ends = np.append(starts[1:], np.iinfo(np.int64).max)
        # Objects are of much the same size, so the upper bits of a row number all but tell its object.
        self._bits = max(0, int(np.log2(max(1, np.diff(starts).mean()))) - 1) if len(starts) > 1 else 62
        self._guess = np.searchsorted(starts, np.arange((int(starts[-1]) >> self._bits) + 1) << self._bits, "right") - 1

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Rows of the range for int64 [n] rows of the run."""
        at = self._guess[np.minimum(rows >> self._bits, len(self._guess) - 1)]
        for _ in range(GUESSES):
            late = rows >= self._ends[at]
            if not late.any():
                break
            at = at + late
        else:
            at = np.searchsorted(self._starts, rows, side="right") - 1
        places: np.ndarray = rows + self._shifts[at]
        return places


class Activations:
    """The rows of a name. `run[name][10:20]` and `run[name][indices]` are torch tensors of the stored dtype, copies."""

    def __init__(self, parts: Parts, name: str, width: int, dtype: str) -> None:
        self.name = name
        self.shape = (parts.rows, width)
        self.dtype = TORCH_DTYPES[dtype]
        self._parts, self._stored = parts, dtype
        self._numpy = np.dtype(DTYPES[dtype])

    def __repr__(self) -> str:
        return f"Activations({self.name!r}, {self._stored} [{self.shape[0]}, {self.shape[1]}])"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> torch.Tensor:
        """[n, d] for a slice, indices (any order, negative ones from the end) or a mask; [d] for one int."""
        if isinstance(rows, slice) and rows.step in (None, 1):
            start, stop, _ = rows.indices(len(self))
            return as_tensor(self._read(start, max(start, stop)), self._stored)
        found = self.gather(row_numbers(rows, len(self)))
        single = isinstance(rows, int | np.integer) or (isinstance(rows, torch.Tensor | np.ndarray) and rows.ndim == 0)
        return found[0] if single else found

    def numpy(self, rows: Any = None, dtype: str = "float32") -> np.ndarray:
        """Rows (all by default) as numpy [n, d]; float32 and float64 hold every stored value exactly."""
        if dtype not in ("float16", "float32", "float64"):
            raise RequestError(f"dtype = {dtype!r}: allowed are float16, float32 and float64")
        found = self[:] if rows is None else self[rows]
        array: np.ndarray = found.to(getattr(torch, dtype)).numpy()
        return array

    def empty(self, rows: int) -> np.ndarray:
        """Room for so many rows, as the store holds them, contents undefined."""
        return np.empty((rows, self.shape[1]), self._numpy)

    def gather(self, rows: np.ndarray, out: np.ndarray | None = None, threads: int = GATHER_THREADS) -> torch.Tensor:
        """Rows at int64 [n], each in [0, len), any order, as a tensor [n, d] over `out`, or a new one.

        The numbers are not checked. `threads`: how many may share a large gather.
        """
        out = self.empty(len(rows)) if out is None else out
        mapped = self._mapped
        if mapped is not None:
            return as_tensor(_take(mapped.rows, mapped.places(rows), out, threads), self._stored)
        order = np.argsort(rows, kind="stable")
        held, ordered = np.empty_like(out), rows[order]
        for part, span in self._parts.split(ordered):
            self._array(part).gather(ordered[span] - self._parts.starts[part], held[span])
        out[order] = held
        return as_tensor(out, self._stored)

    @functools.cached_property
    def _mapped(self) -> _Mapped | None:
        """All objects in one range of addresses; None where the rows are not on a disk of this machine."""
        parts = self._parts
        if not parts.files.local or not parts.rows:
            return None
        files, starts = [], []
        for part, first in enumerate(parts.starts[:-1]):
            array = self._array(part)
            for number in range(array.grid.objects):
                path = array.check_object(number)
                files.append((f"{parts.files.url}/{path}", array.grid.rows_of(number)))
                starts.append(int(first) + number * array.grid.outer)
        row_bytes = self.shape[1] * self._numpy.itemsize
        if not can_map(files, row_bytes):
            return None
        mapped = MappedRows(files, row_bytes)
        return _Mapped(np.array(starts), mapped.first_rows, mapped.bytes.view(self._numpy))

    def _read(self, start: int, stop: int) -> np.ndarray:
        """Consecutive rows as a new array."""
        out = np.empty((stop - start, self.shape[1]), self._numpy)
        starts = self._parts.starts
        part = int(np.searchsorted(starts, start, side="right")) - 1
        row = start
        while row < stop:
            end = min(stop, int(starts[part + 1]))
            array = self._array(part)
            out[row - start : end - start] = array.read(row - int(starts[part]), end - int(starts[part]))
            row, part = end, part + 1
        return out

    def _array(self, part: int) -> StoredArray:
        return self._parts.array(part, self.name, self.shape[1], self._stored)


def as_tensor(rows: np.ndarray, dtype: str) -> torch.Tensor:
    """Rows as the store holds them (bfloat16 as uint16 bits) as a tensor of their dtype, sharing the memory."""
    if dtype == "bfloat16":
        return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(rows)


def _take(source: np.ndarray, rows: np.ndarray, out: np.ndarray, threads: int) -> np.ndarray:
    """source[rows] into `out`, by several threads where it is large."""
    count = min(threads, _cores(), out.nbytes // PIECE_BYTES)
    if count < 2:
        return np.take(source, rows, axis=0, out=out, mode="clip")  # "clip" spares a buffer
    step = -(-len(rows) // count)
    pieces = [slice(start, start + step) for start in range(0, len(rows), step)]
    list(_threads(os.getpid()).map(lambda at: np.take(source, rows[at], axis=0, out=out[at], mode="clip"), pieces))
    return out


@functools.cache
def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _threads(process: int) -> ThreadPoolExecutor:
    """One pool per process: after a fork, as loaders do, the parent's threads are not there."""
    return ThreadPoolExecutor(min(GATHER_THREADS, _cores()), thread_name_prefix="harvest-gather")
