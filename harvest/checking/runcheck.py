"""What concerns no single shard's contents: the ledger as a whole, merged results, and what lies around."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harvest.checking.findings import Finding
from harvest.checking.shardcheck import bare
from harvest.concepts.directions import content_hash, settings_of
from harvest.concepts.directions import stored as stored_directions
from harvest.errors import DamageError, RequestError
from harvest.records import ShardRecord, SourceFile
from harvest.reduce.concepts import ConceptState
from harvest.reduce.covariance import Covariance
from harvest.reduce.direction import SUMS, Direction, of_sums
from harvest.results import merged_statistics, summarise
from harvest.runtime.schedule import Schedule
from harvest.states import MergedStates, merged_sums, open_states
from harvest.store import folder, layout
from harvest.store.files import Files
from harvest.store.ledger import MENDS, Ledger, RunRecord
from harvest.store.tables import parquet_bytes, statistics_table

LIKE_SUMS = 1e-9
"""Of a direction's length: what other libraries may round otherwise."""


def read_records(ledger: Ledger, findings: list[Finding]) -> list[ShardRecord]:
    """The readable records in dataset order; a torn one is added to the findings, and is not the end."""
    records = []
    for path, _ in ledger.files.list(layout.LEDGER):
        key = layout.record_key(path)
        if layout.is_temporary(path):
            continue
        if key is None:
            what = "not a commit record; move it elsewhere"
            findings.append(Finding(damage=True, shard=None, object=path, what=what))
            continue
        try:
            records.append(ledger.record(key))
        except DamageError as error:
            findings.append(Finding(damage=True, shard=key, object=path, what=bare(error)))
    return sorted(records, key=lambda record: record.shard)


def missing_shards(run: RunRecord, records: Sequence[ShardRecord]) -> list[str]:
    """Keys of the shards that a resume would harvest, as far as they are known."""
    committed = {record.shard.key: record for record in records}
    documents = {(record.shard.file, record.shard.start): record.documents for record in records}
    files = [
        SourceFile(number=i, name=file["name"], path="", format="", rows=file["rows"], fingerprint="")
        for i, file in enumerate(run.plan["files"])
    ]
    schedule = Schedule(
        files,
        shard_documents=run.plan["resolved"]["shard_documents"],
        attempts=1,
        kept=lambda file, start, stop: documents.get((file, start), stop - start),
        limit=run.job["data"]["limit"],
        max_tokens=run.job["data"]["max_tokens"],
        committed=committed,
    )
    missing = []
    while (assignment := schedule.next()) is not None:
        missing.append(assignment.shard.key)
    return missing


def check_run(
    files: Files, run: RunRecord, records: Sequence[ShardRecord], missing: Sequence[str], *, torn: bool, sums: bool
) -> Iterator[Finding]:
    """`torn`: some record could not be read; `sums`: every shard's sums are sound. What follows from them is compared
    only where it can be made again."""
    complete = files.exists(layout.COMPLETE)
    for key in missing:
        what = "not committed, in a run that says it is complete" if complete else "not committed yet"
        yield Finding(damage=complete, shard=key, object=layout.record_path(key), what=what)
    yield from _overlaps(run, records)
    if complete:
        every = not torn and not missing
        yield from _totals(files, records, compare=every)
        if every and sums:
            yield from _statistics(files, run, records)
            yield from _covariance(files, run, records)
        written = list(_directions(files, run))
        yield from written
        if every and sums and not written:
            yield from _vectors(files, run, records)
    for attempt in folder.stray_attempts(files, [record.attempt for record in records]):
        what = "an attempt without a commit record; the next run removes it"
        yield Finding(damage=False, shard=attempt.partition(".")[0], object=layout.attempt_path(attempt), what=what)
    for path in folder.foreign(files):
        if layout.attempt_of(path) is None and not path.startswith(f"{layout.LEDGER}/"):
            yield Finding(damage=False, shard=None, object=path, what="not written by a run")


def _overlaps(run: RunRecord, records: Sequence[ShardRecord]) -> Iterator[Finding]:
    """Every source row belongs to one shard at most, of a file that the run has."""
    for one, two in itertools.pairwise(records):
        if one.shard.file == two.shard.file and two.shard.start < one.shard.stop:
            what = f"begins at row {two.shard.start}, which {one.shard.key} holds already"
            yield Finding(damage=True, shard=two.shard.key, object=layout.record_path(two.shard.key), what=what)
    for record in records:
        if record.shard.file >= len(run.plan["files"]):
            what = f"of file {record.shard.file}; the run has {len(run.plan['files'])}"
            yield Finding(damage=True, shard=record.shard.key, object=layout.record_path(record.shard.key), what=what)


def _totals(files: Files, records: Sequence[ShardRecord], *, compare: bool) -> Iterator[Finding]:
    """complete.json says what the records add up to."""
    try:
        told = Ledger(files).completion() or {}
    except DamageError as error:
        yield _damaged(layout.COMPLETE, bare(error))
        return
    found: dict[str, Any] = json.loads(json.dumps(summarise(records))) if compare else {}
    for key, value in found.items():
        if told.get(key) != value:
            yield _damaged(layout.COMPLETE, f"{key}: {told.get(key)!r}, the records say {value!r}; {MENDS}")


