"""Re-reads everything a run holds and says where it differs from the ledger; changes nothing, reads in pieces."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harvest.checking.findings import Finding, Report
from harvest.checking.readcheck import read_findings
from harvest.checking.runcheck import check_run, missing_shards, read_records
from harvest.checking.shardcheck import ShardCheck
from harvest.checking.sumcheck import SumCheck
from harvest.store import layout
from harvest.store.files import Files
from harvest.store.folder import no_run
from harvest.store.ledger import Ledger
from harvest.store.opening import open_files

MOST_THREADS = 8
"""Reading, checksums and sums let one another run; beyond this the interpreter between them is what they wait for."""


def verify_run(
    run: str | Path | Files, storage: Mapping[str, Any] | None = None, *, only: Collection[str] | None = None
) -> Report:
    """Checks every object, table, array and sum of a run; `only` these shards' (by key), and the run as a whole.

    Raises RequestError, touching nothing, where there is no run; DamageError where run.json cannot be read.
    """
    files = open_files(str(run), storage, setting="path") if isinstance(run, str | Path) else run
    path = str(run) if isinstance(run, str | Path) else files.url
    record = Ledger(files).read_run()
    if record is None:
        raise no_run(path)
    findings: list[Finding] = []
    records = read_records(Ledger(files), findings)
    torn = bool(findings)
    checked = [shard for shard in records if only is None or shard.shard.key in only]
    sums = SumCheck(record)
    with ThreadPoolExecutor(_threads(), thread_name_prefix="harvest-verify") as threads:
        for shard in checked:
            found = list(ShardCheck(files, record, shard, sums).findings(threads))
            if not any(finding.damage for finding in found):
                found += read_findings(files, record, shard, threads)
            findings += found
    missing = missing_shards(record, records)
    sound = not any(finding.damage and finding.object.endswith(layout.STATES) for finding in findings)
    findings += check_run(files, record, records, missing, torn=torn, sums=sound)
    findings += [_not_remade(kind) for kind in sums.unknown if checked]
    return Report(
        run=path,
        shards=len(checked),
        objects=sum(len(shard.objects) for shard in checked),
        bytes=sum(item.bytes for shard in checked for item in shard.objects.values()),
        rows=sum(shard.rows for shard in checked),
        remade=tuple(sorted(sums.remade)),
        missing=tuple(missing),
        findings=tuple(sorted(findings, key=lambda finding: not finding.damage)),
    )


def _not_remade(kind: str) -> Finding:
    what = f"statistics.also = {kind!r}: no such reduction here, so that its sums were not made again from the rows"
    return Finding(damage=False, shard=None, object=layout.RUN, what=what)


def _threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_THREADS, cores)
