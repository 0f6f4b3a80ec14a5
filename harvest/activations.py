"""The rows of one name over all committed shards, as if they were one tensor; only what is asked for is read."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from harvest.errors import RequestError
from harvest.int8 import values_of
from harvest.rawrows import GATHER_THREADS, Parts, RawRows
from harvest.store.layout import scale_name
from harvest.storedrows import as_tensor, read_dtype


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
    """The rows of a name. `run[name][10:20]` and `run[name][indices]` are torch tensors, copies, of the stored dtype;
    of int8 rows the values, float32."""

    def __init__(self, parts: Parts, name: str, width: int, dtype: str, chunk_rows: int = 1) -> None:
        """`chunk_rows`: those that have to be read together to read one, at most."""
        self.name = name
        self.shape = (parts.rows, width)
        self.stored = dtype
        """The stored dtype."""
        self.dtype = read_dtype(dtype)
        self.row_bytes = width * self.dtype.itemsize
        """As it is read."""
        self.chunk_rows = chunk_rows
        self._rows = RawRows(parts, name, width, dtype)
        self._scales = RawRows(parts, scale_name(name), 1, "float32") if dtype == "int8" else None

    def __repr__(self) -> str:
        return f"Activations({self.name!r}, {self.stored} [{self.shape[0]}, {self.shape[1]}])"

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> torch.Tensor:
        """[n, d] for a slice, indices (any order, negative ones from the end) or a mask; [d] for one int."""
        if isinstance(rows, slice) and rows.step in (None, 1):
            start, stop, _ = rows.indices(len(self))
            return self.read(start, max(start, stop))
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
        """Room for so many rows as `gather` fills it (bfloat16 as uint16 bits), contents undefined."""
        return self._rows.empty(rows) if self._scales is None else np.empty((rows, self.shape[1]), np.float32)

    @property
    def mapped(self) -> bool:
        """Any row is as near as any other."""
        return self._rows.mapped

    def renamed(self, name: str) -> Activations:
        """The same rows under another name."""
        found = copy.copy(self)
        found.name = name
        return found

    def over(self, rows: np.ndarray) -> torch.Tensor:
        """What `empty` made as a tensor, sharing the memory."""
        return as_tensor(rows, str(self.dtype).removeprefix("torch."))

    def gather(self, rows: np.ndarray, out: np.ndarray | None = None, threads: int = GATHER_THREADS) -> torch.Tensor:
        """Rows at int64 [n], each in [0, len), any order, as a tensor [n, d] over `out`, or a new one.

        The numbers are not checked. `threads`: how many may share a large gather.
        """
        if self._scales is None:
            return as_tensor(self._rows.gather(rows, out, threads), self.stored)
        codes, scales = self._rows.gather(rows, None, threads), self._scales.gather(rows, None, threads)
        return _values(codes, scales, self.empty(len(rows)) if out is None else out)

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> torch.Tensor:
        """Rows [start, stop), both in [0, len], as a tensor [n, d] over `out`, or a new one."""
        if self._scales is None:
            return as_tensor(self._rows.read(start, stop, out), self.stored)
        out = self.empty(stop - start) if out is None else out
        return _values(self._rows.read(start, stop), self._scales.read(start, stop), out)


def _values(codes: np.ndarray, scales: np.ndarray, out: np.ndarray) -> torch.Tensor:
    return values_of(torch.from_numpy(codes), torch.from_numpy(scales), torch.from_numpy(out))
