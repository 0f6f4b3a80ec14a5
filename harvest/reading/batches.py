"""Shuffled batches for training: every row once an epoch, in an order that the row count, seed and epoch alone decide.

The order is a keyed bijection of the row numbers, so it needs no table, starts at once and resumes anywhere. Where a
row alone is dear, in an object store or a compressed chunk, blocks of rows are mixed a pool at a time instead. The
workers of a PyTorch DataLoader share the batches of their rank.
"""

from __future__ import annotations

import copy
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
from torch.utils.data import IterableDataset, get_worker_info

from harvest import glance
from harvest.errors import RequestError
from harvest.reading.activations import Activations
from harvest.reading.loader import Loader
from harvest.reading.pools import Pools, block_order
from harvest.reading.slabs import Slab, Slabs

AHEAD = 2
"""Batches that are gathered while the caller works with one."""


class Batches(IterableDataset[Any]):
    """An iterator that can be stopped, saved and continued; iterated to the end it starts anew, with the next epoch.

    So three loops over one object go through the orders of one loop over `epochs=3`.
    Rank r of `world` takes the batches r, r + world, ... of the global order: disjoint, together complete; of mixed
    blocks one stretch of batches after another, so that no two ranks read the same pools.

    It is an IterableDataset too: `DataLoader(batches, batch_size=None, num_workers=2)` gives every row once a pass, and
    `loader(workers=2)` one whose place can be saved. Each worker opens the files anew, however it was started.
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
        self._arrays = list(arrays)
        self._with_rows, self._stack, self._single = with_rows, stack, single
        self._dtype, self._device = dtype, device
        self._count = len(arrays[0]) if rows is None else len(rows)
        self._order = {"rows": self._count, "seed": seed, "shuffle": shuffle, "batch_size": batch_size}
        self._order |= {"rank": rank, "world": world}
        self._blocks = block_order(self._arrays, self._count, seed) if blocks and shuffle else None
        self._pools: Pools | None = None
        if self._blocks is not None:
            self._pools = Pools(self._arrays, self._blocks, rows)
            self._order |= {"block_rows": self._blocks.block_rows, "pool_blocks": self._blocks.pool_blocks}
            self._order |= {"workers": 1}
        self._slabs = Slabs(
            self._count if rows is None else rows,
            batch_size,
            rank,
            world,
            seed=seed,
            shuffle=shuffle,
            blocks=self._blocks,
        )
        self._selection = None if rows is None else hashlib.blake2b(rows.tobytes(), digest_size=8).hexdigest()
        self._epochs = epochs
        self._epoch = 0
        """The one that this pass began with."""
        self._done = 0
        """The number of the next batch; the one after it is as many further on as workers share them."""
        self._ended = False
        """Whether this iterator itself has come to its end; one that was loaded there has not."""
        self._ahead: deque[tuple[tuple[int, int], Future[_Gathered]]] = deque()
        """(first epoch, number) of each batch that is gathered behind, the next one first."""
        self._made_in = self._process = os.getpid()
        """Where it was made, and where its files were opened."""
        self._entered = False
        """Whether this is a worker that began its share."""

    def __repr__(self) -> str:
        names = ", ".join(array.name for array in self._arrays)
        return f"Batches({names}: {self._done} of {len(self)} batches of {self._slabs.batch_size})"

    def _repr_html_(self) -> str:
        order, place = self._order, f"batch {self._done:,} of {len(self):,}, from epoch {self._epoch} on"
        rows = [
            ("names", glance.few([array.name for array in self._arrays])),
            ("rows", f"{self._count:,}" + ("" if self._selection is None else ", selected")),
            ("batches", f"{len(self):,} of {self._slabs.batch_size:,} rows, {glance.plural(self._epochs, 'epoch')}"),
            ("next", place),
            ("mixing", self.mixing),
        ]
        if order["world"] > 1:
            rows.append(("rank", f"{order['rank']} of {order['world']}"))
        return glance.html("Batches", rows)

    @property
    def mixing(self) -> str:
        """How well an epoch is mixed, in words."""
        if not self._order["shuffle"]:
            return "none: rows come in order"
        if self._blocks is None:
            return f"global: all {self._count:,} rows"
        order = self._blocks
        return (
            f"blocks: {order.pool_blocks:,} of {order.blocks:,} blocks of {order.block_rows:,} consecutive rows at a "
            "time, chosen at random; the rows of those are mixed with one another"
        )

    def __len__(self) -> int:
        """Batches of this rank over all epochs."""
        return self._slabs.per_epoch * self._epochs

    def __iter__(self) -> Iterator[Any]:
        self._settle()
        worker = get_worker_info()
        shares = worker is not None and self._made_in != self._process  # made in the worker it has a rank of its own
        if self._ended or (shares and self._entered):  # a loop that a worker is asked for again is a whole pass
            self._epoch, self._done, self._ended = self._epoch + self._epochs, 0, False
        if worker is not None and shares:
            self._refuse_device()
            self._share(worker.num_workers)
            self._done, self._entered = self._done + worker.id, True
        return self

    def __next__(self) -> Any:
        """A tensor [B, d]; {name: tensor} for several names; [B, names, d] with stack; (that, rows) with_rows."""
        self._settle()
        if self._done >= len(self):
            self._ended = True
            raise StopIteration
        gathered = self._gathered()
        values = self._values(gathered.values)
        self._done += self._slabs.workers
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

    def loader(self, workers: int = 1, **options: Any) -> Loader:
        """A DataLoader whose `state_dict` is of what it gave, not of what its workers have read ahead; it goes on where
        this iterator is, in the order of this iterator (of mixed blocks each worker reads its own pools, and the order
        depends on their number). `options`: further ones of DataLoader, `pin_memory` or `multiprocessing_context`.
        """
        if type(workers) is not int or workers < 1:
            raise RequestError(f"workers = {workers!r}: allowed are whole numbers of at least 1")
        self._refuse_device()
        shared = copy.copy(self)
        shared._share(workers)
        return Loader(shared, workers, options)

    # ---- processes -----------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Where the files are, not what was read of them."""
        return {**self.__dict__, "_ahead": deque()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._process = os.getpid()

    def _settle(self) -> None:
        """Opens everything anew in a forked process: locks that a thread of the parent held would never be free."""
        if self._process != os.getpid():
            self.__dict__.update(copy.deepcopy(self).__dict__)

    def _share(self, workers: int) -> None:
        self._slabs = copy.copy(self._slabs)
        self._slabs.workers = workers
        if self._pools is not None:  # then the order depends on it
            self._order = {**self._order, "workers": workers}

    def _refuse_device(self) -> None:
        if self._device is not None and torch.device(self._device).type != "cpu":
            raise RequestError(
                f"device = {str(self._device)!r}: a loader's workers hand over rows in the machine's memory; leave it "
                "out and move what the loader gives (pin_memory=True)"
            )

    # ---- reading -------------------------------------------------------------------------------------------------

    def _gathered(self) -> _Gathered:
        """The next batch; the ones after it are gathered behind while the caller works with this one."""
        if not self._ahead or self._ahead[0][0] != (self._epoch, self._done):  # at the start, and after a jump
            self._ahead.clear()
        numbers = range(self._done, len(self), self._slabs.workers)[: 1 + AHEAD]
        for number in numbers[len(self._ahead) :]:
            epoch, place = divmod(number, self._slabs.per_epoch)
            slab = self._slabs.batch(self._epoch + epoch, place, self._epoch + self._epochs - 1)
            # Made here: memory that threads take and free goes back to the system, and zeroing it anew for every
            # batch costs half as much as the gather.
            room = [array.empty(len(slab.rows)) for array in self._arrays]
            following = _behind(os.getpid()).submit(self._gather, slab, room)
            self._ahead.append(((self._epoch, number), following))
        return self._ahead.popleft()[1].result()

    def _gather(self, slab: Slab, room: list[np.ndarray]) -> _Gathered:
        if self._pools is not None and slab.places is not None:
            if slab.next_pool is not None:
                self._pools.ask(*slab.next_pool)
            found = self._pools.take(slab.epoch, slab.places, room)
        else:
            found = [array.gather(slab.rows, out, threads=1) for array, out in zip(self._arrays, room)]
        return _Gathered(slab.rows, {array.name: rows for array, rows in zip(self._arrays, found)})

    def _values(self, values: dict[str, torch.Tensor]) -> Any:
        if self._dtype is not None or self._device is not None:
            values = {name: rows.to(device=self._device, dtype=self._dtype) for name, rows in values.items()}
        if self._stack:
            return torch.stack(list(values.values()), dim=1)
        return values[self._arrays[0].name] if self._single else values


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
