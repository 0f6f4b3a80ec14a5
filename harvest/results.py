"""What a run comes to: sums merged in shard order, directions, totals over the records, and the files that say so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from harvest.concepts.directions import Check, settings_of, write_directions
from harvest.records import ShardRecord
from harvest.reduce.covariance import Covariance, CovarianceState
from harvest.reduce.moments import Moments, NameStatistics
from harvest.states import MergedStates, MergedSums, finished_state, merged_state, merged_states, open_states
from harvest.store import layout
from harvest.store.files import Files
from harvest.store.ledger import Ledger, RunRecord
from harvest.store.tables import parquet_bytes, statistics_table

COUNTS = ("documents", "rows", "tokens", "dropped_tokens", "forward_tokens", "non_finite_documents")
TABLES = ("skipped", "non_finite", "zero_rows", "span_documents", "seconds")
"""Fields of a record that are added up, the latter key by key."""


def write_results(files: Files, check: Check | None = None) -> dict[str, Any]:
    """Writes statistics, covariances, directions, then complete.json; returns the totals. Call it with the lease held.

    `check` is asked about each direction, for its card. Every shard must be committed. Raises DamageError where saved
    sums or records cannot be read.
    """
    ledger = Ledger(files)
    run, records = ledger.read_run(), list(ledger.records().values())
    assert run is not None
    names = run.plan["resolved"]["names"]
    statistics, covariance = MergedStates(Moments(), names), MergedStates(Covariance(), names)
    sums = MergedSums(settings_of(run), names)
    for record in records:  # each shard's sums are read once, for all
        if layout.STATES in record.objects:
            states = open_states(files, record)
            for merged in (statistics, covariance, sums):
                merged.add(states)
    if found := statistics.result():
        files.replace(layout.STATISTICS, parquet_bytes(statistics_table(found)))
    if covariance:
        files.replace(layout.COVARIANCE, covariance.saved())
    directions = write_directions(files, run, records, sums, check)
    summary = summarise(records) | ({"directions": directions} if directions else {})
    ledger.complete(summary)
    return summary


def merged_statistics(files: Files, records: Sequence[ShardRecord], names: Sequence[str]) -> dict[str, NameStatistics]:
    """Name -> statistics over all shards, merged in the order given; empty where no shard keeps moments."""
    return merged_states(files, records, Moments(), names)


def keeps_covariance(run: RunRecord) -> bool:
    """Whether the shards of a run have sums of the covariance."""
    kept = run.job.get("statistics", {})
    return bool(kept.get("covariance")) or "covariance" in kept.get("also", ())


def covariance_of(files: Files, records: Sequence[ShardRecord], name: str, *, complete: bool) -> CovarianceState:
    """Sums of a name over all shards: as a finished run has written them, or merged now, of this name alone."""
    if complete:
        return finished_state(files, layout.COVARIANCE, Covariance(), name)
    return merged_state(files, records, Covariance(), name)


def with_covariances(
    statistics: Mapping[str, NameStatistics], sums: Callable[[str], CovarianceState]
) -> dict[str, NameStatistics]:
    """The same, each with the covariance that `sums` gives of its name once it is asked for."""

    def matrix(name: str) -> np.ndarray:
        return Covariance().finalise(sums(name)).matrix

    return {name: replace(found, _covariance=partial(matrix, name)) for name, found in statistics.items()}


class Totals:
    """Totals over commit records: the count of record, never taken from metrics."""

    def __init__(self) -> None:
        self._total: dict[str, int] = dict.fromkeys(("shards", *COUNTS, "bytes"), 0)
        self._tables: dict[str, dict[str, float]] = {key: {} for key in TABLES}
        self._environments: list[Mapping[str, str]] = []
        self._checks: dict[str, float] = {}

    def add(self, record: ShardRecord) -> None:
        """One more shard."""
        self._total["shards"] += 1
        for key in COUNTS:
            self._total[key] += getattr(record, key)
        self._total["bytes"] += sum(item.bytes for item in record.objects.values())
        for key, table in self._tables.items():
            for name, value in getattr(record, key).items():
                table[name] = table.get(name, 0) + value
        for name, error in record.self_check.items():
            self._checks[name] = max(error, self._checks.get(name, 0.0))
        if record.environment not in self._environments:
            self._environments.append(record.environment)

    def data(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            **self._total,
            **{key: dict(table) for key, table in self._tables.items()},
            "self_check": dict(self._checks),
            "environments": [dict(environment) for environment in self._environments],
        }


def summarise(records: Iterable[ShardRecord]) -> dict[str, Any]:
    """Totals over commit records, as plain values."""
    totals = Totals()
    for record in records:
        totals.add(record)
    return totals.data()
