"""How a run stands, read from its ledger and its lease; nothing is changed and no model or data is touched."""

from __future__ import annotations

import time
from typing import Any

from harvest.results import Totals
from harvest.runtime.tally import Expected, Tally
from harvest.stages import Worked
from harvest.store import layout
from harvest.store.folder import no_run
from harvest.store.lease import SILENT_SECONDS, Holder, read_holder
from harvest.store.ledger import Ledger, RunRecord
from harvest.store.opening import open_files


def status_of(path: str) -> dict[str, Any]:
    """Committed, running, failed and missing shards, rows, rates, who is at work, and what the stages took.

    Plain values but for `stages`, a `harvest.stages.Stages` or None. Raises RequestError where there is no run.
    """
    return Follower(path).look()


class Follower:
    """Looks at a run again and again.

    A look lists the ledger, and reads the lease and the records that are new since the last one; all of them again
    where another coordinator has taken the run over, or a shard is not committed any more.
    """

    def __init__(self, path: str) -> None:
        """Raises RequestError where there is no run."""
        self.path, self._files = path, open_files(path, setting="path")
        self._ledger = Ledger(self._files)
        self.holder: Holder | None = None
        """Who coordinates it, or did last."""
        self._first: Holder | None = None
        """As it was at the first look."""
        self.tally = Tally()
        """Of what is committed; speeds count from the first look."""
        self._begin(self._run())

    def look(self) -> dict[str, Any]:
        """As `status_of`, now."""
        complete = self._ledger.completion() is not None  # first: what is read then is all that there will be
        before, self.holder = self.holder, read_holder(self._files)
        anew = before is not None and (self.holder is None or self.holder.life != before.life)
        try:
            self._read(anew=anew)
        except FileNotFoundError:  # un-committed since it was listed: the run grows, or is being repaired
            self._read(anew=True)
        return self._told(complete)

    def _run(self) -> RunRecord:
        run = self._ledger.read_run() if self._files.exists(layout.RUN) else None
        if run is None:
            raise no_run(self.path)
        return run

    def _begin(self, run: RunRecord) -> None:
        plan = run.plan
        amounts = {key: plan.get(key) for key in ("documents", "tokens", "shards", "judged")}
        self._expected = Expected(**amounts)
        self._known: set[str] = set()
        self._totals, self._worked = Totals(), Worked()

    def _read(self, *, anew: bool) -> None:
        keys = self._ledger.keys()
        if anew or not self._known.issubset(keys):
            self._begin(self._run())
        first = not self._known
        new = self._ledger.read([key for key in keys if key not in self._known])
        if first:
            self.tally.start(self._expected, ())
        for record in sorted(new, key=lambda record: record.shard):
            self._known.add(record.shard.key)
            self._totals.add(record)
            self._worked.add(record)
            self.tally.committed(record)
        if first:
            self.tally.ready()

    def _lives(self, holder: Holder) -> bool:
        """As far as one look tells; between two, its heartbeat moves, whatever its clock says."""
        if self._first is None:
            self._first = holder
        moves = (holder.life, holder.heartbeat) != (self._first.life, self._first.heartbeat)
        return not holder.gone() and (moves or abs(time.time() - holder.heartbeat) <= SILENT_SECONDS)

    def _told(self, complete: bool) -> dict[str, Any]:
        totals, expected, holder = self._totals.data(), self._expected, self.holder
        alive = holder is not None and not complete and self._lives(holder)
        forward = totals["seconds"].get("forward", 0.0)
        return {
            "run": self.path,
            "state": "complete" if complete else "running" if alive else "unfinished",
            "committed": totals["shards"],
            "running": list(holder.running) if holder is not None and alive else [],
            "failed": dict(holder.failed) if holder is not None else {},
            "missing": None if expected.shards is None else max(0, expected.shards - totals["shards"]),
            "expected_documents": expected.documents,
            "expected_tokens": expected.tokens,
            "documents": totals["documents"],
            "skipped": totals["skipped"],
            "rows": totals["rows"],
            "tokens": totals["tokens"],
            "bytes": totals["bytes"],
            "non_finite": totals["non_finite"],
            "non_finite_documents": totals["non_finite_documents"],
            "tokens_per_forward_second": round(totals["forward_tokens"] / forward, 1) if forward else None,
            "stages": self._worked.stages(),
            "worker": None
            if holder is None or not alive
            else {
                "host": holder.host,
                "pid": holder.pid,
                "seconds_since_heartbeat": round(time.time() - holder.heartbeat, 1),
                "doing": holder.doing,
                "doing_seconds": round(time.time() - holder.since, 1) if holder.since else None,
            },
        }
