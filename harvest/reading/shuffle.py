"""Orders that need no table: a bijection of the row numbers, and blocks of rows mixed a pool at a time."""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

ROUNDS = 6
"""Of the Feistel network; from 4 on neighbours show no trace of one another in the tests, the rest is margin."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the rows at some positions of an epoch's order are; all int64 [k]."""

    pool: np.ndarray
    """Number of the pool in the epoch."""
    inside: np.ndarray
    """Place in the pool."""
    rows: np.ndarray
    """In [0, count)."""


class BlockOrder:
    """Blocks of consecutive rows, in another order each epoch, gathered into pools; the rows of a pool are mixed.

    It depends on the sizes, seed and epoch alone, starts anywhere, and with one pool it is the order of `Shuffle`.
    """

    def __init__(self, count: int, block_rows: int, pool_rows: int, seed: int) -> None:
        """`pool_rows`: of a pool, at most, but always one block."""
        self._made_of = count, block_rows, pool_rows, seed
        self.count, self.block_rows, self._seed = count, block_rows, seed
        self.blocks = math.ceil(count / block_rows)
        self.pool_blocks = self.blocks if pool_rows >= count else max(1, pool_rows // block_rows)
        self.pools = math.ceil(self.blocks / max(1, self.pool_blocks))
        self._order = functools.lru_cache(2)(self._order_of)
        self._mixed = functools.lru_cache(4)(self._mix_of)

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockOrder, self._made_of

    def _order_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks int64 [blocks] pool by pool, rising within each, and the position that each pool begins at."""
        order = np.arange(self.blocks)
        if self.pools > 1:
            order = Shuffle(self.blocks, self._seed, epoch)(order)
        cuts = np.arange(0, self.blocks, self.pool_blocks)
        order = np.concatenate([np.sort(order[cut : cut + self.pool_blocks]) for cut in cuts] or [order])
        sizes = np.where(order == self.blocks - 1, self.count - (self.blocks - 1) * self.block_rows, self.block_rows)
        return order, np.concatenate([[0], np.cumsum(sizes)])[np.append(cuts, self.blocks)]

    def _mix_of(self, epoch: int, pool: int) -> Shuffle:
        starts = self._order(epoch)[1]
        number = epoch if self.pools == 1 else (epoch << 32) + pool + 1
        return Shuffle(int(starts[pool + 1] - starts[pool]), self._seed, number)

    def rows_of(self, epoch: int, pool: int) -> list[range]:
        """The rows of each block of a pool, in the order of its places."""
        blocks = self._order(epoch)[0][pool * self.pool_blocks : (pool + 1) * self.pool_blocks].tolist()
        ends = ((block + 1) * self.block_rows for block in blocks)
        return [range(block * self.block_rows, min(end, self.count)) for block, end in zip(blocks, ends)]

    def pool_of(self, epoch: int, position: int) -> int:
        """The pool that a position lies in."""
        return int(np.searchsorted(self._order(epoch)[1], position, side="right")) - 1

    def places(self, epoch: int, positions: np.ndarray) -> Places:
        """Of positions int64 [k] in [0, count), rising."""
        order, starts = self._order(epoch)
        pool = np.searchsorted(starts, positions, side="right") - 1
        inside = np.empty_like(positions)
        for number in np.unique(pool).tolist():
            at = pool == number
            inside[at] = self._mixed(epoch, number)(positions[at] - starts[number])
        block, rest = np.divmod(inside, self.block_rows)  # only the last block of a pool may be short
        rows = order[pool * self.pool_blocks + block] * self.block_rows + rest
        return Places(pool=pool, inside=inside, rows=rows)
