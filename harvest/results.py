"""What a run comes to: sums merged in shard order, directions, totals over the records, and the files that say so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harvest.directions import write_directions
from harvest.errors import DamageError
from harvest.records import ShardRecord
from harvest.reduce.moments import Moments, NameStatistics
from harvest.states import open_states, states_path
from harvest.store import layout
from harvest.store.files import Files
from harvest.store.ledger import Ledger
from harvest.store.tables import parquet_bytes, statistics_table

COUNTS = ("documents", "rows", "tokens", "dropped_tokens", "forward_tokens", "non_finite_documents")
TABLES = ("skipped", "non_finite", "zero_rows", "span_documents", "seconds")
"""Fields of a record that are added up, the latter key by key."""


def write_results(files: Files) -> dict[str, Any]:
    """Writes statistics.parquet and directions, then complete.json; returns the totals. Call it with the lease held.

    Every shard must be committed. Raises DamageError where saved sums or records cannot be read.
    """
    ledger = Ledger(files)
    run, records = ledger.read_run(), list(ledger.records().values())
    assert run is not None
    statistics = merged_statistics(files, records, run.plan["resolved"]["names"])
    if statistics:
        files.replace(layout.STATISTICS, parquet_bytes(statistics_table(statistics)))
    directions = write_directions(files, run, records)
    summary = summarise(records) | ({"directions": directions} if directions else {})
    ledger.complete(summary)
    return summary


def merged_statistics(files: Files, records: Sequence[ShardRecord], names: Sequence[str]) -> dict[str, NameStatistics]:
    """Name -> statistics over all shards, merged in the order given; empty where no shard keeps moments."""
    moments = Moments()
    merged = {name: moments.zero() for name in names}
    seen = False
    for record in records:
        if layout.STATES not in record.objects:
            continue
        states = open_states(files, record)
        for name in states.names(moments.kind):
            if name not in merged:
                raise DamageError(f"{states_path(files, record)}: sums of {name!r}, which is no name of this run")
            seen = True
            merged[name] = moments.merge(merged[name], states.load(moments, name))
    return {name: moments.finalise(state) for name, state in merged.items()} if seen else {}


def summarise(records: Iterable[ShardRecord]) -> dict[str, Any]:
    """Totals over commit records: the count of record, never taken from metrics."""
    total: dict[str, Any] = dict.fromkeys(("shards", *COUNTS, "bytes"), 0)
    tables: dict[str, dict[str, float]] = {key: {} for key in TABLES}
    environments: list[Mapping[str, str]] = []
    checks: dict[str, float] = {}
    for record in records:
        total["shards"] += 1
        for key in COUNTS:
            total[key] += getattr(record, key)
        total["bytes"] += sum(item.bytes for item in record.objects.values())
        for key, table in tables.items():
            for name, value in getattr(record, key).items():
                table[name] = table.get(name, 0) + value
        for name, error in record.self_check.items():
            checks[name] = max(error, checks.get(name, 0.0))
        if record.environment not in environments:
            environments.append(record.environment)
    return {
        **total,
        **tables,
        "self_check": checks,
        "environments": [dict(environment) for environment in environments],
    }
