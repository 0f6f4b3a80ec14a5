"""The rows of a name in one shard as values, whatever they are stored as: what verification and pooling read."""

from __future__ import annotations

import numpy as np
import torch

from harvest.records import ArraySpec
from harvest.store.arrays import StoredArray
from harvest.store.files import Files
from harvest.store.int8 import values_of
from harvest.store.layout import scale_name

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Those that rows are read in."""


def read_dtype(stored: str) -> torch.dtype:
    """What rows of a stored dtype are read as: int8 as float32."""
    return TORCH_DTYPES.get(stored, torch.float32)


def as_tensor(rows: np.ndarray, dtype: str) -> torch.Tensor:
    """Rows as the store holds them (bfloat16 as uint16 bits) as a tensor of their dtype, sharing the memory."""
    if dtype == "bfloat16":
        return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(rows)


class StoredRows:
    """[rows, width] of one array, or of int8 codes and their scales."""

    def __init__(self, files: Files, attempt: str, name: str, spec: ArraySpec) -> None:
        """Raises DamageError where an array is missing, or not what `spec` says."""
        self.arrays = [StoredArray(files, attempt, name, spec)]
        """Of the codes and of the scales, for int8."""
        if spec.dtype == "int8":
            scales = ArraySpec(rows=spec.rows, width=1, dtype="float32")
            self.arrays.append(StoredArray(files, attempt, scale_name(name), scales))
        self.shape = self.arrays[0].shape
        self.dtype = read_dtype(spec.dtype)

    @property
    def row_bytes(self) -> int:
        """Of a row as it is read."""
        return self.shape[1] * self.dtype.itemsize

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) as a new tensor."""
        return self._values(*(array.read(start, stop) for array in self.arrays))

    def take(self, rows: np.ndarray) -> torch.Tensor:
        """Rows at int64 indices as a new tensor."""
        return self._values(*(array.gather(rows) for array in self.arrays))

    def _values(self, first: np.ndarray, scales: np.ndarray | None = None) -> torch.Tensor:
        if scales is not None:
            return values_of(torch.from_numpy(first), torch.from_numpy(scales))
        return as_tensor(first, self.arrays[0].dtype)

    def check(self) -> None:
        """Raises DamageError unless every object is there in full, with the index that belongs to it."""
        for array in self.arrays:
            for number in range(array.grid.objects):
                array.check_object(number)
                array.check_index(number)
