"""One committed shard against its record: objects, tables, arrays, pools and sums; holds its tables, never its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import google_crc32c
import numpy as np

from harvest.checking.findings import Finding
from harvest.checking.scan import Scan, scan_rows
from harvest.checking.sumcheck import SumCheck
from harvest.errors import DamageError
from harvest.reading.features import documents_with_rows
from harvest.records import DOCUMENTS_PER_FILE, ArraySpec, ShardRecord
from harvest.reduce.base import StateFile
from harvest.states import open_states
from harvest.store import layout
from harvest.store.arrays import StoredArray
from harvest.store.files import Files
from harvest.store.ledger import RunRecord
from harvest.store.storedrows import StoredRows
from harvest.store.tables import LOGIT_DIFF, StoredTable, columns_of, keys_digest, sequence_numbers, tokens_schema
from harvest.text.reasons import NON_FINITE

READ_BYTES = 8 << 20
"""Of an object, at a time."""
MOST_LISTED = 10
"""Documents that one finding names; the rest is counted."""

Tokens = Mapping[str, np.ndarray]
"""Column of the token table -> its values."""


class ShardCheck:
    """One shard's checks; what is found broken is not looked into any further."""

    def __init__(self, files: Files, run: RunRecord, record: ShardRecord, sums: SumCheck) -> None:
        self._files, self._run, self._record, self._sums = files, run, record, sums
        self._path = layout.attempt_path(record.attempt)
        self._pools: tuple[str, ...] = tuple(run.job.get("capture", {}).get("pool") or ())
        self._broken: set[str] = set()
        self._odd: set[int] | None = None
        """Documents that are listed with values that are no finite numbers; None without a sound table."""

    def findings(self, threads: Executor) -> Iterator[Finding]:
        """Everything about the shard, cheapest first; objects and names are spread over `threads`."""
        yield from self._objects(threads)
        try:
            tokens = self._read_tokens()
            yield from self._documents(tokens)
            if tokens is not None:
                yield from self._tokens(tokens)
            states = None if layout.STATES in self._broken else open_states(self._files, self._record)
            pooled = 0
            if self._pools and layout.DOCUMENTS not in self._broken:
                pooled = documents_with_rows(self._files, self._record)
            names = self._run.plan["resolved"]["names"]
            for found in threads.map(lambda name: list(self._name(name, tokens, states, pooled)), names):
                yield from found
        except DamageError as error:
            yield self._finding("", bare(error))

    def _finding(self, inside: str, what: str, damage: bool = True) -> Finding:
        path = f"{self._path}/{inside}" if inside else self._path
        return Finding(damage=damage, shard=self._record.shard.key, object=path, what=what)

    # ---- objects -------------------------------------------------------------------------------------------------

    def _objects(self, threads: Executor) -> Iterator[Finding]:
        """The ledger against the disk: sizes, then checksums."""
        listed = {path.removeprefix(f"{self._path}/"): size for path, size in self._files.list(self._path)}
        vouched = self._record.objects
        for inside, what in zip(vouched, threads.map(lambda inside: self._object(inside, listed.get(inside)), vouched)):
            if what is not None:
                self._broken.add(inside)
                yield self._finding(inside, what)
        for inside in listed:
            if inside not in vouched:
                yield self._finding(inside, "foreign: the ledger does not know it", damage=False)

    def _object(self, inside: str, size: int | None) -> str | None:
        stored = self._record.objects[inside]
        if size is None:
            return "missing"
        if size != stored.bytes:
            return f"{'short' if size < stored.bytes else 'long'}: {size} bytes, the ledger says {stored.bytes}"
        crc = 0
        for start in range(0, size, READ_BYTES):
            crc = google_crc32c.extend(crc, self._files.read_range(f"{self._path}/{inside}", start, READ_BYTES))
        found = f"{crc:08x}"
        return None if found == stored.crc32c else f"checksum {found}, the ledger says {stored.crc32c}"

    def _is_broken(self, array: str) -> bool:
        return any(path.startswith(f"{array}/") for path in self._broken)

    # ---- tables --------------------------------------------------------------------------------------------------

    def _read_tokens(self) -> Tokens | None:
        """None where there is no sound token table."""
        if layout.TOKENS in self._broken or layout.TOKENS not in self._record.objects:
            return None
        table = StoredTable(self._files, f"{self._path}/{layout.TOKENS}").read()
        spans, contrast = self._run.plan["resolved"].get("spans"), self._run.job.get("data", {}).get("contrast")
        if table.schema.remove_metadata() != tokens_schema(spans=bool(spans), variants=bool(contrast)):
            raise DamageError(f"{self._files.url}/{self._path}/{layout.TOKENS}: columns {table.schema.names}")
        return columns_of(table)

    def _tokens(self, tokens: Tokens) -> Iterator[Finding]:
        document, position = tokens["document"], tokens["position"]
        if len(document) != self._record.rows:
            yield self._finding(layout.TOKENS, f"{len(document)} rows, the ledger says {self._record.rows}")
        elif (
            digest := keys_digest(document, position, tokens["token"], tokens.get("variant"))
        ) != self._record.keys_digest:
            yield self._finding(layout.TOKENS, f"keys digest {digest}, the ledger says {self._record.keys_digest}")
        step, stride = np.diff(_sequences(tokens)), np.diff(position)
        falls = (np.diff(document) < 0) | ((np.diff(document) == 0) & (np.diff(tokens.get("variant", document)) < 0))
        wrong = np.flatnonzero(falls | ((step == 0) & (stride <= 0)))
        if len(wrong):
            yield self._finding(layout.TOKENS, f"row {wrong[0] + 1} is out of order: rows go by document and position")

    def _documents(self, tokens: Tokens | None) -> Iterator[Finding]:
        """Every document of the slice is accounted for, and has the rows it says."""
        if layout.DOCUMENTS in self._broken:
            return
        keys = ["document", "variant"] if self._run.job.get("data", {}).get("contrast") else ["document"]
        answered = [LOGIT_DIFF.name] if self._run.plan["resolved"].get("answers") else []
        columns = [*keys, "rows", "status", "reason", *answered]
        table = StoredTable(self._files, f"{self._path}/{layout.DOCUMENTS}").read(columns)
        ids, rows = table.column("document").to_numpy(), table.column("rows").to_numpy()
        first_of = np.arange(len(ids)) % len(keys) == 0
        statuses = zip(table.column("status").to_pylist(), table.column("reason").to_pylist(), first_of.tolist())
        skipped = Counter(reason or "" for status, reason, counts in statuses if status == "skipped" and counts)
        reasons = zip(ids.tolist(), table.column("reason").to_pylist())
        self._odd = {document for document, reason in reasons if (reason or "").endswith(NON_FINITE)}
        record, first = self._record, self._record.shard.file * DOCUMENTS_PER_FILE
        told = {
            "documents": record.documents,
            "rows": record.rows,
            "skipped": dict(record.skipped),
            f"documents with {NON_FINITE}": record.non_finite_documents,
        }
        found = {
            "documents": int(first_of.sum()),
            "rows": int(rows.sum()),
            "skipped": dict(skipped),
            f"documents with {NON_FINITE}": len(self._odd),
        }
        for column in answered:
            differences = table.column(column).drop_null().to_numpy()
            told[f"non-finite {column}"] = record.non_finite.get(column, 0)
            found[f"non-finite {column}"] = int(np.count_nonzero(~np.isfinite(differences)))
        for key, value in found.items():
            if value != told[key]:
                yield self._finding(layout.DOCUMENTS, f"{key}: {value}, the ledger says {told[key]}")
        start, stop = record.shard.start, record.shard.stop
        listed = ids[first_of]
        if len(ids) and (ids[0] < first + start or ids[-1] >= first + stop or (np.diff(listed) <= 0).any()):
            yield self._finding(layout.DOCUMENTS, f"ids do not rise within rows {start} to {stop}")
        if "variant" in keys:
            variants = table.column("variant").to_numpy()
            if len(ids) % 2 or (ids != np.repeat(listed, 2)).any() or (variants != ~first_of).any():
                yield self._finding(layout.DOCUMENTS, "not every document has its variants 0 and 1, in this order")
        if tokens is not None:
            yield from self._accounted(tokens, table, keys)

    def _accounted(self, tokens: Tokens, table: Any, keys: Sequence[str]) -> Iterator[Finding]:
        """Every sequence has the rows that the documents table says, or one that has not."""
        _, starts, counts = np.unique(_sequences(tokens), return_index=True, return_counts=True)
        counted = dict(zip(zip(*(tokens[key][starts].tolist() for key in keys)), counts.tolist()))
        listed = zip(zip(*(table.column(key).to_pylist() for key in keys)), table.column("rows").to_pylist())
        said = {key: rows for key, rows in listed if rows}
        for key in sorted(key for key in {*counted, *said} if counted.get(key, 0) != said.get(key, 0))[:1]:
            named = f"document {key[0]}" + (f", variant {key[1]}" if len(key) > 1 else "")
            what = f"{named}: {said.get(key, 0)} rows, the token table has {counted.get(key, 0)}"
            yield self._finding(layout.DOCUMENTS, what)

    # ---- one name ------------------------------------------------------------------------------------------------

    def _name(self, name: str, tokens: Tokens | None, states: StateFile | None, pooled: int) -> Iterator[Finding]:
        """Array, pools and saved sums against one another and the ledger; `pooled`: documents that have rows."""
        pools: dict[str, StoredArray] = {}
        for pool in self._pools if layout.DOCUMENTS not in self._broken else ():
            inside = layout.array_path(layout.pooled_name(pool, name))
            if not self._is_broken(inside):
                try:
                    pools[pool] = self._pooled(pool, name, pooled)
                except DamageError as error:
                    yield self._finding(inside, bare(error))
        scan, inside = None, layout.array_path(name)
        if layout.TOKENS in self._record.objects:
            if self._is_broken(inside) or self._is_broken(layout.array_path(layout.scale_name(name))):
                return
            try:
                scan = self._scan(name, tokens, states, pools)
            except DamageError as error:
                yield self._finding(inside, bare(error))
                return
            yield from self._counts(name, inside, scan)
            yield from self._non_finite(inside, scan, tokens)
            yield from self._degenerate(inside, scan, tokens)
            for pool, row in scan.pools.items():
                what = f"row {row} is not what the stored rows of its document give"
                yield self._finding(layout.array_path(layout.pooled_name(pool, name)), what)
        if states is not None:
            try:
                wrong = self._sums.wrong(states, name, {} if scan is None else scan.sums, self._record.rows)
            except DamageError as error:
                wrong = [bare(error)]
            for what in wrong:
                yield self._finding(layout.STATES, f"{name}: {what}")

    def _pooled(self, pool: str, name: str, rows: int) -> StoredArray:
        """A pooled array that is there in full, with a row for each document that has some."""
        spec = ArraySpec(rows=rows, width=self._run.plan["names"][name]["width"], dtype="float32")
        stored = StoredRows(self._files, self._record.attempt, layout.pooled_name(pool, name), spec)
        stored.check()
        return stored.arrays[0]

    def _scan(
        self, name: str, tokens: Tokens | None, states: StateFile | None, pools: Mapping[str, StoredArray]
    ) -> Scan:
        plan = self._run.plan
        rows = self._record.rows
        spec = ArraySpec(rows=rows, width=plan["names"][name]["width"], dtype=plan["resolved"]["store_dtype"])
        stored = StoredRows(self._files, self._record.attempt, name, spec)
        stored.check()
        if tokens is None or len(tokens["document"]) != rows:
            return scan_rows(stored, self._sums.of(None), None)
        sequences = _sequences(tokens)
        count = 1 + int(np.count_nonzero(np.diff(sequences))) if rows else 0
        fitting = {pool: array for pool, array in pools.items() if array.shape[0] == count}
        return scan_rows(stored, self._sums.of(states), tokens, sequences, fitting)

    def _counts(self, name: str, inside: str, scan: Scan) -> Iterator[Finding]:
        told = (self._record.non_finite.get(name, 0), self._record.zero_rows.get(name, 0))
        for what, found, said in zip(("non-finite values", "rows of zeros"), (scan.non_finite, scan.zero_rows), told):
            if found != said:
                yield self._finding(inside, f"{found} {what}, the ledger says {said}")

    def _non_finite(self, inside: str, scan: Scan, tokens: Tokens | None) -> Iterator[Finding]:
        """Worth knowing, and damage where the documents table keeps it to itself."""
        if tokens is None or len(tokens["document"]) != len(scan.odd) or not scan.odd.any():
            return
        found = np.unique(tokens["document"][scan.odd]).tolist()
        yield self._finding(inside, f"{NON_FINITE} in document {_listed(found)}", damage=False)
        unlisted = [] if self._odd is None else sorted({*found} - self._odd)
        if unlisted:
            yield self._finding(layout.DOCUMENTS, f"not listed with {NON_FINITE}: document {_listed(unlisted)}")

    def _degenerate(self, inside: str, scan: Scan, tokens: Tokens | None) -> Iterator[Finding]:
        """Documents that a broken capture may have left: nothing but zeros, or the same row for every token."""
        if tokens is None or not len(tokens["document"]) or len(tokens["document"]) != len(scan.zero):
            return
        _, starts, counts = np.unique(_sequences(tokens), return_index=True, return_counts=True)
        ids = tokens["document"][starts]
        zero = np.logical_and.reduceat(scan.zero, starts)
        first = np.zeros(len(scan.same), bool)
        first[starts] = True
        constant = np.logical_and.reduceat(scan.same | first, starts) & (counts > 1)
        constant |= np.logical_and.reduceat(scan.flat, starts)
        for which, what in ((zero, "all rows are zero"), (constant & ~zero, "all rows are the same or constant")):
            found = np.unique(ids[which]).tolist()
            if found:
                yield self._finding(inside, f"{what} in document {_listed(found)}", damage=False)


def _sequences(tokens: Tokens) -> np.ndarray:
    """int64 [n]: equal for rows of one sequence."""
    return sequence_numbers(tokens["document"], tokens.get("variant"))


def _listed(documents: Sequence[int]) -> str:
    more = f" and {len(documents) - MOST_LISTED} more" if len(documents) > MOST_LISTED else ""
    return ", ".join(map(str, documents[:MOST_LISTED])) + more


def bare(error: DamageError) -> str:
    """The error on one line."""
    return " ".join(str(error).split())
