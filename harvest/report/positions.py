"""Norms by the place of a token in its document, from a bounded and seeded sample of the stored rows.

The sums do not keep them. Rows are drawn by position, so that the few first tokens, where attention sinks lie, count
as much as the many later ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harvest.reading.reader import Run, open_activations
from harvest.report.words import layer_of
from harvest.store.files import Files
from harvest.store.rawrows import Parts

SHARDS = 8
"""At most, evenly over the run."""
ROWS = 8
"""Of each range of positions in a shard."""
ROWS_LOOKED_AT = 2**20
"""Of a shard's token table."""
NAMES = 4
"""At most, evenly over the layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionNorms:
    """k ranges of positions; empty ones are left out."""

    ranges: tuple[tuple[int, int], ...]
    """(First, last) position of each."""
    norms: Mapping[str, tuple[float, ...]]
    """Name -> mean norm of the sampled finite rows in each range; NaN where there is none."""
    rows: int
    """Rows in the sample."""
    shards: int
    """That they are from."""


def position_norms(run: Run, seed: int = 0) -> PositionNorms | str:
    """Or why there are none."""
    names = chosen_names(run.names)
    if not run.record.job["capture"]["store"]:
        return "the run stores no rows"
    if not len(run) or not names:
        return "no row is stored yet"
    if not run.files.local:
        return "the rows are not on this machine"
    if run.record.job["store"]["compression"] != "none":
        return "the rows are compressed"
    rows, positions, shards = _sample(run, seed)
    edges = _edges(int(positions.max()))
    bins = np.searchsorted(edges, positions, side="right") - 1
    used = np.unique(bins)
    return PositionNorms(
        ranges=tuple((int(edges[b]), int(edges[b + 1]) - 1) for b in used),
        norms={name: tuple(_means(norms_of(run, name, rows), bins, used)) for name in names},
        rows=len(rows),
        shards=shards,
    )


def chosen_names(names: Sequence[str]) -> list[str]:
    """A few layers of the first site that has some, from the first to the last; else the first names."""
    sites: dict[str, list[str]] = {}
    for name in names:
        site, layer = layer_of(name)
        if layer is not None:
            sites.setdefault(site, []).append(name)
    found = next(iter(sites.values())) if sites else list(names[:NAMES])
    return [found[i] for i in evenly(len(found), NAMES)]


def evenly(count: int, most: int) -> list[int]:
    """At most so many of the first `count` whole numbers, from the first to the last."""
    places = np.linspace(0, count - 1, min(most, count)).round().astype(int)
    return np.unique(places).tolist() if count else []


def _edges(last: int) -> np.ndarray:
    """int64: 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, ... until beyond `last`."""
    edges = [0, 1, 2, 3]
    while edges[-1] <= last:
        edges.append(edges[-1] * 4 // 3 if edges[-1] % 3 == 0 else edges[-1] * 3 // 2)
    return np.array(edges, np.int64)


def _sample(run: Run, seed: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows of the run int64 [n], rising, their positions, and how many shards they are from."""
    starts = np.cumsum([0, *(record.rows for record in run.shards)])
    held = [i for i, record in enumerate(run.shards) if record.rows]
    chosen = [held[i] for i in evenly(len(held), SHARDS)]
    random = np.random.Generator(np.random.PCG64(seed))
    rows, positions = [], []
    for shard in chosen:
        first, stop = int(starts[shard]), int(min(starts[shard + 1], starts[shard] + ROWS_LOOKED_AT))
        found = run.tokens(slice(first, stop), ["position"]).column("position").to_numpy()
        for index in _of_each_range(found, random):
            rows.append(index + first)
            positions.append(found[index])
    order = np.argsort(np.concatenate(rows), kind="stable")
    return np.concatenate(rows)[order], np.concatenate(positions)[order], len(chosen)


def _of_each_range(positions: np.ndarray, random: np.random.Generator) -> Iterator[np.ndarray]:
    """At most ROWS indices of every range of positions."""
    edges = _edges(int(positions.max()))
    bins = np.searchsorted(edges, positions, side="right") - 1
    order = np.argsort(bins, kind="stable")
    for index in np.split(order, np.flatnonzero(np.diff(bins[order])) + 1):
        yield random.permutation(index)[:ROWS]


def norms_of(run: Run, name: str, rows: np.ndarray) -> np.ndarray:
    """float64 [n] of the rows int64 [n]."""
    array = open_activations(Parts([(_Unmapped(run.files), run.shards)]), name, run.record)
    return np.array([np.linalg.norm(array.read(row, row + 1).double().numpy()) for row in rows.tolist()])


class _Unmapped:
    """Files that are read and never mapped: of a mapped one, 64 KiB stay in memory around every row."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def map(self, path: str) -> None:
        """None: cannot be mapped."""


def _means(norms: np.ndarray, bins: np.ndarray, used: np.ndarray) -> Iterator[float]:
    for number in used:
        inside = norms[(bins == number) & np.isfinite(norms)]
        yield float(inside.mean()) if len(inside) else float("nan")
