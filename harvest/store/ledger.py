"""Commit records. A shard without one does not exist; it is always the last thing written, and the first one wins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import google_crc32c
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from harvest.errors import DamageError, RequestError
from harvest.records import FORMAT_VERSION, ShardRecord
from harvest.store import layout
from harvest.store.files import Files, naming_full_disk

REMOTE_READERS = 16
"""Records fetched at a time from a store where each takes a round trip."""
MENDS = "harvest verify --repair mends it"
REMADE = (
    "put back a copy of it, such as the run.json that the same job writes into another run.path as soon as it starts; "
    "until then each folder in shards/ still opens as Zarr and Parquet"
)
COMMITTERS = 8
"""Records committed at a time."""
Record = TypeVar("Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """`run.json`: what was asked for and what it stands on. Written first, before any shard."""

    format: int = FORMAT_VERSION
    """Version of the run folder."""
    job: Mapping[str, Any]
    """The job as given, without secrets."""
    plan: Mapping[str, Any]
    """What every `auto` stands for, the names with widths and dtypes, the source files, the shards known so far."""
    fingerprint: Mapping[str, Any]
    """What locks the run: a resume with another value is refused by its key."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Versions and machine of the first life; locks nothing."""


_RUN = TypeAdapter(RunRecord)
_SHARD = TypeAdapter(ShardRecord)


def encode_record(kind: TypeAdapter[Record], record: Record) -> bytes:
    """The record as JSON with its own crc32c, the same bytes for the same record.

    Raises ValueError for a record that would not come back as it is (NaN, numpy's numbers).
    """
    fields = json.loads(kind.dump_json(record, warnings="error"))
    if kind.validate_python(fields) != record:
        raise ValueError(f"a record that JSON cannot hold: {record}")
    fields["crc32c"] = _crc(fields)
    in_order = json.loads(json.dumps(fields, sort_keys=True, allow_nan=False))
    return to_json(in_order, indent=1) + b"\n"  # json's own writer takes five times as long once it indents


def decode_record(kind: TypeAdapter[Record], data: bytes, where: str) -> Record:
    """The inverse; nothing missing, unknown, coerced or changed passes.

    Raises RequestError for another format version, DamageError for anything that we did not write.
    """
    try:
        fields = json.loads(data)
        if not isinstance(fields, dict):
            raise ValueError("not an object")
        check_format(fields, where)
        if fields.pop("crc32c", None) != _crc(fields):
            raise ValueError("its checksum does not match")
        record = kind.validate_python(fields)
        if json.loads(kind.dump_json(record)) != fields:
            raise ValueError("fields that this version does not know")
    except RequestError:
        raise  # a ValueError too, and not damage
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DamageError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except ValueError as error:
        raise DamageError(f"{where}: not a record of ours ({error})") from None
    return record


def check_format(fields: Mapping[str, Any], where: str) -> None:
    """Raises RequestError when a later Harvest wrote this."""
    version = fields.get("format")
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise RequestError(f"{where}: format {version}; this version of Harvest reads format {FORMAT_VERSION}")


def _crc(fields: Mapping[str, Any]) -> str:
    return f"{google_crc32c.value(json.dumps(fields, sort_keys=True, separators=(',', ':')).encode()):08x}"


