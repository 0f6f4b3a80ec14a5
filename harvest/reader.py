"""Opening a run: committed shards only, finished or not, without a lock and without changing anything on disk.

Row i of every name and row i of `tokens()` are the same token; rows are in dataset order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from harvest.activations import Activations, row_numbers
from harvest.batches import Batches
from harvest.directions import Named, Result, compute, stored
from harvest.errors import NotBuiltError, RequestError
from harvest.features import labels_of, pooled_rows
from harvest.rawrows import Parts
from harvest.records import ShardRecord
from harvest.reduce.direction import Direction
from harvest.reduce.moments import NameStatistics
from harvest.results import merged_statistics, summarise
from harvest.store import layout
from harvest.store.files import Files
from harvest.store.grid import DTYPES
from harvest.store.ledger import Ledger, RunRecord
from harvest.store.opening import open_files
from harvest.store.tables import StoredTable, concat_documents
from harvest.storedrows import TORCH_DTYPES
from harvest.tokens import TokenRows


def open_run(run: str | Path | Files, storage: Mapping[str, Any] | None = None) -> Run:
    """The run in a folder or at a URL (`storage` as `run.storage`), or in files that are already open.

    Raises RequestError where there is none, or one of a later version.
    """
    if isinstance(run, list | tuple):
        raise NotBuiltError(f"open: a list of {len(run)} runs is not built in this version; open one")
    files = open_files(str(run), storage, setting="path") if isinstance(run, str | Path) else run
    path = str(run) if isinstance(run, str | Path) else files.url
    record = Ledger(files).read_run()
    if record is None:
        raise RequestError(f"{path} is not a run (no {layout.RUN})")
    return Run(path, files, record)


class Run:
    """A run as it was when it was opened; shards that are committed later are not seen."""

    def __init__(self, path: str, files: Files, record: RunRecord) -> None:
        ledger = Ledger(files)
        self.path, self.files, self.record = path, files, record
        self.complete = ledger.completion() is not None
        """Every shard is committed."""
        self.shards: list[ShardRecord] = list(ledger.records().values())
        """Commit records in dataset order."""
        self._parts = Parts([(files, self.shards)], _chunk_bytes(record) * len(record.plan["resolved"]["names"]))
        self._tokens = TokenRows(
            self._parts,
            spans=bool(record.plan["resolved"].get("spans")),
            variants=bool(record.job.get("data", {}).get("contrast")),
        )
        self._activations: dict[str, Activations] = {}

    def __repr__(self) -> str:
        state = "complete" if self.complete else "unfinished"
        shown = ", ".join(self.names[:3]) + (f", ... ({len(self.names)})" if len(self.names) > 3 else "")
        return f"Run({self.path!r}, {state}, {len(self.shards)} shards, {len(self)} rows, {shown or 'no names'})"

    def __len__(self) -> int:
        """Rows of every name."""
        return self._parts.rows

    @cached_property
    def names(self) -> list[str]:
        """Every name of the run, in the order of the plan."""
        return list(self.record.plan["resolved"]["names"])

    def __getitem__(self, name: str) -> Activations:
        """The rows of a name. Raises RequestError listing the names where there is no such name."""
        if name not in self.names:
            raise RequestError(f"name {name!r}: this run has {', '.join(self.names) or 'none'}")
        if name not in self._activations:
            self._refuse_unstored(name)
            plan = self.record.plan  # the shards are held against it when they are read
            width, dtype = int(plan["names"][name]["width"]), str(plan["resolved"]["store_dtype"])
            chunk_rows = max(1, _chunk_bytes(self.record) // (width * np.dtype(DTYPES[dtype]).itemsize))
            self._activations[name] = Activations(self._parts, name, width, dtype, chunk_rows)
        return self._activations[name]

    def _refuse_unstored(self, what: str) -> None:
        if any(layout.TOKENS not in record.objects for record in self.shards):
            raise RequestError(f"{what}: this run stores no rows (capture.store = false), only sums")

    def summary(self) -> dict[str, Any]:
        """Totals over the commit records."""
        return summarise(self.shards)

    # ---- tables --------------------------------------------------------------------------------------------------

    def tokens(
        self, rows: Any = None, columns: Sequence[str] | None = None, documents: int | Iterable[int] | None = None
    ) -> pa.Table:
        """Which token each row is: document int64, position int32, token int32, chunk int32, special bool; with
        `data.contrast` also `variant` int8, the sequence of the document that the position counts in; where the job
        uses spans (`data.spans`, chat messages, positions by span) also `span`, the innermost one or null.

        `rows`: a slice, a row number, indices in any order or a mask; `documents`: only rows of this id, or
        of these, in row order. Shards and columns that are not asked for are not read.
        """
        self._refuse_unstored("tokens")
        known = self._tokens.schema.names
        wanted = list(known if columns is None else columns)
        for column in wanted:
            if column not in known:
                raise RequestError(f"columns: {column!r} is not in the token table: {', '.join(known)}")
        if documents is not None:
            if rows is not None:
                raise RequestError("tokens: give rows or documents, not both")
            return self._tokens.take(wanted, self._tokens.rows_of_documents(documents))
        if rows is None or (isinstance(rows, slice) and rows.step in (None, 1)):
            start, stop, _ = (rows or slice(None)).indices(len(self))
            return self._tokens.between(wanted, start, max(start, stop))
        return self._tokens.take(wanted, row_numbers(rows, len(self)))

    def documents(self) -> pa.Table:
        """Every document, stored or skipped: document, tokens, rows, status, reason and the kept columns; with
        `data.contrast` a row for each of its two sequences, which `variant` tells apart."""
        paths = [f"{layout.attempt_path(record.attempt)}/{layout.DOCUMENTS}" for record in self.shards]
        return concat_documents(StoredTable(self.files, path).read() for path in paths)

    # ---- finding -------------------------------------------------------------------------------------------------

    def find(self, token: int | None = None, document: int | None = None, text: str | None = None) -> np.ndarray:
        """Row numbers int64, rising, where all that is given holds: the token's id, the document's id."""
        if text is not None:
            raise NotBuiltError("find(text=...): not built in this version; give token or document")
        if token is None and document is None:
            raise RequestError("find: give token, document or both")
        for what, value in (("token", token), ("document", document)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer)):
                raise RequestError(f"find({what}={value!r:.100}): allowed is a whole number, the {what}'s id")
        if document is None:
            return self._tokens.where(pc.field("token") == int(token or 0))
        rows = self._tokens.rows_of_documents([document])
        if token is None:
            return rows
        tokens = self._tokens.take(["token"], rows).column("token").to_numpy()
        found: np.ndarray = rows[tokens == token]
        return found

    def rows_where(self, expression: pc.Expression) -> np.ndarray:
        """Row numbers int64, rising, where a pyarrow expression over the token table holds."""
        self._refuse_unstored("rows_where")
        return self._tokens.where(expression)

    def context(self, row: int, before: int = 10, after: int = 10) -> pa.Table:
        """The token table around a row, within its document (of a contrast, within its sequence)."""
        (at,) = row_numbers(row, len(self), "row")
        table = self.tokens(slice(max(0, int(at) - before), int(at) + after + 1))
        for key in {"document", "variant"} & set(table.column_names):
            here = self.tokens(int(at), [key]).column(key)[0]
            table = table.filter(pc.equal(table.column(key), here))
        return table

    # ---- training ------------------------------------------------------------------------------------------------

    def batches(
        self,
        names: str | Sequence[str],
        batch_size: int = 4096,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int = 1,
        with_rows: bool = False,
        stack: bool = False,
        where: Any = None,
        rank: int = 0,
        world: int = 1,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        mixing: str = "auto",
    ) -> Batches:
        """Every row once an epoch, the last batch as short as it comes: tensors [B, d], {name: tensor} for a list of
        names, [B, names, d] with `stack`; (that, row numbers int64 [B]) with `with_rows`.

        The order depends on the number of rows, `seed` and the epoch alone; the object may be looped over again, and
        goes on with the next epoch. `where`: indices, a mask or a pyarrow
        expression over the token table. `mixing`: "global" shuffles over all rows, "blocks" mixes blocks of rows a pool
        at a time (`.mixing` of the result says how many) and reads them whole; "auto" is "global" for uncompressed
        rows on this machine's disk and "blocks" elsewhere, where "global" costs a request or a chunk for every row.
        """
        single = isinstance(names, str)
        arrays = [self[name] for name in ([names] if isinstance(names, str) else names)]
        if not arrays:
            raise RequestError("names: [] is empty; give at least one name")
        if stack and len({(array.shape[1], array.dtype) for array in arrays}) > 1:
            raise RequestError(f"stack: {', '.join(map(repr, arrays))} differ; leave it out for a dict")
        for setting, value, least in (("batch_size", batch_size, 1), ("epochs", epochs, 1), ("world", world, 1)):
            if type(value) is not int or value < least:
                raise RequestError(f"{setting} = {value!r}: allowed are whole numbers of at least {least}")
        if type(rank) is not int or not 0 <= rank < world:
            raise RequestError(f"rank = {rank!r}: allowed are 0 to {world - 1}, world being {world}")
        if mixing not in ("auto", "global", "blocks"):
            raise RequestError(f"mixing = {mixing!r}: allowed are 'auto', 'global' and 'blocks'")
        return Batches(
            arrays,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            epochs=epochs,
            with_rows=with_rows,
            stack=stack,
            single=single,
            rows=self._selected(where),
            rank=rank,
            world=world,
            dtype=_torch_dtype(dtype),
            device=device,
            blocks=mixing == "blocks" or (mixing == "auto" and not all(array.mapped for array in arrays)),
        )

    def _selected(self, where: Any) -> np.ndarray | None:
        if where is None:
            return None
        if isinstance(where, pc.Expression):
            return self.rows_where(where)
        if isinstance(where, pa.Array | pa.ChunkedArray):
            where = where.to_numpy(zero_copy_only=False) if isinstance(where, pa.Array) else where.to_numpy()
        rows = row_numbers(where, len(self), "where")
        if len(np.unique(rows)) != len(rows):
            raise RequestError("where: a row is named twice; every row comes once an epoch")
        return rows

    # ---- sums ----------------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, NameStatistics]:
        """Name -> count, mean, variance, norms and extremes, with special tokens and (`.ordinary`) without.

        Merged in shard order, so the bits are the same for any number of workers.
        """
        return dict(self._statistics)

    @cached_property
    def _statistics(self) -> dict[str, NameStatistics]:
        found = merged_statistics(self.files, self.shards, self.names)
        if not found:
            why = "statistics.moments = false" if self.shards else "no shard is committed"
            raise RequestError(f"statistics: this run keeps none ({why})")
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
            raise RequestError(f"name {name!r}: this run has {', '.join(self.names) or 'none'}")
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


def _chunk_bytes(record: RunRecord) -> int:
    """Of what has to be read to read one row, decoded; 0 where rows lie open."""
    if record.job.get("store", {}).get("compression", "none") == "none":
        return 0
    return int(record.plan["resolved"]["chunk_bytes"])


def _torch_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in TORCH_DTYPES:
        raise RequestError(f"dtype = {dtype!r}: allowed are {', '.join(TORCH_DTYPES)}")
    return TORCH_DTYPES[dtype]


open = open_run
"""`harvest.open`."""
