"""Where captured rows gather until they are written: allocated once, a few sets in turn."""

from __future__ import annotations

import queue
from collections.abc import Mapping

import torch

Rows = Mapping[str, torch.Tensor]
"""Name -> [rows, d] in the stored dtype, on the host."""


WRITERS = 4
"""Names that are written side by side to a folder from an accelerator, which leaves cores free for it."""
UPLOADS = 8
"""To an object store, where each is a stream of its own that mostly waits."""


def writers_for(device: str, *, local: bool) -> int:
    """Names that are written side by side: to a folder from a CPU one, for others would take the forward's cores."""
    return UPLOADS if not local else 1 if device == "cpu" else WRITERS


def sets_for(device: str) -> int:
    """One fills while another is written; where an accelerator fills them, a third is reduced meanwhile."""
    return 2 if device == "cpu" else 3


class Buffers:
    """So many sets of row buffers; who wants one more waits: back-pressure."""

    def __init__(self, widths: Mapping[str, int], dtype: torch.dtype, *, sets: int, pinned: bool) -> None:
        """`widths`: name -> values of a row; `pinned`: page-locked, for copies from an accelerator."""
        self._widths, self._dtype, self._pinned = widths, dtype, pinned
        self._free: queue.SimpleQueue[dict[str, torch.Tensor]] = queue.SimpleQueue()
        for _ in range(sets):
            self._free.put({})
        self._lent: dict[int, dict[str, torch.Tensor]] = {}

    def take(self, rows: int) -> Rows:
        """Name -> [rows, d], contents undefined; waits until a set is free."""
        buffers = self._free.get()
        for name, width in self._widths.items():
            if name not in buffers or len(buffers[name]) < rows:
                buffers[name] = torch.empty(rows, width, dtype=self._dtype, pin_memory=self._pinned)
        views = {name: buffer[:rows] for name, buffer in buffers.items()}
        self._lent[id(views)] = buffers
        return views

    def give_back(self, views: Rows) -> None:
        """Frees what `take` returned."""
        self._free.put(self._lent.pop(id(views)))
