"""The rows of one array over all committed shards as they are stored, mapped as one range where that can be."""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from harvest.records import ArraySpec, ShardRecord
from harvest.store.arrays import StoredArray
from harvest.store.chunks import DecodedChunks
from harvest.store.files import Files
from harvest.store.grid import DTYPES
from harvest.store.mapped import MappedRows, can_map

MAX_OPEN_ARRAYS = 16_384
"""Arrays kept open by one run: each maps at least one object, and Linux allows 65,530 maps to a process."""
DECODED_BYTES = 64 << 20
"""Of compressed chunks that stay decoded, beside one of each name: rows read one after another share theirs."""
PIECE_BYTES = 1 << 20
"""What is worth handing to another thread."""
GATHER_THREADS = 4
"""At most. Ours and not torch's: its threads spin for one another, and beside a busy neighbour a gather on two of
them ran at a fifth of one."""
GUESSES = 4
"""Objects that a row may be off its guess before a search is cheaper."""


class Parts:
    """Which rows lie in which shard: shards in dataset order, those of one run after those of another."""

    def __init__(self, runs: Sequence[tuple[Files, Sequence[ShardRecord]]], chunks_bytes: int = 0) -> None:
        """`runs`: the files and records of each run, most often of one; `chunks_bytes`: of a compressed chunk of each
        name together."""
        self._made_of = list(runs), chunks_bytes
        held = [(number, files, record) for number, (files, records) in enumerate(runs) for record in records]
        held = [part for part in held if part[2].rows]
        self.runs = [number for number, _, _ in held]
        """Which run each part belongs to."""
        self.files = [files for _, files, _ in held]
        self.records = [record for _, _, record in held]
        self.local = all(files.local for files, _ in runs)
        """Every run is in a folder of this machine."""
        self.starts = np.cumsum([0, *(record.rows for record in self.records)], dtype=np.int64)
        self.rows = int(self.starts[-1])
        self._arrays: OrderedDict[tuple[int, str], StoredArray] = OrderedDict()
        self._decoded = DecodedChunks(DECODED_BYTES + chunks_bytes)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process everything is opened anew, by its path: the same shards, however the run has grown."""
        return Parts, self._made_of

    def split(self, indices: np.ndarray) -> Iterator[tuple[int, slice]]:
        """(part, the slice of `indices` that lies in it) for rising row numbers int64 [n]."""
        cuts = np.searchsorted(indices, self.starts)
        for part in np.flatnonzero(np.diff(cuts)):
            yield int(part), slice(int(cuts[part]), int(cuts[part + 1]))

    def array(self, part: int, name: str, width: int, dtype: str) -> StoredArray:
        """The array of a name in a shard, kept open for the next call. Raises DamageError."""
        record, key = self.records[part], (part, name)
        with self._lock:
            found = self._arrays.pop(key, None)
            if found is None:
                spec = ArraySpec(rows=record.rows, width=width, dtype=dtype)
                found = StoredArray(self.files[part], record.attempt, name, spec, self._decoded)
                if len(self._arrays) >= MAX_OPEN_ARRAYS:
                    self._arrays.popitem(last=False)
            self._arrays[key] = found
        return found


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


class RawRows:
    """[rows, width] of one array in the stored dtype (bfloat16 as uint16 bits), as numpy copies."""

    def __init__(self, parts: Parts, name: str, width: int, dtype: str) -> None:
        self.name, self.shape, self.dtype = name, (parts.rows, width), dtype
        self.numpy_dtype = np.dtype(DTYPES[dtype])
        self._parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return RawRows, (self._parts, self.name, self.shape[1], self.dtype)

    def empty(self, rows: int) -> np.ndarray:
        """Room for so many rows, contents undefined."""
        return np.empty((rows, self.shape[1]), self.numpy_dtype)

    def gather(self, rows: np.ndarray, out: np.ndarray | None = None, threads: int = GATHER_THREADS) -> np.ndarray:
        """Rows at int64 [n], each in [0, len), any order, into `out` where given. The numbers are not checked.

        `threads`: how many may share a large gather.
        """
        out = self.empty(len(rows)) if out is None else out
        mapped = self._mapped
        if mapped is not None:
            return _take(mapped.rows, mapped.places(rows), out, threads)
        order = np.argsort(rows, kind="stable")
        held, ordered = np.empty_like(out), rows[order]
        for part, span in self._parts.split(ordered):
            self._array(part).gather(ordered[span] - self._parts.starts[part], held[span])
        out[order] = held
        return out

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        """Rows [start, stop), into `out` where given."""
        out = self.empty(stop - start) if out is None else out
        starts = self._parts.starts
        part = int(np.searchsorted(starts, start, side="right")) - 1
        row = start
        while row < stop:
            end = min(stop, int(starts[part + 1]))
            array = self._array(part)
            array.read(row - int(starts[part]), end - int(starts[part]), out[row - start : end - start])
            row, part = end, part + 1
        return out

    @property
    def mapped(self) -> bool:
        """Any row is as near as any other: all are mapped in one range of addresses, or there are none."""
        return self._mapped is not None or not self._parts.rows

    @functools.cached_property
    def _mapped(self) -> _Mapped | None:
        """All objects in one range of addresses; None where the rows are elsewhere, or compressed."""
        parts = self._parts
        if not parts.local or not parts.rows:
            return None
        files, starts = [], []
        for part, first in enumerate(parts.starts[:-1]):
            array = self._array(part)
            if array.compressed:
                return None
            for number in range(array.grid.objects):
                path = array.check_object(number)
                files.append((f"{parts.files[part].url}/{path}", array.grid.rows_of(number)))
                starts.append(int(first) + number * array.grid.outer)
        row_bytes = self.shape[1] * self.numpy_dtype.itemsize
        if not can_map(files, row_bytes):
            return None
        mapped = MappedRows(files, row_bytes)
        return _Mapped(np.array(starts), mapped.first_rows, mapped.bytes.view(self.numpy_dtype))

    def _array(self, part: int) -> StoredArray:
        return self._parts.array(part, self.name, self.shape[1], self.dtype)


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
