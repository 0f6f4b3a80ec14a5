"""Shuffled batches for training: every row once an epoch, in an order that the row count, seed and epoch alone decide.

The order is a keyed bijection of the row numbers, so it needs no table, starts at once and resumes anywhere. Where a
row alone is dear, in an object store or a compressed chunk, blocks of rows are mixed a pool at a time instead.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harvest.activations import Activations
from harvest.errors import RequestError
from harvest.pools import Pools, block_order
from harvest.shuffle import Places, Shuffle

STEPS_AHEAD = 16
"""Batches whose row numbers are worked out at once: the last few of a cycle walk cost as much as thousands."""
AHEAD = 2
"""Batches that are gathered while the caller works with one."""


class Batches:
    """An iterator that can be stopped, saved and continued; iterated to the end it starts anew, with the next epoch.

    So three loops over one object go through the orders of one loop over `epochs=3`.
    Rank r of `world` takes the batches r, r + world, ... of the global order: disjoint, together complete; of mixed
    blocks one stretch of batches after another, so that no two ranks read the same pools.
    """

    def __init__(
        self,
        arrays: Sequence[Activations],
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int = 1,
        with_rows: bool = False,
        stack: bool = False,
        single: bool = False,
        rows: np.ndarray | None = None,
        rank: int = 0,
        world: int = 1,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        blocks: bool = False,
    ) -> None:
        """`rows` int64 [n]: the row numbers to go through, all by default; `single`: yield the one array's tensor;
        `blocks`: shuffled by mixing blocks."""
        self._arrays, self._rows = list(arrays), rows
        self._count = len(arrays[0]) if rows is None else len(rows)
        self._with_rows, self._stack, self._single = with_rows, stack, single
        self._dtype, self._device = dtype, device
        self._order = {
            "rows": self._count,
            "seed": seed,
            "shuffle": shuffle,
            "batch_size": batch_size,
            "rank": rank,
            "world": world,
        }
        self._pools: Pools | None = None
        if blocks and shuffle:
            self._blocks = block_order(self._arrays, self._count, seed)
            self._pools = Pools(self._arrays, self._blocks, rows)
            self._order |= {"block_rows": self._blocks.block_rows, "pool_blocks": self._blocks.pool_blocks}
        self._selection = None if rows is None else hashlib.blake2b(rows.tobytes(), digest_size=8).hexdigest()
        self._epochs = epochs
        self._batch_size, self._rank, self._world = min(batch_size, max(1, self._count)), rank, world
        whole = -(-self._count // batch_size)
        self._steps = range(rank, whole, world)
        """Batches of the epoch's order that are this rank's."""
        if self._pools is not None:
            self._steps = range(whole * rank // world, whole * (rank + 1) // world)
        self._per_epoch = len(self._steps)
        self._epoch = 0
        """The one that this pass began with."""
        self._done = 0
        self._ended = False
        """Whether this iterator itself has come to its end; one that was loaded there has not."""
        self._slab: tuple[tuple[int, int], _Slab] | None = None
        """(epoch, part) and what is worked out of it."""
        self._ahead: deque[tuple[tuple[int, int, int], Future[_Gathered]]] = deque()
        """(process, first epoch, number) of each batch that is gathered behind, the next one first."""

    def __repr__(self) -> str:
        names = ", ".join(array.name for array in self._arrays)
        return f"Batches({names}: {self._done} of {len(self)} batches of {self._batch_size})"

    @property
    def mixing(self) -> str:
        """How well an epoch is mixed, in words."""
        if not self._order["shuffle"]:
            return "none: rows come in order"
        if self._pools is None:
            return f"global: all {self._count:,} rows"
        order = self._blocks
        return (
            f"blocks: {order.pool_blocks:,} of {order.blocks:,} blocks of {order.block_rows:,} consecutive rows at a "
            "time, chosen at random; the rows of those are mixed with one another"
        )

    def __len__(self) -> int:
        """Batches of this rank over all epochs."""
        return self._per_epoch * self._epochs

    def __iter__(self) -> Iterator[Any]:
        if self._ended:
            self._epoch, self._done, self._ended = self._epoch + self._epochs, 0, False
        return self

    def __next__(self) -> Any:
        """A tensor [B, d]; {name: tensor} for several names; [B, names, d] with stack; (that, rows) with_rows."""
        if self._done >= len(self):
            self._ended = True
            raise StopIteration
        gathered = self._gathered()
        values = self._values(gathered.values)
        self._done += 1
        rows = gathered.rows
        return (values, torch.from_numpy(rows)) if self._with_rows else values

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is; JSON. It fits any iterator with the same rows, seed, batch size, rank and world."""
        state = {"version": 1, "epoch": self._epoch, "done": self._done, "selection": self._selection}
        return {**state, **self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on exactly where the state was taken. Raises RequestError naming what differs."""
        own = self.state_dict()
        for key, value in own.items():
            if key not in ("done", "epoch") and state.get(key) != value:
                raise RequestError(f"state of batches: {key} is {state.get(key)!r}, here it is {value!r}")
        for key in ("done", "epoch"):
            if type(state.get(key)) is not int or state[key] < 0:
                raise RequestError(
                    f"state of batches: {key} is {state.get(key)!r}; allowed is a whole number of at least 0"
                )
        self._epoch, self._done, self._ended = state["epoch"], state["done"], False

    def _gathered(self) -> _Gathered:
        """The next batch; the ones after it are gathered behind while the caller works with this one."""
        here = os.getpid(), self._epoch, self._done
        if not self._ahead or self._ahead[0][0] != here:  # at the start, after a jump, and in a forked process
            self._ahead.clear()
        for number in range(self._done + len(self._ahead), min(self._done + 1 + AHEAD, len(self))):
            slab = self._slab_of(number)
            # Made here: memory that threads take and free goes back to the system, and zeroing it anew for every
            # batch costs half as much as the gather.
            room = [array.empty(len(slab.rows)) for array in self._arrays]
            following = _behind(os.getpid()).submit(self._gather, slab, room)
            self._ahead.append(((os.getpid(), self._epoch, number), following))
        return self._ahead.popleft()[1].result()

    def _gather(self, slab: _Slab, room: list[np.ndarray]) -> _Gathered:
        if self._pools is not None and slab.places is not None:
            if slab.next_pool is not None:
                self._pools.ask(*slab.next_pool)
            found = self._pools.take(slab.epoch, slab.places, room)
        else:
            found = [array.gather(slab.rows, out, threads=1) for array, out in zip(self._arrays, room)]
        return _Gathered(slab.rows, {array.name: rows for array, rows in zip(self._arrays, found)})

    def _slab_of(self, number: int) -> _Slab:
        """Where a batch's rows are; those of STEPS_AHEAD batches are worked out together."""
        epoch, step = divmod(number, self._per_epoch)
        epoch += self._epoch
        part, inside = divmod(step, STEPS_AHEAD)
        if self._slab is None or self._slab[0] != (epoch, part):
            self._slab = (epoch, part), self._work_out(epoch, self._steps[part * STEPS_AHEAD :][:STEPS_AHEAD])
        return self._slab[1].cut(inside * self._batch_size, (inside + 1) * self._batch_size)

    def _work_out(self, epoch: int, steps: range) -> _Slab:
        """The rows of these batches, one after another."""
        positions = ((np.array(steps) * self._batch_size)[:, None] + np.arange(self._batch_size)).reshape(-1)
        positions = positions[: np.searchsorted(positions, self._count)]  # only the last batch of all is short
        places = next_pool = None
        if self._pools is not None:
            places = self._blocks.places(epoch, positions)
            positions = places.rows
            next_pool = self._next_pool(epoch, int(places.pool[-1]))
        elif self._order["shuffle"]:
            positions = Shuffle(self._count, int(self._order["seed"]), epoch)(positions)
        rows = positions if self._rows is None else self._rows[positions]
        return _Slab(epoch=epoch, rows=rows, places=places, next_pool=next_pool)

    def _next_pool(self, epoch: int, pool: int) -> tuple[int, int] | None:
        """(epoch, number) of the pool that this rank needs after that one; None where it needs no other."""
        first, last = self._steps[0] * self._batch_size, min((self._steps[-1] + 1) * self._batch_size, self._count) - 1
        if pool < self._blocks.pool_of(epoch, last):
            return epoch, pool + 1
        if self._blocks.pools > 1 and epoch + 1 < self._epoch + self._epochs:
            return epoch + 1, self._blocks.pool_of(epoch + 1, first)
        return None

    def _values(self, values: dict[str, torch.Tensor]) -> Any:
        if self._dtype is not None or self._device is not None:
            values = {name: rows.to(device=self._device, dtype=self._dtype) for name, rows in values.items()}
        if self._stack:
            return torch.stack(list(values.values()), dim=1)
        return values[self._arrays[0].name] if self._single else values


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slab:
    """Where rows are, in the order of the batches."""

    epoch: int
    rows: np.ndarray
    """int64 [n] numbers in the run."""
    places: Places | None
    """In pools, where blocks are mixed."""
    next_pool: tuple[int, int] | None
    """What will be needed after these rows."""

    def cut(self, start: int, stop: int) -> _Slab:
        """Rows [start, stop)."""
        places = self.places
        if places is not None:
            places = Places(
                pool=places.pool[start:stop], inside=places.inside[start:stop], rows=places.rows[start:stop]
            )
        return dataclasses.replace(self, rows=self.rows[start:stop].copy(), places=places)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A batch as it is stored."""

    rows: np.ndarray
    """int64 [B]"""
    values: dict[str, torch.Tensor]
    """Name -> [B, d]"""


@functools.cache
def _behind(process: int) -> ThreadPoolExecutor:
    """The threads that gather ahead, per process: they do not survive a fork. Each does whole batches: handing
    parts of one around costs more than the copy, once the machine is busy."""
    return ThreadPoolExecutor(AHEAD, thread_name_prefix="harvest-batches")
