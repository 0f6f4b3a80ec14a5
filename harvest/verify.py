"""Re-reads everything a run holds and says where it differs from the ledger; changes nothing, holds one shard's tables.

A finding is damage (a reader would be misled or stopped) or a note (worth knowing, nothing is wrong).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from harvest.errors import DamageError, RequestError
from harvest.features import documents_with_rows
from harvest.reader import open_states
from harvest.records import DOCUMENTS_PER_FILE, ArraySpec, ShardRecord, SourceFile
from harvest.runtime.schedule import Schedule
from harvest.scan import Scan, kind_of, same_sums, scan_rows
from harvest.store import folder, layout
from harvest.store.arrays import StoredArray
from harvest.store.files import Files
from harvest.store.ledger import Ledger, RunRecord
from harvest.store.opening import open_files
from harvest.store.tables import StoredTable, keys_digest, tokens_schema

READ_BYTES = 8 << 20
"""Of an object, at a time."""
MOST_LISTED = 10
"""Documents that one finding names; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as the ledger says, or worth knowing."""

    damage: bool
    shard: str | None
    """Key of the shard; None for the run as a whole."""
    object: str
    """Path within the run."""
    what: str

    def __str__(self) -> str:
        return f"{'damage' if self.damage else 'note'}: {self.object}: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a verification read and found."""

    run: str
    shards: int
    """Commit records that could be read."""
    objects: int
    """Objects that they vouch for."""
    bytes: int
    rows: int
    findings: tuple[Finding, ...]
    """Damage first, in dataset order."""

    @property
    def damaged(self) -> bool:
        """Whether anything is damage."""
        return any(finding.damage for finding in self.findings)

    @property
    def text(self) -> str:
        """A line for each finding, then the sum."""
        damage = sum(finding.damage for finding in self.findings)
        read = f"{self.shards} shards, {self.objects} objects, {self.bytes:,} bytes, {self.rows:,} rows read"
        told = f"{damage} damaged, {len(self.findings) - damage} notes" if self.findings else "everything is as it was"
        return "\n".join([*map(str, self.findings), f"{self.run}: {read}; {told}"])

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return {**asdict(self), "damaged": self.damaged}


def verify_run(run: str | Path | Files, storage: Mapping[str, Any] | None = None) -> Report:
    """Checks every object, table, array and sum of a run. Raises RequestError, touching nothing, where none is."""
    files = open_files(str(run), storage, setting="path") if isinstance(run, str | Path) else run
    path = str(run) if isinstance(run, str | Path) else files.url
    ledger = Ledger(files)
    record = ledger.read_run()
    if record is None:
        raise RequestError(f"{path} is not a run (no {layout.RUN})")
    findings: list[Finding] = []
    records = _records(ledger, findings)
    for shard in records:
        findings += _Shard(files, record, shard).check()
    findings += _whole(files, ledger, record, records)
    return Report(
        run=path,
        shards=len(records),
        objects=sum(len(shard.objects) for shard in records),
        bytes=sum(item.bytes for shard in records for item in shard.objects.values()),
        rows=sum(shard.rows for shard in records),
        findings=tuple(sorted(findings, key=lambda finding: not finding.damage)),
    )


def _records(ledger: Ledger, findings: list[Finding]) -> list[ShardRecord]:
    """The readable records in dataset order; a torn one is a finding, not the end."""
    records = []
    for path, _ in ledger.files.list(layout.LEDGER):
        key = layout.record_key(path)
        if layout.is_temporary(path):
            continue
        if key is None:
            findings.append(Finding(damage=True, shard=None, object=path, what="not a commit record"))
            continue
        try:
            records.append(ledger.record(key))
        except DamageError as error:
            findings.append(Finding(damage=True, shard=key, object=path, what=_bare(error)))
    return sorted(records, key=lambda record: record.shard)


def _whole(files: Files, ledger: Ledger, run: RunRecord, records: list[ShardRecord]) -> Iterator[Finding]:
    """What concerns no single shard's contents."""
    complete = ledger.completion() is not None
    for key in _missing(run, records):
        what = "not committed, in a run that says it is complete" if complete else "not committed yet"
        yield Finding(damage=complete, shard=key, object=layout.record_path(key), what=what)
    for attempt in folder.stray_attempts(files, [record.attempt for record in records]):
        what = "an attempt without a commit record; the next run removes it"
        yield Finding(damage=False, shard=attempt.partition(".")[0], object=layout.attempt_path(attempt), what=what)
    for path in folder.foreign(files):
        if layout.attempt_of(path) is None and not path.startswith(f"{layout.LEDGER}/"):
            yield Finding(damage=False, shard=None, object=path, what="not written by a run")


