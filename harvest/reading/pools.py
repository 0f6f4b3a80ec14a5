"""Pools of rows in memory: what batches are made of where a row alone would cost a request, or a whole chunk."""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from harvest.reading.activations import Activations
from harvest.reading.shuffle import BlockOrder, Places

POOL_BYTES = 256 << 20
"""Of a pool, as stored, over all names; up to three are in memory: one in use, the one before it, the next one being
read."""
BLOCK_BYTES = 1 << 20
"""Of a block of the widest name, where rows can be read one by one: what is worth a request."""
MIXED = 16
"""Blocks of a pool, at least: of fewer, rows that follow one another would make up the most of a batch."""
HELD = 3
READERS = 4
"""Blocks that are read at a time: in an object store each waits for an answer, and decoding takes a core."""


def block_order(arrays: Sequence[Activations], count: int, seed: int) -> BlockOrder:
    """For batches of so many rows of these names.

    A block is a whole chunk where those have to be read whole, unless a pool would then hold few: better each chunk is
    decoded for several pools than that pools outgrow their bytes, or hardly mix.
    """
    pool_rows = POOL_BYTES // sum(array.row_bytes for array in arrays)
    worth = max(BLOCK_BYTES // max(array.row_bytes for array in arrays), *(array.chunk_rows for array in arrays))
    return BlockOrder(count, max(1, min(worth, pool_rows // MIXED)), pool_rows, seed)


class Pools:
    """Reads pools when they are first asked for, and ahead when told; any number of threads may ask."""

    def __init__(self, arrays: Sequence[Activations], order: BlockOrder, rows: np.ndarray | None) -> None:
        """`rows` int64 [count]: the row of the run at each row of the order; None where they are the same."""
        self._arrays, self._order, self._rows = arrays, order, rows
        self._held: OrderedDict[tuple[int, int], Future[list[list[np.ndarray]]]] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Pools, (self._arrays, self._order, self._rows)

    def ask(self, epoch: int, pool: int) -> Future[list[list[np.ndarray]]]:
        """The rows of a pool in a room of each name; being read when this returns."""
        key = (0 if self._order.pools == 1 else epoch, pool)
        with self._lock:
            if key not in self._held:
                self._held[key] = _behind(os.getpid()).submit(self._read, epoch, pool)
                while len(self._held) > HELD:
                    self._held.popitem(last=False)
            self._held.move_to_end(key)
            return self._held[key]

    def take(self, epoch: int, places: Places, room: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Rows at these places, [k, d] over `room` for each name."""
        for pool in np.unique(places.pool).tolist():
            at = np.flatnonzero(places.pool == pool)
            inside = places.inside[at]
            for array, held, out in zip(self._arrays, self.ask(epoch, pool).result(), room):
                if len(at) == len(out):
                    array.pick(held, inside, out)
                else:
                    part = array.empty(len(at))
                    array.pick(held, inside, part)
                    out[at] = part
        return [array.over(out) for array, out in zip(self._arrays, room)]

    def _read(self, epoch: int, pool: int) -> list[list[np.ndarray]]:
        blocks = self._order.rows_of(epoch, pool)
        starts = np.cumsum([0, *map(len, blocks)]).tolist()
        rooms = [array.room(starts[-1]) for array in self._arrays]

        def read(number: int) -> None:
            block = blocks[number]
            for array, room in zip(self._arrays, rooms):
                array.fill(room, starts[number], block if self._rows is None else self._rows[block.start : block.stop])

        list(_readers(os.getpid()).map(read, range(len(blocks))))
        return rooms


@functools.cache
def _behind(process: int) -> ThreadPoolExecutor:
    """Reads one pool at a time; per process: threads do not survive a fork."""
    return ThreadPoolExecutor(1, thread_name_prefix="harvest-pool")


@functools.cache
def _readers(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(READERS, thread_name_prefix="harvest-blocks")
