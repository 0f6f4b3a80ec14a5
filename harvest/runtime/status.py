"""How a run stands, read from its ledger and its lease; nothing is changed and no model or data is touched."""

from __future__ import annotations

import time
from typing import Any

from harvest.errors import RequestError
from harvest.results import summarise
from harvest.stages import stages_of
from harvest.store import layout
from harvest.store.lease import read_holder
from harvest.store.ledger import Ledger
from harvest.store.opening import open_files


def status_of(path: str) -> dict[str, Any]:
    """Committed, running, failed and missing shards, rows, rates, who is at work, and what the stages took.

    Plain values but for `stages`, a `harvest.stages.Stages` or None. Raises RequestError where there is no run.
    """
    files = open_files(path)
    ledger = Ledger(files)
    run = ledger.read_run() if files.exists(layout.RUN) else None
    if run is None:
        raise RequestError(f"{path} is not a run (no {layout.RUN})")
    records, holder = ledger.records(), read_holder(files)
    totals = summarise(records.values())
    expected = run.plan.get("shards")
    alive = holder is not None and not holder.gone()
    forward = totals["seconds"].get("forward", 0.0)
    return {
        "run": path,
        "state": "complete" if ledger.completion() is not None else "running" if alive else "unfinished",
        "committed": totals["shards"],
        "running": list(holder.running) if holder is not None and alive else [],
        "failed": dict(holder.failed) if holder is not None else {},
        "missing": None if expected is None else max(0, expected - totals["shards"]),
        "expected_documents": run.plan.get("documents"),
        "expected_tokens": run.plan.get("tokens"),
        "documents": totals["documents"],
        "skipped": totals["skipped"],
        "rows": totals["rows"],
        "tokens": totals["tokens"],
        "bytes": totals["bytes"],
        "non_finite": totals["non_finite"],
        "non_finite_documents": totals["non_finite_documents"],
        "tokens_per_forward_second": round(totals["forward_tokens"] / forward, 1) if forward else None,
        "stages": stages_of(records.values()),
        "worker": None
        if holder is None or not alive
        else {
            "host": holder.host,
            "pid": holder.pid,
            "seconds_since_heartbeat": round(time.time() - holder.heartbeat, 1),
        },
    }