def _missing(run: RunRecord, records: list[ShardRecord]) -> list[str]:
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


class _Shard:
    """One shard's checks; what is found broken is not looked into any further."""

    def __init__(self, files: Files, run: RunRecord, record: ShardRecord) -> None:
        self.files, self.run, self.record = files, run, record
        self.path = layout.attempt_path(record.attempt)
        self.broken: set[str] = set()

    def check(self) -> Iterator[Finding]:
        """Everything about the shard, cheapest first."""
        yield from self._objects()
        tokens: Mapping[str, np.ndarray] | None = None
        try:
            tokens = self._read_tokens()
            yield from self._documents(tokens)
            if tokens is not None:
                yield from self._tokens(tokens)
            yield from self._sums(tokens)
            yield from self._pools()
        except DamageError as error:
            yield self._finding("", _bare(error))

    def _finding(self, inside: str, what: str, damage: bool = True) -> Finding:
        path = f"{self.path}/{inside}" if inside else self.path
        return Finding(damage=damage, shard=self.record.shard.key, object=path, what=what)

    def _objects(self) -> Iterator[Finding]:
        """The ledger against the disk: sizes, then checksums."""
        listed = {path.removeprefix(f"{self.path}/"): size for path, size in self.files.list(self.path)}
        for inside, stored in self.record.objects.items():
            size = listed.pop(inside, None)
            what = None
            if size is None:
                what = "missing"
            elif size != stored.bytes:
                what = f"{'short' if size < stored.bytes else 'long'}: {size} bytes, the ledger says {stored.bytes}"
            elif (crc := self._crc(inside, size)) != stored.crc32c:
                what = f"checksum {crc}, the ledger says {stored.crc32c}"
            if what is not None:
                self.broken.add(inside)
                yield self._finding(inside, what)
        for inside in listed:
            yield self._finding(inside, "foreign: the ledger does not know it", damage=False)

    def _crc(self, inside: str, size: int) -> str:
        crc = 0
        for start in range(0, size, READ_BYTES):
            crc = google_crc32c.extend(crc, self.files.read_range(f"{self.path}/{inside}", start, READ_BYTES))
        return f"{crc:08x}"

    def _read_tokens(self) -> Mapping[str, np.ndarray] | None:
        """Column -> values; None where there is no sound token table."""
        if layout.TOKENS in self.broken or layout.TOKENS not in self.record.objects:
            return None
        table = StoredTable(self.files, f"{self.path}/{layout.TOKENS}").read()
        if table.schema.remove_metadata() != tokens_schema(spans=bool(self.run.plan["resolved"].get("spans"))):
            raise DamageError(f"{self.files.url}/{self.path}/{layout.TOKENS}: columns {table.schema.names}")
        return {name: table.column(name).to_numpy(zero_copy_only=False) for name in table.column_names}

    def _tokens(self, tokens: Mapping[str, np.ndarray]) -> Iterator[Finding]:
        document, position = tokens["document"], tokens["position"]
        if len(document) != self.record.rows:
            yield self._finding(layout.TOKENS, f"{len(document)} rows, the ledger says {self.record.rows}")
        elif (digest := keys_digest(document, position, tokens["token"])) != self.record.keys_digest:
            yield self._finding(layout.TOKENS, f"keys digest {digest}, the ledger says {self.record.keys_digest}")
        step, stride = np.diff(document), np.diff(position)
        wrong = np.flatnonzero((step < 0) | ((step == 0) & (stride <= 0)))
        if len(wrong):
            yield self._finding(layout.TOKENS, f"row {wrong[0] + 1} is out of order: rows go by document and position")

    def _documents(self, tokens: Mapping[str, np.ndarray] | None) -> Iterator[Finding]:
        """Every document of the slice is accounted for, and has the rows it says."""
        if layout.DOCUMENTS in self.broken:
            return
        table = StoredTable(self.files, f"{self.path}/{layout.DOCUMENTS}").read(
            ["document", "rows", "status", "reason"]
        )
        ids, rows = table.column("document").to_numpy(), table.column("rows").to_numpy()
        statuses = zip(table.column("status").to_pylist(), table.column("reason").to_pylist())
        skipped = Counter(reason or "" for status, reason in statuses if status == "skipped")
        shard, first = self.record.shard, self.record.shard.file * DOCUMENTS_PER_FILE
        told = {"documents": self.record.documents, "rows": self.record.rows, "skipped": dict(self.record.skipped)}
        found = {"documents": len(ids), "rows": int(rows.sum()), "skipped": dict(skipped)}
        for key, value in found.items():
            if value != told[key]:
                yield self._finding(layout.DOCUMENTS, f"{key}: {value}, the ledger says {told[key]}")
        if len(ids) and (ids[0] < first + shard.start or ids[-1] >= first + shard.stop or (np.diff(ids) <= 0).any()):
            yield self._finding(layout.DOCUMENTS, f"ids do not rise within rows {shard.start} to {shard.stop}")
        if tokens is not None:
            counted = dict(zip(*map(np.ndarray.tolist, np.unique(tokens["document"], return_counts=True))))
            said = {i: n for i, n in zip(ids.tolist(), rows.tolist()) if n}
            wrong = [i for i in sorted({*counted, *said}) if counted.get(i, 0) != said.get(i, 0)]
            for i in wrong[:1]:
                what = f"document {i}: {said.get(i, 0)} rows, the token table has {counted.get(i, 0)}"
                yield self._finding(layout.DOCUMENTS, what)

    def _sums(self, tokens: Mapping[str, np.ndarray] | None) -> Iterator[Finding]:
        """Arrays and saved sums against one another and the ledger, name by name."""
        states = None if layout.STATES in self.broken else open_states(self.files, self.record)
        for name in self.run.plan["resolved"]["names"]:
            scan = None
            if layout.TOKENS in self.record.objects:
                inside = layout.array_path(name)
                if any(path.startswith(f"{inside}/") for path in self.broken):
                    continue
                try:
                    scan = self._scan(name, tokens, None if states is None else kind_of(states))
                except DamageError as error:
                    yield self._finding(inside, _bare(error))
                    continue
                yield from self._counts(name, inside, scan)
                yield from self._degenerate(inside, scan, tokens)
            if states is not None:
                what = same_sums(states, name, scan, self.record.rows)
                if what is not None:
                    yield self._finding(layout.STATES, f"{name}: {what}")

    def _pools(self) -> Iterator[Finding]:
        """Every pooled array is there and has a row for each document that has some."""
        if layout.DOCUMENTS in self.broken:
            return
        pools = self.run.job.get("capture", {}).get("pool") or ()
        rows = documents_with_rows(self.files, self.record) if pools else 0
        for name in self.run.plan["resolved"]["names"] if pools else ():
            spec = ArraySpec(rows=rows, width=self.run.plan["names"][name]["width"], dtype="float32")
            for pool in pools:
                pooled = layout.pooled_name(pool, name)
                if any(path.startswith(f"{layout.array_path(pooled)}/") for path in self.broken):
                    continue
                try:
                    array = StoredArray(self.files, self.record.attempt, pooled, spec)
                    for number in range(array.grid.objects):
                        array.check_object(number)
                except DamageError as error:
                    yield self._finding(layout.array_path(pooled), _bare(error))

    def _scan(self, name: str, tokens: Mapping[str, np.ndarray] | None, kind: str | None) -> Scan:
        plan = self.run.plan
        spec = ArraySpec(
            rows=self.record.rows, width=plan["names"][name]["width"], dtype=plan["resolved"]["store_dtype"]
        )
        array = StoredArray(self.files, self.record.attempt, name, spec)
        usable = tokens is not None and len(tokens["special"]) == spec.rows
        return scan_rows(array, tokens["special"] if tokens is not None and usable else None, kind)

    def _counts(self, name: str, inside: str, scan: Scan) -> Iterator[Finding]:
        told = (self.record.non_finite.get(name, 0), self.record.zero_rows.get(name, 0))
        for what, found, said in zip(("non-finite values", "rows of zeros"), (scan.non_finite, scan.zero_rows), told):
            if found != said:
                yield self._finding(inside, f"{found} {what}, the ledger says {said}")

    def _degenerate(self, inside: str, scan: Scan, tokens: Mapping[str, np.ndarray] | None) -> Iterator[Finding]:
        """Documents that a broken capture may have left: nothing but zeros, or the same row for every token."""
        if tokens is None or not len(tokens["document"]) or len(tokens["document"]) != len(scan.zero):
            return
        ids, starts, counts = np.unique(tokens["document"], return_index=True, return_counts=True)
        zero = np.logical_and.reduceat(scan.zero, starts)
        first = np.zeros(len(scan.same), bool)
        first[starts] = True
        constant = np.logical_and.reduceat(scan.same | first, starts) & (counts > 1)
        constant |= np.logical_and.reduceat(scan.flat, starts)
        for which, what in ((zero, "all rows are zero"), (constant & ~zero, "all rows are the same or constant")):
            found = ids[which].tolist()
            if found:
                more = f" and {len(found) - MOST_LISTED} more" if len(found) > MOST_LISTED else ""
                listed = ", ".join(map(str, found[:MOST_LISTED]))
                yield self._finding(inside, f"{what} in document {listed}{more}", damage=False)


def _bare(error: DamageError) -> str:
    return " ".join(str(error).split())
