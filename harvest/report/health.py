"""The health of the activations, name by name, from the sums over every row; nothing here reads a row."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harvest.errors import DamageError
from harvest.reading.reader import Run
from harvest.report.words import layer_of
from harvest.store import layout
from harvest.store.tables import statistics_table

MASSIVE = 10.0
"""A dimension is massive where the root of its mean square is so many times that of the median dimension."""
MOST_MASSIVE = 3
"""Dimensions that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameHealth:
    """Of one name. Figures are None where the run keeps no moments, or has no finite row."""

    name: str
    site: str
    layer: int | None
    rows: int | None = None
    """Finite ones."""
    mean_norm: float | None = None
    ordinary_norm: float | None = None
    """Mean norm without special tokens."""
    special_norm: float | None = None
    """Mean norm of special tokens alone; None where there are none."""
    quantiles: Mapping[float, float] | None = None
    """Share -> norm."""
    largest_norm: float | None = None
    high_norm_share: float | None = None
    """Share of rows with a norm beyond ten medians."""
    largest_value: float | None = None
    """By its absolute value."""
    massive: tuple[tuple[int, float], ...] = ()
    """(Dimension, how many times the median one), largest first."""
    massive_dimensions: int = 0
    """How many there are."""
    non_finite: int = 0
    zero_rows: int = 0


def health(run: Run, summary: Mapping[str, Any]) -> list[NameHealth]:
    """One for every name, in the run's order; `summary` as `run.summary()`. Raises DamageError for torn statistics."""
    table = _statistics(run)
    columns = {} if table is None else {name: table.column(name).to_pylist() for name in _SCALARS}
    place = {(name, rows): i for i, (name, rows) in enumerate(zip(columns.get("name", ()), columns.get("rows", ())))}
    found = []
    for name in run.names:
        site, layer = layer_of(name)
        figures: dict[str, Any] = {}
        if table is not None and (name, "all") in place:
            all_, ordinary = place[name, "all"], place[name, "ordinary"]
            figures = _figures(table, columns, all_, ordinary)
        found.append(
            NameHealth(
                name=name,
                site=site,
                layer=layer,
                non_finite=int(summary["non_finite"].get(name, 0)),
                zero_rows=int(summary["zero_rows"].get(name, 0)),
                **figures,
            )
        )
    return found


_SCALARS = (
    "name",
    "rows",
    "count",
    "mean_norm",
    "norm_quantiles",
    "norm_max",
    "high_norm_share",
    "min",
    "max",
)


def _statistics(run: Run) -> pa.Table | None:
    """As the finished run wrote them, or of the shards that are committed; None where none are kept."""
    if not run.record.job["statistics"]["moments"] or not run.shards:
        return None
    if not run.complete:
        return statistics_table(run.statistics())
    try:
        return pq.ParquetFile(io.BytesIO(run.files.read(layout.STATISTICS))).read()
    except (FileNotFoundError, pa.ArrowException, OSError) as error:
        raise DamageError(f"{run.files.url}/{layout.STATISTICS}: {' '.join(str(error).split())[:200]}") from None


def _figures(table: pa.Table, columns: Mapping[str, Sequence[Any]], all_: int, ordinary: int) -> dict[str, Any]:
    """Of a name, whose rows of the table are these."""
    rows, plain = columns["count"][all_], columns["count"][ordinary]
    if not rows:
        return {"rows": 0}
    mean, usual = columns["mean_norm"][all_], columns["mean_norm"][ordinary]
    special = rows - plain
    massive = massive_dimensions(_vector(table, "mean", all_), _vector(table, "variance", all_))
    return {
        "rows": rows,
        "mean_norm": mean,
        "ordinary_norm": usual if plain else None,
        "special_norm": (rows * mean - (plain * usual if plain else 0.0)) / special if special else None,
        "quantiles": {one["share"]: one["norm"] for one in columns["norm_quantiles"][all_]},
        "largest_norm": columns["norm_max"][all_],
        "high_norm_share": columns["high_norm_share"][all_],
        "largest_value": max(columns["min"][all_], columns["max"][all_], key=abs),
        "massive": tuple(massive[:MOST_MASSIVE]),
        "massive_dimensions": len(massive),
    }


def _vector(table: pa.Table, column: str, row: int) -> np.ndarray:
    """float64 [d]"""
    found: np.ndarray = table.column(column)[row].values.to_numpy(zero_copy_only=False)
    return found


def massive_dimensions(mean: np.ndarray, variance: np.ndarray) -> list[tuple[int, float]]:
    """(Dimension, root mean square by that of the median dimension) of those beyond MASSIVE, largest first.

    `mean` and `variance` float64 [d] over the same rows.
    """
    size = np.sqrt(variance + mean**2)
    median = float(np.median(size)) if len(size) else 0.0
    if not median > 0.0:
        return []
    times = size / median
    order = [int(i) for i in np.argsort(-times, kind="stable") if times[i] >= MASSIVE]
    return [(i, float(times[i])) for i in order]


def sites_of(names: Sequence[NameHealth]) -> dict[str, list[NameHealth]]:
    """Site -> its names by layer, of those that have layers and figures."""
    sites: dict[str, list[NameHealth]] = {}
    for one in names:
        if one.layer is not None and one.mean_norm is not None:
            sites.setdefault(one.site, []).append(one)
    return {site: sorted(found, key=lambda one: one.layer or 0) for site, found in sites.items()}
