"""The rows of one name over all committed shards, as if they were one array; only what is asked for is read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from harvest.errors import RequestError
from harvest.records import ArraySpec, ShardRecord
from harvest.store.arrays import DTYPES, StoredArray
from harvest.store.files import Files

MAX_OPEN_ARRAYS = 16_384
"""Arrays kept open by one run: each maps at least one object, and Linux allows 65,530 maps to a process."""
PIECE_BYTES = 1 << 20
"""A gather is worth a second thread from about two pieces of this size on."""
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


class Activations:
    """The rows of a name. `run[name][10:20]` and `run[name][indices]` are torch tensors of the stored dtype, copies."""

    def __init__(self, parts: Parts, name: str, width: int, dtype: str) -> None:
        self.name = name
        self.shape = (parts.rows, width)
        self.dtype = TORCH_DTYPES[dtype]
        self._parts, self._stored = parts, dtype
        self._numpy = np.dtype(DTYPES[dtype])
        self._scratch = threading.local()

    def __repr__(self) -> str:
        return f"Activations({self.name!r}, {self._stored} [{self.shape[0]}, {self.shape[1]}])"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> torch.Tensor:
        """[n, d] for a slice, indices (any order, negative ones from the end) or a mask; [d] for one int."""
        if isinstance(rows, slice) and rows.step in (None, 1):
            start, stop, _ = rows.indices(len(self))
            return self._tensor(self._read(start, max(start, stop)))
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

    def gather(self, rows: np.ndarray, threads: ThreadPoolExecutor | None = None) -> torch.Tensor:
        """Rows at int64 [n], each in [0, len), any order, as a new tensor [n, d]; no check of the numbers."""
        out = np.empty((len(rows), self.shape[1]), self._numpy)
        if len(rows) < 2 or len(self._parts.records) == 1:
            self._gather_sorted(rows, out, threads)
            return self._tensor(out)
        order = np.argsort(rows, kind="stable")
        held = self._buffer(len(rows))
        self._gather_sorted(rows[order], held, threads)
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        np.take(held, back, axis=0, out=out, mode="clip")  # "clip" spares a second buffer
        return self._tensor(out)

    def _gather_sorted(self, rows: np.ndarray, out: np.ndarray, threads: ThreadPoolExecutor | None) -> None:
        """Rising row numbers (any order where there is one shard) into `out`, shard by shard."""
        one = len(self._parts.records) == 1
        spans = [(0, slice(0, len(rows)))] if one else list(self._parts.split(rows))
        if threads is not None and out.nbytes >= 2 * PIECE_BYTES:
            list(threads.map(lambda item: self._gather_part(item[0], item[1], rows, out), _cut(spans, len(rows))))
            return
        for part, span in spans:
            self._gather_part(part, span, rows, out)

    def _gather_part(self, part: int, span: slice, rows: np.ndarray, out: np.ndarray) -> None:
        array = self._parts.array(part, self.name, self.shape[1], self._stored)
        array.gather(rows[span] - self._parts.starts[part], out[span])

    def _read(self, start: int, stop: int) -> np.ndarray:
        """Consecutive rows as a new array."""
        out = np.empty((stop - start, self.shape[1]), self._numpy)
        starts = self._parts.starts
        part = int(np.searchsorted(starts, start, side="right")) - 1
        row = start
        while row < stop:
            end = min(stop, int(starts[part + 1]))
            array = self._parts.array(part, self.name, self.shape[1], self._stored)
            out[row - start : end - start] = array.read(row - int(starts[part]), end - int(starts[part]))
            row, part = end, part + 1
        return out

    def _buffer(self, rows: int) -> np.ndarray:
        """This thread's buffer [rows, d]: new memory for every batch costs as much as the copy into it."""
        held: np.ndarray | None = getattr(self._scratch, "rows", None)
        if held is None or len(held) < rows:
            held = np.empty((rows, self.shape[1]), self._numpy)
            self._scratch.rows = held
        return held[:rows]

    def _tensor(self, rows: np.ndarray) -> torch.Tensor:
        if self._stored == "bfloat16":
            return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(rows)


def _cut(spans: Sequence[tuple[int, slice]], rows: int) -> list[tuple[int, slice]]:
    """The spans, large ones cut so that two threads have something to share."""
    most = max(1, rows // 4)
    return [
        (part, slice(start, min(start + most, span.stop)))
        for part, span in spans
        for start in range(span.start, span.stop, most)
    ]
