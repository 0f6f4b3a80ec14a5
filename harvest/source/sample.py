"""Which documents a share keeps: decided by a hash of (id, seed) alone, so nothing has to be read or remembered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harvest.records import DOCUMENTS_PER_FILE

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 1 << 16


def uniform(ids: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """float64 [n] in [0, 1): a splitmix64 hash of each int64 id and the seed; the same on every platform."""
    key = _mix(np.array([seed % 2**64], dtype=np.uint64) + _GOLDEN)
    # 53 bits: all that a float64 holds, so that 1.0 is never reached
    return (_mix(ids.astype(np.uint64) ^ key) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64; uint64 arithmetic wraps around."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A share of the documents; what a smaller share keeps, a larger one keeps too."""

    share: float | None
    """Kept part, above 0 and at most 1; None keeps all."""
    seed: int

    def keep(self, file: int, start: int, stop: int) -> NDArray[np.bool_]:
        """bool [stop - start]: which of the file's rows are kept."""
        if self.share is None or self.share >= 1:
            return np.ones(max(0, stop - start), dtype=np.bool_)
        first = file * DOCUMENTS_PER_FILE
        return uniform(np.arange(first + start, first + stop, dtype=np.int64), self.seed) < self.share

    def count(self, file: int, start: int, stop: int) -> int:
        """How many of the file's rows are kept."""
        if self.share is None or self.share >= 1:
            return max(0, stop - start)
        blocks = range(start, stop, _BLOCK)
        return sum(int(self.keep(file, at, min(at + _BLOCK, stop)).sum()) for at in blocks)
