"""Which rows the batches of a rank hold: worked out several batches at a time, for any epoch and any place in it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from harvest.reading.shuffle import BlockOrder, Places, Shuffle

STEPS_AHEAD = 16
"""Batches whose row numbers are worked out at once: the last few of a cycle walk cost as much as thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """Where rows are, in the order of the batches."""

    epoch: int
    rows: np.ndarray
    """int64 [n] numbers in the run."""
    places: Places | None
    """In pools, where blocks are mixed."""
    next_pool: tuple[int, int] | None
    """(epoch, number) of what will be needed after these rows."""

    def cut(self, start: int, stop: int) -> Slab:
        """Rows [start, stop)."""
        places = self.places
        if places is not None:
            places = Places(
                pool=places.pool[start:stop], inside=places.inside[start:stop], rows=places.rows[start:stop]
            )
        return dataclasses.replace(self, rows=self.rows[start:stop].copy(), places=places)


class Slabs:
    """Batch k of an epoch comes from worker k % workers."""

    def __init__(
        self,
        rows: np.ndarray | int,
        batch_size: int,
        rank: int,
        world: int,
        *,
        seed: int,
        shuffle: bool,
        blocks: BlockOrder | None,
    ) -> None:
        """`rows`: the row numbers int64 [n] to go through, or how many where they are 0, 1, 2, ...; `blocks`: the order
        of mixed blocks, where those are mixed."""
        self.count = rows if isinstance(rows, int) else len(rows)
        self._rows = None if isinstance(rows, int) else rows
        self.batch_size = min(batch_size, max(1, self.count))
        whole = -(-self.count // batch_size)
        self._steps = range(rank, whole, world)
        """Batches of the epoch's order that are this rank's."""
        if blocks is not None:
            self._steps = range(whole * rank // world, whole * (rank + 1) // world)
        self.per_epoch = len(self._steps)
        self.workers = 1
        self._seed, self._shuffle, self._blocks = seed, shuffle, blocks
        self._held: tuple[tuple[int, int, int], Slab] | None = None
        """(epoch, worker, part) and what is worked out of it."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}

    def batch(self, epoch: int, number: int, last_epoch: int) -> Slab:
        """The rows of batch `number` of an epoch, which is followed by others up to the last one."""
        place, worker = divmod(number, self.workers)
        part, inside = divmod(place, STEPS_AHEAD)
        if self._held is None or self._held[0] != (epoch, worker, part):
            steps = self._steps_of(worker)[part * STEPS_AHEAD :][:STEPS_AHEAD]
            self._held = (epoch, worker, part), self._work_out(epoch, worker, steps, last_epoch)
        return self._held[1].cut(inside * self.batch_size, (inside + 1) * self.batch_size)

    def _steps_of(self, worker: int) -> range:
        """The batches of an epoch that a worker gives; one stretch where it should read pools of its own."""
        if self._blocks is None:
            return self._steps[worker :: self.workers]
        each, more = divmod(self.per_epoch, self.workers)
        return self._steps[worker * each + min(worker, more) :][: each + (worker < more)]

    def _work_out(self, epoch: int, worker: int, steps: range, last_epoch: int) -> Slab:
        """The rows of these batches, one after another."""
        positions = ((np.array(steps) * self.batch_size)[:, None] + np.arange(self.batch_size)).reshape(-1)
        positions = positions[: np.searchsorted(positions, self.count)]  # only the last batch of all is short
        places = next_pool = None
        if self._blocks is not None:
            places = self._blocks.places(epoch, positions)
            positions = places.rows
            next_pool = self._next_pool(self._blocks, epoch, worker, int(places.pool[-1]), last_epoch)
        elif self._shuffle:
            positions = Shuffle(self.count, self._seed, epoch)(positions)
        rows = positions if self._rows is None else self._rows[positions]
        return Slab(epoch=epoch, rows=rows, places=places, next_pool=next_pool)

    def _next_pool(
        self, blocks: BlockOrder, epoch: int, worker: int, pool: int, last_epoch: int
    ) -> tuple[int, int] | None:
        """(epoch, number) of the pool that is needed after that one; None where no other is."""
        last = min((self._steps_of(worker)[-1] + 1) * self.batch_size, self.count) - 1
        if pool < blocks.pool_of(epoch, last):
            return epoch, pool + 1
        # Batches go round the workers from one epoch to the next, so a worker's share need not be the same.
        following = self._steps_of((worker - self.per_epoch) % self.workers)
        if following and blocks.pools > 1 and epoch < last_epoch:
            return epoch + 1, blocks.pool_of(epoch + 1, following[0] * self.batch_size)
        return None