def _statistics(files: Files, run: RunRecord, records: Sequence[ShardRecord]) -> Iterator[Finding]:
    """statistics.parquet holds, to the bit, what the shards' sums give: merging them is the same few operations."""
    try:
        statistics = merged_statistics(files, records, run.plan["resolved"]["names"])
    except DamageError:
        return  # told with its shard
    stored, told = _merged_file(files, layout.STATISTICS, bool(statistics))
    yield from told
    if stored is None:
        return
    expected = statistics_table(statistics)
    if stored == parquet_bytes(expected):
        return
    try:
        table = pq.ParquetFile(pa.BufferReader(stored), page_checksum_verification=True).read()
    except (pa.ArrowException, OSError) as error:
        yield _damaged(
            layout.STATISTICS, f"not a readable Parquet file ({' '.join(str(error).split())[:200]}); {MENDS}"
        )
        return
    if table.column_names != expected.column_names or len(table) != len(expected):
        yield _damaged(layout.STATISTICS, f"other columns or rows than the shards' sums give; {MENDS}")
        return
    for column in expected.column_names:  # another pyarrow may have packed the same values otherwise
        if repr(table.column(column).to_pylist()) != repr(expected.column(column).to_pylist()):  # NaN is NaN
            yield _damaged(layout.STATISTICS, f"{column} is not what the shards' sums give; {MENDS}")


def _merged_file(files: Files, name: str, kept: bool) -> tuple[bytes | None, list[Finding]]:
    """A file that is merged from the shards' sums, where it is to be compared; and what is wrong without looking in.

    `kept`: the shards have such sums."""
    try:
        stored = files.read(name)
    except FileNotFoundError:
        return None, [_damaged(name, f"missing; {MENDS}")] if kept else []
    if not kept:
        return None, [_damaged(name, "the shards keep no sums that it could come from")]
    return stored, []


def _covariance(files: Files, run: RunRecord, records: Sequence[ShardRecord]) -> Iterator[Finding]:
    """covariance.safetensors is, byte for byte, what the shards' sums give."""
    merged = MergedStates(Covariance(), run.plan["resolved"]["names"])
    try:
        for record in records:
            if layout.STATES in record.objects:
                merged.add(open_states(files, record))
    except DamageError as error:
        yield _damaged(layout.COVARIANCE, bare(error))
        return
    stored, told = _merged_file(files, layout.COVARIANCE, bool(merged))
    yield from told
    if stored is not None and stored != merged.saved():
        yield _damaged(layout.COVARIANCE, f"not what the shards' sums give; {MENDS}")


def _directions(files: Files, run: RunRecord) -> Iterator[Finding]:
    """Every direction's files are those that were written with complete.json."""
    try:
        told = (Ledger(files).completion() or {}).get("directions", {})
    except DamageError:
        return  # told with its totals
    for settings in run.job.get("directions") or ():
        for kind in ("safetensors", "json"):
            path = layout.direction_path(settings["name"], kind)
            try:
                found = content_hash(files.read(path))
            except FileNotFoundError:
                yield _damaged(path, f"missing; {MENDS}")
                continue
            if found != told.get(path):
                yield _damaged(path, f"not what the run wrote; {MENDS}")


def _vectors(files: Files, run: RunRecord, records: Sequence[ShardRecord]) -> Iterator[Finding]:
    """Directions that are sums are what the shards' sums give; the others would have to be fitted again."""
    directions = [settings for settings in settings_of(run) if settings.embedding is None]
    unmatched = "count" if run.job["data"].get("on_bad") == "skip" else "error"
    try:
        sums = merged_sums(files, records, directions, run.plan["resolved"]["names"])
        found = {result.name: result.found for result in stored_directions(files, run)} if directions else {}
        for settings in directions:
            merged = sums.of(settings.name)
            for mode, at in itertools.product([mode for mode in settings.modes if mode in SUMS], merged):
                state = merged[at]
                if not _same_direction(found[settings.name].get(mode, {}).get(at), state, mode, unmatched):
                    path = layout.direction_path(settings.name, "safetensors")
                    yield _damaged(path, f"{mode} at {at} is not what the shards' sums give; {MENDS}")
    except DamageError as error:
        yield _damaged(layout.DIRECTIONS, bare(error))


def _same_direction(found: Direction | None, state: ConceptState | str, mode: str, unmatched: str) -> bool:
    """Up to rounding; where no direction can be made of a state, whether none was."""
    try:
        made = None if isinstance(state, str) else of_sums(state, mode, unmatched).raw
    except RequestError:  # examples without a partner
        made = None
    if found is None or made is None or found.raw is None:
        return found is not None and made is None and found.raw is None
    room = LIKE_SUMS * float(np.linalg.norm(made))
    return found.raw.shape == made.shape and bool((np.abs(found.raw - made) <= room).all())


def _damaged(path: str, what: str) -> Finding:
    return Finding(damage=True, shard=None, object=path, what=what)
