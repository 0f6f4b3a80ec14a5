"""Rows of a run in an object store, or compressed, copied to a file here once, for an export that picks them out.

Shuffled or filtered straight from the store, every row would be a request of its own, or a whole chunk decoded.
"""

from __future__ import annotations

import shutil
import tempfile

import numpy as np
import torch

from harvest.errors import RequestError
from harvest.reading.activations import Activations
from harvest.store.files import naming_full_disk
from harvest.store.storedrows import as_tensor

READ_BYTES = 32 << 20
"""Of one read from the store."""


class Staged:
    """The rows of a name in a temporary file that has no name and goes with the process."""

    def __init__(self, array: Activations) -> None:
        """Reads all of them. Raises WorkError naming the folder where the disk fills up."""
        self._dtype = str(array.dtype).removeprefix("torch.")
        one = array.empty(1)
        step = max(1, READ_BYTES // one.nbytes)
        with tempfile.TemporaryFile() as file, naming_full_disk(tempfile.gettempdir(), len(array) * one.nbytes):
            for start in range(0, len(array), step):
                rows = array[start : start + step]
                file.write(rows.view(torch.uint8).numpy().data)
            file.flush()
            self._rows = np.memmap(file, one.dtype, mode="r", shape=array.shape)

    def gather(self, rows: np.ndarray) -> torch.Tensor:
        """Rows at int64 [n], as `Activations.gather`."""
        return as_tensor(np.take(self._rows, rows, axis=0), self._dtype)


def refuse_without_room(needed: int) -> None:
    """Raises RequestError where this machine has no room for so many bytes."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise RequestError(
            f"a run in an object store or compressed, shuffled or filtered, is copied to {folder} first: {needed:,} "
            f"bytes are needed, {free:,} are free; TMPDIR names another folder"
        )
