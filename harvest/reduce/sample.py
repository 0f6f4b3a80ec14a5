"""At most N examples of each group and part, those with the smallest hash: the same ones however the data is split."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harvest.reduce.labels import UNKNOWN

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_UNIT, _SAMPLE, _HOLDOUT = (np.array([salt], np.uint64) for salt in range(3))
"""Hashes of the same example that know nothing of each other: what is held out must not depend on what is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleKeys:
    """Which examples there are: n of them, known from the text alone, before the model runs."""

    document: np.ndarray
    """int64 [n]"""
    variant: np.ndarray
    """int8 [n]: which sequence of the document."""
    position: np.ndarray
    """int32 [n]: where in the sequence the state is read."""
    group: np.ndarray
    """int8 [n], as in Labels; examples of neither group are never sampled."""
    held_out: np.ndarray
    """bool [n]: kept for evaluation."""
    pair: tuple[str, ...] | None = None
    """Key of each example's pair; None where nothing is paired."""

    def __len__(self) -> int:
        return len(self.document)

    def take(self, index: np.ndarray) -> ExampleKeys:
        """The examples at int64 indices."""
        return ExampleKeys(
            document=self.document[index],
            variant=self.variant[index],
            position=self.position[index],
            group=self.group[index],
            held_out=self.held_out[index],
            pair=None if self.pair is None else tuple(self.pair[i] for i in index.tolist()),
        )

    @property
    def unit(self) -> np.ndarray:
        """uint64 [n]: equal for what belongs together, a pair where there are pairs, else a document."""
        return unit_hashes(self.document, self.pair)


def join_keys(parts: Sequence[ExampleKeys]) -> ExampleKeys:
    """The examples of all parts behind one another; there must be at least one part."""
    paired = all(part.pair is not None for part in parts)
    return ExampleKeys(
        document=np.concatenate([part.document for part in parts]),
        variant=np.concatenate([part.variant for part in parts]),
        position=np.concatenate([part.position for part in parts]),
        group=np.concatenate([part.group for part in parts]),
        held_out=np.concatenate([part.held_out for part in parts]),
        pair=tuple(key for part in parts for key in part.pair or ()) if paired else None,
    )


def smallest(keys: ExampleKeys, limit: int) -> np.ndarray:
    """int64, rising: the indices of at most `limit` examples of each group and part, those with the smallest hash.

    The hash is of (document, variant, position), and where there are pairs of the pair's key, so that both members are
    kept or neither. What is kept of the whole is kept of any part of it, so parts can be cut first and joined then.
    """
    if keys.pair is None:
        order = _mix(_mix(_hash(keys.document, _SAMPLE) ^ _bits(keys.variant)) ^ _bits(keys.position))
    else:
        order = _mix(keys.unit ^ _mix(_SAMPLE))
    kept = []
    for group in sorted(set(keys.group.tolist()) - {UNKNOWN}):
        for part in (False, True):
            index = np.flatnonzero((keys.group == group) & (keys.held_out == part))
            ties = (keys.position[index], keys.variant[index], keys.document[index], order[index])
            kept.append(index[np.lexsort(ties)[:limit]])
    return np.sort(np.concatenate([np.zeros(0, np.int64), *kept]))


def held_out(document: np.ndarray, pair: Sequence[str] | None, share: float) -> np.ndarray:
    """bool [n]: the share of the pairs, or of the documents int64 [n], that is kept for evaluation, by hash alone."""
    hashed = _mix(unit_hashes(document, pair) ^ _mix(_HOLDOUT))
    kept: np.ndarray = (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53 < share
    return kept


def unit_hashes(document: np.ndarray, pair: Sequence[str] | None) -> np.ndarray:
    """uint64 [n]: a hash of the pair's key where there is one, else of the document's id int64."""
    if pair is None:
        return _hash(document, _UNIT)
    digests = [hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest() for key in pair]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def _hash(values: np.ndarray, salt: np.ndarray) -> np.ndarray:
    return _mix(_bits(values) ^ _mix(salt))


def _bits(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int64).view(np.uint64)


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: every input bit reaches every output bit; uint64 wraps around."""
    with np.errstate(over="ignore"):
        x = x + _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
