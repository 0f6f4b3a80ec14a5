"""The rows of one name over all committed shards, as if they were one tensor; only what is asked for is read."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from harvest import glance
from harvest.errors import RequestError
from harvest.store.int8 import values_of
from harvest.store.layout import scale_name
from harvest.store.rawrows import GATHER_THREADS, Parts, RawRows
from harvest.store.storedrows import as_tensor, read_dtype


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
        """`residual.12`."""
        self.shape = (parts.rows, width)
        """(rows, values of a row)."""
        self.stored = dtype
        """The stored dtype."""
        self.dtype = read_dtype(dtype)
        """Of the tensors that are given: float32 where int8 is stored."""
        self.chunk_rows = chunk_rows
        """Rows that have to be read together to read one, at most."""
        self._raw = [RawRows(parts, name, width, dtype)]
        """Of int8 the codes, and the scales."""
        if dtype == "int8":
            self._raw.append(RawRows(parts, scale_name(name), 1, "float32"))
        self.row_bytes = sum(raw.shape[1] * raw.numpy_dtype.itemsize for raw in self._raw)
        """As it is stored, before compression."""

    def __repr__(self) -> str:
        return f"Activations({self.name!r}, {self.stored} [{self.shape[0]}, {self.shape[1]}])"

    def _repr_html_(self) -> str:
        rows = [
            ("rows", f"{self.shape[0]:,}"),
            ("width", f"{self.shape[1]:,}"),
            ("dtype", self.stored if self.stored != "int8" else "int8 with a scale per row, read as float32"),
            ("size", f"{glance.size(self.shape[0] * self.row_bytes)} before compression"),
        ]
        note = "[10:20], [indices], [mask] give torch tensors; .numpy(rows) numpy"
        return glance.html(f"Activations {self.name}", rows, note=note)

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
        return self._raw[0].empty(rows) if len(self._raw) == 1 else np.empty((rows, self.shape[1]), np.float32)

    @property
    def mapped(self) -> bool:
        """Any row is as near as any other."""
        return self._raw[0].mapped

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
        if len(self._raw) == 1:
            return as_tensor(self._raw[0].gather(rows, out, threads), self.stored)
        return self._values([raw.gather(rows, None, threads) for raw in self._raw], out)

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> torch.Tensor:
        """Rows [start, stop), both in [0, len], as a tensor [n, d] over `out`, or a new one."""
        if len(self._raw) == 1:
            return as_tensor(self._raw[0].read(start, stop, out), self.stored)
        return self._values([raw.read(start, stop) for raw in self._raw], out)

    def _values(self, stored: Sequence[np.ndarray], out: np.ndarray | None) -> torch.Tensor:
        codes, scales = map(torch.from_numpy, stored)
        return values_of(codes, scales, torch.from_numpy(self.empty(len(codes)) if out is None else out))

    # ---- rows that are held as they are stored: of int8 in a quarter of the memory -------------------------------

    def room(self, rows: int) -> list[np.ndarray]:
        """For so many rows as they are stored, contents undefined."""
        return [raw.empty(rows) for raw in self._raw]

    def fill(self, room: Sequence[np.ndarray], start: int, rows: range | np.ndarray) -> None:
        """Reads rows, a range of them or int64 [n] in any order, into the room from its row `start` on."""
        for raw, held in zip(self._raw, room):
            out = held[start : start + len(rows)]
            if isinstance(rows, range):
                raw.read(rows.start, rows.stop, out)
            else:
                raw.gather(rows, out, threads=1)

    def pick(self, room: Sequence[np.ndarray], places: np.ndarray, out: np.ndarray) -> torch.Tensor:
        """What `gather` gives, of the rows at these places of a room, int64 [n]."""
        if len(self._raw) == 1:
            return as_tensor(np.take(room[0], places, axis=0, out=out, mode="clip"), self.stored)  # spares a buffer
        return self._values([np.take(held, places, axis=0) for held in room], out)
