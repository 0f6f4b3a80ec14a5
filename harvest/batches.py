"""Shuffled batches for training: every row once an epoch, in an order that the row count, seed and epoch alone decide.

The order is a keyed bijection of the row numbers, so it needs no table, starts at once and resumes anywhere.
"""

from __future__ import annotations

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

ROUNDS = 6
"""Of the Feistel network; from 4 on neighbours show no trace of one another in the tests, the rest is margin."""
STEPS_AHEAD = 16
"""Batches whose row numbers are worked out at once: the last few of a cycle walk cost as much as thousands."""

AHEAD = 2
"""Batches that are gathered while the caller works with one."""


class Shuffle:
    """A bijection of [0, n) chosen by (n, seed, epoch): an unbalanced Feistel network with cycle walking."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self.n = n
        bits = max(2, (n - 1).bit_length())
        self._right = bits // 2
        self._left = bits - self._right
        # Halves of 16 bits leave room for a product in 32, which numpy does at twice the speed of 64.
        self._dtype = np.dtype(np.uint32 if bits <= 32 else np.uint64)
        self._word = self._dtype.itemsize * 8
        digest = hashlib.blake2b(f"{n}/{seed}/{epoch}".encode(), digest_size=64).digest()
        self._keys = np.frombuffer(digest, "<u8").astype(self._dtype)
        self._factors = (self._dtype.type(0x9E3779B1), self._dtype.type(0x85EBCA77))
        if self._word == 64:
            self._factors = (self._dtype.type(0x9E3779B97F4A7C15), self._dtype.type(0xC2B2AE3D27D4EB4F))

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Row numbers int64 [k] at the positions int64 [k] of the order, both in [0, n)."""
        rows: np.ndarray = self._once(positions.astype(self._dtype))
        out = np.flatnonzero(rows >= self.n)
        while len(out):  # walk the cycle until it is back in range: each step at least halves them on average
            rows[out] = self._once(rows[out])
            out = out[rows[out] >= self.n]
        return rows.astype(np.int64)

    def _once(self, values: np.ndarray) -> np.ndarray:
        right = values & self._dtype.type((1 << self._right) - 1)
        left = values >> self._dtype.type(self._right)
        for number in range(0, ROUNDS, 2):
            right ^= self._mix(left, number, self._right)
            left ^= self._mix(right, number + 1, self._left)
        left <<= self._dtype.type(self._right)
        left |= right
        return left

    def _mix(self, half: np.ndarray, number: int, bits: int) -> np.ndarray:
        """`bits` bits that depend on all of `half` and the round's key."""
        mixed: np.ndarray = half ^ self._keys[number]
        mixed *= self._factors[0]
        mixed ^= mixed >> self._dtype.type(self._word // 2)
        mixed *= self._factors[1]
        mixed >>= self._dtype.type(self._word - bits)
        return mixed


class Batches:
    """An iterator that can be stopped, saved and continued; iterated to the end it starts anew, with the next epoch.

    So three loops over one object go through the orders of one loop over `epochs=3`.
    Rank r of `world` takes the batches r, r + world, ... of the global order: disjoint, together complete.
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
    ) -> None:
        """`rows` int64 [n]: the row numbers to go through, all by default; `single`: yield the one array's tensor."""
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
        self._selection = None if rows is None else hashlib.blake2b(rows.tobytes(), digest_size=8).hexdigest()
        self._epochs = epochs
        self._batch_size, self._rank, self._world = min(batch_size, max(1, self._count)), rank, world
        self._per_epoch = len(range(rank * batch_size, self._count, world * batch_size))
        self._epoch = 0
        """The one that this pass began with."""
        self._done = 0
        self._ended = False
        """Whether this iterator itself has come to its end; one that was loaded there has not."""
        self._slab: tuple[tuple[int, int], np.ndarray] | None = None
        """(epoch, part) and its row numbers."""
        self._ahead: deque[tuple[tuple[int, int, int], Future[_Gathered]]] = deque()
        """(process, first epoch, number) of each batch that is gathered behind, the next one first."""

    def __repr__(self) -> str:
        names = ", ".join(array.name for array in self._arrays)
        return f"Batches({names}: {self._done} of {len(self)} batches of {self._batch_size})"

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
            rows = self._rows_of(number).copy()
            # Made here: memory that threads take and free goes back to the system, and zeroing it anew for every
            # batch costs half as much as the gather.
            room = [array.empty(len(rows)) for array in self._arrays]
            following = _behind(os.getpid()).submit(self._gather, rows, room)
            self._ahead.append(((os.getpid(), self._epoch, number), following))
        return self._ahead.popleft()[1].result()

    def _gather(self, rows: np.ndarray, room: list[np.ndarray]) -> _Gathered:
        values = {array.name: array.gather(rows, out, threads=1) for array, out in zip(self._arrays, room)}
        return _Gathered(rows, values)

    def _rows_of(self, number: int) -> np.ndarray:
        """Row numbers of a batch; those of STEPS_AHEAD batches are worked out together."""
        epoch, step = divmod(number, self._per_epoch)
        epoch += self._epoch
        part, inside = divmod(step, STEPS_AHEAD)
        if self._slab is None or self._slab[0] != (epoch, part):
            self._slab = (epoch, part), self._slab_of(epoch, part * STEPS_AHEAD)
        return self._slab[1][inside * self._batch_size : (inside + 1) * self._batch_size]

    def _slab_of(self, epoch: int, step: int) -> np.ndarray:
        """Row numbers of this rank's batches from `step` on, one after another."""
        steps = np.arange(step, min(step + STEPS_AHEAD, self._per_epoch))
        starts = (steps * self._world + self._rank) * self._batch_size
        positions = (starts[:, None] + np.arange(self._batch_size)).reshape(-1)
        positions = positions[: np.searchsorted(positions, self._count)]  # only the last batch of all is short
        if self._order["shuffle"]:
            positions = Shuffle(self._count, int(self._order["seed"]), epoch)(positions)
        return positions if self._rows is None else self._rows[positions]

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
