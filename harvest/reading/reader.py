"""Opening a run: committed shards only, finished or not, without a lock and without changing anything on disk.

Row i of every name and row i of `tokens()` are the same token; rows are in dataset order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from harvest import glance
from harvest.concepts.best import Best, best_of
from harvest.concepts.directions import Named, Result, compute, stored
from harvest.errors import RequestError
from harvest.reading.activations import Activations
from harvest.reading.features import labels_of, pooled_rows
from harvest.reading.rowset import RowSet
from harvest.reading.textsearch import pieces_of_run
from harvest.reading.tokens import TokenRows
from harvest.records import ShardRecord
from harvest.reduce.covariance import CovarianceState
from harvest.reduce.direction import Direction
from harvest.reduce.known import reduction_of
from harvest.reduce.moments import NameStatistics
from harvest.results import covariance_of, keeps_covariance, merged_statistics, summarise, with_covariances
from harvest.states import merged_states
from harvest.store import layout
from harvest.store.files import Files
from harvest.store.folder import no_run
from harvest.store.grid import DTYPES
from harvest.store.ledger import Ledger, RunRecord
from harvest.store.opening import open_files
from harvest.store.rawrows import Parts
from harvest.store.tables import StoredTable, concat_documents, documents_schema, tokens_schema


def open_run(run: str | Path | Files, storage: Mapping[str, Any] | None = None) -> Run:
    """The run in a folder or at a URL (`storage` as `run.storage`), or in files that are already open.

    Raises RequestError where there is none, or one of a later version.
    """
    files = open_files(str(run), storage, setting="path") if isinstance(run, str | Path) else run
    path = str(run) if isinstance(run, str | Path) else files.url
    record = Ledger(files).read_run()
    if record is None:
        raise no_run(path)
    return Run(path, files, record)


class Run(RowSet):
    """A run as it was when it was opened; shards that are committed later are not seen."""

    def __init__(self, path: str, files: Files, record: RunRecord) -> None:
        ledger = Ledger(files)
        self.files, self.record = files, record
        self.complete = ledger.completion() is not None
        """Every shard is committed."""
        self.shards: list[ShardRecord] = list(ledger.records().values())
        """Commit records in dataset order."""
        names = record.plan["resolved"]["names"]
        self._parts = Parts([(files, self.shards)], chunk_bytes(record) * len(names))
        super().__init__(path, names, self._parts.rows, TokenRows(self._parts, token_columns(record)))

    def __repr__(self) -> str:
        state = "complete" if self.complete else "unfinished"
        shown = ", ".join(self.names[:3]) + (f", ... ({len(self.names)})" if len(self.names) > 3 else "")
        return f"Run({self.path!r}, {state}, {len(self.shards)} shards, {len(self)} rows, {shown or 'no names'})"

    def _about(self) -> list[tuple[str, str]]:
        found, job, planned = self.summary(), self.record.job, self.record.plan
        skipped = ", ".join(f"{count:,} {reason}" for reason, count in found["skipped"].items())
        of = f" of {planned['shards']:,}" if planned.get("shards") and not self.complete else ""
        stored = planned["resolved"]["store_dtype"]
        directions = [str(told["name"]) for told in job.get("directions") or ()]
        lines = [
            ("state", "complete" if self.complete else "unfinished: committed shards are shown"),
            ("model", str(job.get("model", {}).get("name", ""))),
            ("data", str(job.get("data", {}).get("path", ""))),
            ("documents", f"{found['documents']:,}" + (f" (skipped: {skipped})" if skipped else "")),
            ("tokens", f"{found['tokens']:,}"),
            ("rows", f"{len(self):,} of each name, {stored}"),
            ("store", f"{glance.size(found['bytes'])} in {glance.plural(found['shards'], 'shard')}{of}"),
            ("names", glance.few(self.names)),
        ]
        return lines + ([("directions", glance.few(directions))] if directions else [])

    def _open(self, name: str) -> Activations:
        return open_activations(self._parts, name, self.record)

    def _pieces(self) -> Sequence[bytes]:
        return self._pieces_of_tokenizer

    @cached_property
    def _pieces_of_tokenizer(self) -> Sequence[bytes]:
        return pieces_of_run(self.record)

    def _refuse_unstored(self, what: str) -> None:
        if any(layout.TOKENS not in record.objects for record in self.shards):
            raise RequestError(f"{what}: this run stores no rows (capture.store = false), only sums")

    def summary(self) -> dict[str, Any]:
        """Totals over the commit records."""
        return summarise(self.shards)

    def documents(self) -> pa.Table:
        """Every document, stored or skipped: document, tokens, rows, status, reason and the kept columns; with
        `data.contrast` a row for each of its two sequences, which `variant` tells apart."""
        paths = [f"{layout.attempt_path(record.attempt)}/{layout.DOCUMENTS}" for record in self.shards]
        return concat_documents(StoredTable(self.files, path).read() for path in paths)

    # ---- sums ----------------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, NameStatistics]:
        """Name -> count, mean, variance, norms and extremes, with special tokens and (`.ordinary`) without, and the
        covariance where the job asks for it.

        Merged in shard order, so the bits are the same for any number of workers.
        """
        return Named(self._statistics, "statistics")

    @cached_property
    def _statistics(self) -> dict[str, NameStatistics]:
        found = merged_statistics(self.files, self.shards, self.names)
        if not found:
            why = "statistics.moments = false" if self.shards else "no shard is committed"
            raise RequestError(f"statistics: this run keeps none ({why})")
        return with_covariances(found, self._covariance) if keeps_covariance(self.record) else found

    def _covariance(self, name: str) -> CovarianceState:
        return covariance_of(self.files, self.shards, name, complete=self.complete)

    def reduced(self, name: str) -> dict[str, Any]:
        """Name of the activations -> what a reduction of `statistics.also` comes to, merged in shard order.

        Raises RequestError where the run keeps no such reduction, or has no shard yet.
        """
        found = merged_states(self.files, self.shards, reduction_of(name), self.names)
        if not found:
            kept = ", ".join(self.record.job.get("statistics", {}).get("also", ())) or "none"
            why = f"this run keeps {kept} (statistics.also)" if self.shards else "no shard is committed"
            raise RequestError(f"reduced({name!r}): {why}")
        return found

    def directions(self, mode: str | None = None) -> Named[Named[Direction]]:
        """Concept directions by their name, then by the name of the activations (`residual.12`, or `residual.12@-3`
        where the state is read at several places); of the job's first mode, or of `mode` where that was asked for.

        Of a finished run as they were written; of an unfinished one computed now, from the committed shards.
        """
        asked = {result.name: list(result.found) for result in self.direction_results}
        found = {
            result.name: Named(result.found[mode or next(iter(result.found))], f"direction {result.name!r}")
            for result in self.direction_results
            if mode is None or mode in result.found
        }
        if mode is not None and not found:
            modes = dict.fromkeys(one for modes in asked.values() for one in modes)
            raise RequestError(f"mode = {mode!r}: this run has {', '.join(modes) or 'no directions'}")
        return Named(found, "directions")

    def best(self, direction: str | None = None, mode: str | None = None) -> Best:
        """The mode and name at which a direction tells its groups apart best, and what it is worth there held out.

        Chosen by folds of the training examples alone, of `mode` or of all the modes; `direction` may be left out where
        the job has one. Raises RequestError where there was too little to choose by.
        """
        found = Named({result.name: result for result in self.direction_results}, "directions")
        if direction is None and len(found) != 1:
            raise RequestError(f"best: this run has the directions {', '.join(found) or 'none'}; name one")
        return best_of(found[next(iter(found)) if direction is None else direction], mode)

    @cached_property
    def direction_results(self) -> list[Result]:
        """Every direction with all its modes and its card, in the job's order."""
        return list(stored(self.files, self.record) if self.complete else compute(self.files, self.record, self.shards))

    @overload
    def features(self, name: str, pool: str = "mean", labels: None = None) -> np.ndarray: ...

    @overload
    def features(self, name: str, pool: str = "mean", *, labels: Sequence[str]) -> tuple[np.ndarray, pa.Table]: ...

    @overload
    def features(self, name: str, pool: str, labels: Sequence[str]) -> tuple[np.ndarray, pa.Table]: ...

    def features(
        self, name: str, pool: str = "mean", labels: Sequence[str] | None = None
    ) -> np.ndarray | tuple[np.ndarray, pa.Table]:
        """One pooled row ("mean", "last" or "max" over its stored rows) per document that has rows: float32 [n, d];
        of a contrast per sequence, as in `documents()`.

        With `labels`, columns of `documents()`, also a table of them, row by row with the features; "document" says
        which document each is. Pools that the run kept (`capture.pool`) are read, others computed from its rows.
        """
        if name not in self.names:
            raise RequestError(f"name {name!r}: this run has {glance.few(self.names)}{glance.meant(name, self.names)}")
        plan, capture = self.record.plan, self.record.job.get("capture", {})
        found = pooled_rows(
            self.files,
            self.shards,
            name,
            pool,
            width=int(plan["names"][name]["width"]),
            dtype=str(plan["resolved"]["store_dtype"]),
            stored=capture.get("pool") or (),
        )
        if labels is None:
            return found
        return found, labels_of(self.documents(), [labels] if isinstance(labels, str) else labels)


def chunk_bytes(record: RunRecord) -> int:
    """Of what has to be read to read one row, decoded; 0 where rows lie open."""
    if record.job.get("store", {}).get("compression", "none") == "none":
        return 0
    return int(record.plan["resolved"]["chunk_bytes"])


def open_activations(parts: Parts, name: str, record: RunRecord) -> Activations:
    """A name's rows; the shards are held against the plan when they are read."""
    plan = record.plan
    width, dtype = int(plan["names"][name]["width"]), str(plan["resolved"]["store_dtype"])
    chunk_rows = max(1, chunk_bytes(record) // (width * np.dtype(DTYPES[dtype]).itemsize))
    return Activations(parts, name, width, dtype, chunk_rows)


def token_columns(record: RunRecord) -> pa.Schema:
    """Of the run's token tables."""
    return tokens_schema(
        spans=bool(record.plan["resolved"].get("spans")),
        variants=bool(record.job.get("data", {}).get("contrast")),
    )


def document_columns(record: RunRecord) -> pa.Schema:
    """Of the run's documents tables, before the kept columns."""
    return documents_schema(
        variants=bool(record.job.get("data", {}).get("contrast")),
        logit_diffs=bool(record.plan["resolved"].get("answers")),
    )