class Ledger:
    """The records of one run folder."""

    def __init__(self, files: Files) -> None:
        self.files = files

    def commit(self, record: ShardRecord) -> bool:
        """Makes the shard exist; False where it already does, by this or another attempt, which then stays."""
        return self._create(layout.record_path(record.shard.key), encode_record(_SHARD, record))

    def commit_all(self, records: Sequence[ShardRecord]) -> list[bool | Exception]:
        """The same for several shards, side by side: a disk that makes one durable makes its neighbours so too.

        Whatever fails, the others are committed: what `commit` says of each, or its error.
        """
        if len(records) < 2:
            return [self._tried(record) for record in records]
        with ThreadPoolExecutor(min(len(records), COMMITTERS)) as pool:
            return list(pool.map(self._tried, records))

    def _tried(self, record: ShardRecord) -> bool | Exception:
        try:
            return self.commit(record)
        except Exception as error:
            return error

    def records(self) -> dict[str, ShardRecord]:
        """Shard key -> record, in dataset order. Raises DamageError naming a file that is torn or not ours."""
        records = sorted(self.read(self.keys()), key=lambda record: record.shard)
        return {record.shard.key: record for record in records}

    def keys(self) -> list[str]:
        """Of the shards that are committed, from a listing alone. Raises DamageError naming a file that is not ours."""
        paths = [path for path, _ in self.files.list(layout.LEDGER) if not layout.is_temporary(path)]
        return [self._key(path) for path in paths]

    def read(self, keys: Sequence[str]) -> list[ShardRecord]:
        """These shards' records. Raises FileNotFoundError where one is not committed, DamageError as `records`."""
        if self.files.local:
            return list(map(self.record, keys))
        with ThreadPoolExecutor(REMOTE_READERS) as readers:
            return list(readers.map(self.record, keys))

    def record(self, key: str) -> ShardRecord:
        """One record. Raises FileNotFoundError where the shard is not committed."""
        path = layout.record_path(key)
        data = self.files.read(path)
        try:
            record = decode_record(_SHARD, data, f"{self.files.url}/{path}")
        except DamageError as error:
            raise DamageError(f"{error}; {MENDS}") from None
        attempt = layout.parse_attempt(record.attempt)
        if record.shard.key != key or attempt is None or attempt[0] != key:
            raise DamageError(
                f"{self.files.url}/{path}: is about {record.shard.key}, attempt {record.attempt!r}; {MENDS}"
            )
        return record

    def _key(self, path: str) -> str:
        key = layout.record_key(path)
        if key is None:
            raise DamageError(f"{self.files.url}/{path}: not a commit record; move it elsewhere")
        return key

    def remove(self, key: str) -> None:
        """Un-commits a shard, before it is harvested again; its attempt becomes one without a record."""
        self.files.delete(layout.record_path(key))

    def create_run(self, run: RunRecord) -> bool:
        """Writes run.json if there is none; False where there is, which then stays."""
        return self._create(layout.RUN, encode_record(_RUN, run))

    def read_run(self) -> RunRecord | None:
        """run.json, None where there is none. Raises DamageError or RequestError (another format) naming it."""
        try:
            data = self.files.read(layout.RUN)
        except FileNotFoundError:
            return None
        try:
            return decode_record(_RUN, data, f"{self.files.url}/{layout.RUN}")
        except DamageError as error:
            raise DamageError(f"{error}; {REMADE}") from None

    def replace_run(self, run: RunRecord) -> None:
        """Rewrites run.json, for the settings that may be others on resume."""
        data = encode_record(_RUN, run)
        with naming_full_disk(f"{self.files.url}/{layout.RUN}", len(data)):
            self.files.replace(layout.RUN, data)

    def complete(self, summary: Mapping[str, Any]) -> None:
        """Says that every shard is committed."""
        data = json.dumps({"format": FORMAT_VERSION, **summary}, indent=1, sort_keys=True, allow_nan=False).encode()
        with naming_full_disk(f"{self.files.url}/{layout.COMPLETE}", len(data)):
            self.files.replace(layout.COMPLETE, data + b"\n")

    def completion(self) -> dict[str, Any] | None:
        """What `complete` was told; None for an unfinished run."""
        where = f"{self.files.url}/{layout.COMPLETE}"
        try:
            fields = json.loads(self.files.read(layout.COMPLETE))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DamageError(f"{where}: not JSON ({error}); {MENDS}") from None
        if not isinstance(fields, dict):
            raise DamageError(f"{where}: not an object; {MENDS}")
        check_format(fields, where)
        return fields

    def reopen(self) -> None:
        """The run is unfinished again: a limit grew, or a damaged shard was removed."""
        self.files.delete(layout.COMPLETE)

    def _create(self, path: str, data: bytes) -> bool:
        with naming_full_disk(f"{self.files.url}/{path}", len(data)):
            return self.files.create(path, data)
