"""`harvest.open`: a run, or several over different data read as one: the rows of the first, then those of the next."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from harvest.errors import RequestError
from harvest.reading.activations import Activations
from harvest.reading.features import labels_of
from harvest.reading.reader import Run, chunk_bytes, document_columns, open_activations, open_run, token_columns
from harvest.reading.rowset import RowSet
from harvest.reading.tokens import TokenRows
from harvest.reduce.base import Reduction
from harvest.reduce.covariance import Covariance, CovarianceState
from harvest.reduce.known import reduction_of
from harvest.reduce.moments import Moments, NameStatistics
from harvest.results import keeps_covariance, summarise, with_covariances
from harvest.states import MergedStates, open_states
from harvest.store import layout
from harvest.store.files import Files
from harvest.store.rawrows import Parts
from harvest.store.tables import documents_of_runs

ALIKE = ("fingerprint.model", "fingerprint.adapter", "model.quantization")
"""What the rows of runs that are read as one have in common, beside their names."""


@overload
def open_runs(run: str | Path | Files | Run, storage: Mapping[str, Any] | None = None) -> Run: ...


@overload
def open_runs(run: list[Any] | tuple[Any, ...], storage: Mapping[str, Any] | None = None) -> Run | Runs: ...


def open_runs(
    run: str | Path | Files | Run | list[Any] | tuple[Any, ...], storage: Mapping[str, Any] | None = None
) -> Run | Runs:
    """The run in a folder or at a URL (`storage` as `run.storage`), or in files that are already open; a list of them
    reads as one.

    Raises RequestError where there is none, or one of a later version, or where runs of a list do not go together.
    """
    if not isinstance(run, list | tuple):
        return run if isinstance(run, Run | Runs) else _one(run, storage)
    if not run:
        raise RequestError("open: [] names no run; give at least one")
    runs = [one if isinstance(one, Run) else _one(one, storage) for one in run]
    return runs[0] if len(runs) == 1 else Runs(runs)


def _one(run: Any, storage: Mapping[str, Any] | None) -> Run:
    if isinstance(run, RowSet):
        raise RequestError(f"open: {run!r:.200} is several runs; give those")
    if not isinstance(run, str | Path) and not hasattr(run, "read_range"):
        raise RequestError(f"open: {run!r:.200} is no run; allowed are a path, a URL, an open run and a list of them")
    return open_run(run, storage)


class Runs(RowSet):
    """Several runs of one model and the same names, read as one; a document is one of `run` and `document` together.

    `tokens()` and `documents()` have the further column `run`, which counts them from 0.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        """Raises RequestError naming the first thing in which two of them differ."""
        self.runs = list(runs)
        for number, run in enumerate(self.runs):
            if any(run.files.url == earlier.files.url for earlier in self.runs[:number]):
                raise RequestError(f"open: {run.path} is given twice; every row would come twice")
            _refuse_difference(self.runs[0], run)
        names = self.runs[0].names
        chunks = max(chunk_bytes(run.record) for run in self.runs) * len(names)
        self._parts = Parts([(run.files, run.shards) for run in self.runs], chunks)
        schema = pa.unify_schemas([token_columns(run.record) for run in self.runs])
        path = ", ".join(run.path for run in self.runs)
        super().__init__(path, names, self._parts.rows, TokenRows(self._parts, schema, several=True))

    def __repr__(self) -> str:
        return f"Runs([{self.path}], {len(self)} rows, {len(self.names)} names)"

    @property
    def complete(self) -> bool:
        """Every shard of every run is committed."""
        return all(run.complete for run in self.runs)

    def _open(self, name: str) -> Activations:
        widest = max(self.runs, key=lambda run: chunk_bytes(run.record))  # one may be compressed, another not
        return open_activations(self._parts, name, widest.record)

    def _pieces(self) -> Sequence[bytes]:
        kinds = {run.record.fingerprint.get("fingerprint.tokenizer") for run in self.runs}
        if len(kinds) > 1:
            raise RequestError("tokens as text: these runs have different tokenizers; ask each of .runs")
        return self.runs[0]._pieces()

    def _refuse_unstored(self, what: str) -> None:
        for run in self.runs:
            run._refuse_unstored(f"{run.path}: {what}")

    def summary(self) -> dict[str, Any]:
        """Totals over the commit records of all runs."""
        return summarise(record for run in self.runs for record in run.shards)

    def documents(self) -> pa.Table:
        """Every document of every run, stored or skipped, as in each of them, and `run`; a kept column of that name is
        `column.run`. Where some have variants, those of the others are 0."""
        return documents_of_runs(
            [run.documents() for run in self.runs], [document_columns(run.record) for run in self.runs]
        )

    def statistics(self) -> dict[str, NameStatistics]:
        """As of one run, over the rows of all; merged run by run, in shard order."""
        return dict(self._statistics)

    @cached_property
    def _statistics(self) -> dict[str, NameStatistics]:
        for run in self.runs:
            run.statistics()  # raises where it keeps none: the rest would be taken for all
        found = self._merged(Moments())
        every = all(keeps_covariance(run.record) for run in self.runs)  # else the rest would be taken for all
        return with_covariances(found, self._covariance) if every else found

    def _covariance(self, name: str) -> CovarianceState:
        return functools.reduce(Covariance().merge, (run._covariance(name) for run in self.runs))

    def reduced(self, name: str) -> dict[str, Any]:
        """As of one run, over the rows of all; merged run by run, in shard order."""
        for run in self.runs:
            run.reduced(name)
        return self._merged(reduction_of(name))

    def _merged(self, reduction: Reduction[Any]) -> dict[str, Any]:
        merged = MergedStates(reduction, self.names)
        for run in self.runs:
            for record in run.shards:
                if layout.STATES in record.objects:
                    merged.add(open_states(run.files, record))
        return merged.result()

    def features(self, name: str, pool: str = "mean", labels: Sequence[str] | None = None) -> Any:
        """As of one run: pooled rows float32 [n, d] of the documents that have rows, run by run, and their labels."""
        found = np.concatenate([run.features(name, pool) for run in self.runs])
        if labels is None:
            return found
        return found, labels_of(self.documents(), [labels] if isinstance(labels, str) else labels)


def _refuse_difference(first: Run, run: Run) -> None:
    for what, (one, two) in {
        "names": (sorted(first.names), sorted(run.names)),
        "widths": tuple({name: one.record.plan["names"][name]["width"] for name in one.names} for one in (first, run)),
        "store.dtype": tuple(one.record.plan["resolved"]["store_dtype"] for one in (first, run)),
        **{key: (first.record.fingerprint.get(key), run.record.fingerprint.get(key)) for key in ALIKE},
    }.items():
        if one != two:
            raise RequestError(
                f"open: {run.path} and {first.path} differ in {what}: {_short(two)} and {_short(one)}; runs are read "
                "as one where only their data differ (harvest.join aligns runs over the same tokens)"
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
