"""Ledger: the first commit wins, a torn or foreign record is named, and nothing exists before its record."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvest.errors import DamageError, RequestError, WorkError
from harvest.records import Shard, ShardRecord, StoredObject
from harvest.store.ledger import _SHARD, Ledger, RunRecord, decode_record, encode_record
from harvest.store.opening import open_files
from tests.faults import Faults, FaultyFiles


def shard_record(index: int = 0, life: str = "9c1f02ab", **changes: Any) -> ShardRecord:
    shard = Shard(file=0, index=index, start=index * 10, stop=index * 10 + 10)
    fields: dict[str, Any] = {field.name: {} for field in dataclasses.fields(ShardRecord)}
    fields |= dict.fromkeys(("documents", "tokens", "dropped_tokens", "forward_tokens", "non_finite_documents"), 0)
    fields |= {"format": 1, "shard": shard, "attempt": f"{shard.key}.{life}-1", "rows": 3}
    fields |= {"objects": {"zarr.json": StoredObject(bytes=63, crc32c="87512242")}, "cursor": None}
    fields |= {"keys_digest": "ab", "source_digest": "cd", "ended": False, "cut": False, "seconds": {"forward": 0.1}}
    known = {field.name for field in dataclasses.fields(ShardRecord)}
    return ShardRecord(**{name: value for name, value in (fields | changes).items() if name in known})


RUN = RunRecord(job={"data": {"path": "x"}}, plan={"names": {}}, fingerprint={"model": "abc"})


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(open_files(str(tmp_path)))


def test_records_come_back_as_they_were_in_dataset_order(ledger: Ledger) -> None:
    records = [shard_record(index, seconds={"forward": 1 / 3 + index}) for index in (12, 2, 100_000_0, 0)]
    other = dataclasses.replace(
        shard_record(), shard=Shard(file=1, index=0, start=0, stop=5), attempt="f00001-s000000.9c1f02ab-1"
    )
    for record in [other, *records]:
        assert ledger.commit(record)
    found = ledger.records()
    assert list(found.values()) == [*sorted(records, key=lambda record: record.shard.index), other]
    assert list(found) == [record.shard.key for record in found.values()]
    assert ledger.record("f00000-s000002") == records[1]


@pytest.mark.parametrize("where", ["local", "memory"])
def test_the_first_commit_of_a_shard_wins(tmp_path: Path, where: str) -> None:
    ledger = Ledger(open_files(str(tmp_path) if where == "local" else f"memory:/{tmp_path}"))
    start = threading.Barrier(6)
    won: list[ShardRecord] = []

    def commit(life: str) -> None:
        record = shard_record(life=life)
        start.wait()
        if ledger.commit(record):
            won.append(record)

    threads = [threading.Thread(target=commit, args=(f"{number:08x}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(ledger.records().values()) == won
    ledger.remove("f00000-s000000")
    assert ledger.records() == {}
    assert ledger.commit(shard_record(life="ffffffff"))


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_no_changed_byte_of_a_record_passes(position: int, byte: int) -> None:
    data = encode_record(_SHARD, shard_record())
    position %= len(data)
    changed = data[:position] + bytes([byte]) + data[position + 1 :]
    try:
        found = decode_record(_SHARD, changed, "x")
    except (DamageError, RequestError):
        return
    assert found == shard_record(), "only white space may differ"


@pytest.mark.parametrize("length", [0, 1, 100, -2])
def test_a_torn_record_is_named_never_ignored(ledger: Ledger, length: int) -> None:
    ledger.commit(shard_record())
    data = ledger.files.read("ledger/f00000-s000000.json")
    ledger.files.replace("ledger/f00000-s000000.json", data[:length])
    with pytest.raises(DamageError, match=r"ledger/f00000-s000000\.json: not a record of ours") as caught:
        ledger.records()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": "3"}, r"rows|fields"),
        ({"extra": 1}, r"fields that this version does not know"),
        ({"rows": None}, r"rows: "),
        ({"shard": {"file": 0, "index": 0}}, r"shard"),
    ],
)
def test_a_record_with_other_fields_is_refused_even_with_a_right_checksum(
    ledger: Ledger, change: dict[str, Any], said: str
) -> None:
    from harvest.store.ledger import _crc

    fields = json.loads(encode_record(_SHARD, shard_record())) | change
    del fields["crc32c"]
    ledger.files.create("ledger/f00000-s000000.json", json.dumps(fields | {"crc32c": _crc(fields)}).encode())
    with pytest.raises(DamageError, match=said):
        ledger.records()


def test_a_foreign_or_misplaced_file_in_the_ledger_is_named(ledger: Ledger) -> None:
    ledger.commit(shard_record())
    data = ledger.files.read("ledger/f00000-s000000.json")
    ledger.files.create("ledger/f00000-s000007.json", data)
    with pytest.raises(DamageError, match=r"f00000-s000007\.json: is about f00000-s000000"):
        ledger.records()
    ledger.remove("f00000-s000007")
    ledger.files.create("ledger/notes.txt", b"hello")
    with pytest.raises(DamageError, match=r"ledger/notes\.txt: not a commit record"):
        ledger.records()


def test_a_record_of_another_shards_attempt_is_refused(ledger: Ledger) -> None:
    ledger.commit(shard_record(attempt="../../elsewhere"))
    with pytest.raises(DamageError, match="elsewhere"):
        ledger.records()


def test_a_temporary_file_left_by_a_kill_is_no_record(ledger: Ledger) -> None:
    ledger.commit(shard_record())
    ledger.files.create("ledger/.f00000-s000001.json.0123456789abcdef.tmp", b"{")
    assert list(ledger.records()) == ["f00000-s000000"]


def test_a_later_format_is_refused_as_a_wrong_request(ledger: Ledger) -> None:
    ledger.create_run(RUN)
    for path in ("run.json", "complete.json", "ledger/f00000-s000000.json"):
        ledger.files.replace(path, b'{"format": 2, "news": true}')
    for read in (ledger.read_run, ledger.completion, ledger.records):
        with pytest.raises(RequestError, match=r"format 2; this version of Harvest reads format 1"):
            read()


def test_run_json_is_written_once_and_rewritten_only_on_purpose(ledger: Ledger) -> None:
    assert ledger.read_run() is None
    assert ledger.create_run(RUN)
    other = dataclasses.replace(RUN, fingerprint={"model": "other"})
    assert not ledger.create_run(other)
    assert ledger.read_run() == RUN
    ledger.replace_run(other)
    assert ledger.read_run() == other


def test_completion_comes_and_goes(ledger: Ledger) -> None:
    assert ledger.completion() is None
    ledger.complete({"rows": 7})
    assert ledger.completion() == {"format": 1, "rows": 7}
    ledger.reopen()
    assert ledger.completion() is None
    ledger.files.create("complete.json", b"[1")
    with pytest.raises(DamageError, match=r"complete\.json: not JSON"):
        ledger.completion()


def test_a_full_disk_at_commit_names_the_record_and_leaves_the_others(ledger: Ledger) -> None:
    ledger.commit(shard_record(0))
    full = Ledger(FaultyFiles(ledger.files, Faults(full_after=10)))
    with pytest.raises(WorkError, match=r"disk full: .*ledger/f00000-s000001\.json: \d+ more bytes"):
        full.commit(shard_record(1))
    assert list(ledger.records()) == ["f00000-s000000"]


@pytest.mark.parametrize("changes", [{"rows": np.int64(3)}, {"rows": "3"}, {"seconds": {"forward": float("nan")}}])
def test_a_record_that_would_not_come_back_is_never_written(ledger: Ledger, changes: dict[str, Any]) -> None:
    try:
        ledger.commit(shard_record(**changes))
    except ValueError:
        assert list(ledger.files.list()) == []
    else:
        assert ledger.records()["f00000-s000000"] == shard_record(**changes)


def test_a_process_killed_anywhere_while_committing_leaves_whole_records_only(tmp_path: Path) -> None:
    """Cases E52 and E53: a shard is there in full or not at all."""
    script = textwrap.dedent(
        """
        import sys
        sys.path.insert(0, sys.argv[2])
        from tests.store.test_store_ledger import shard_record, Ledger, open_files
        ledger = Ledger(open_files(sys.argv[1]))
        print("ready", flush=True)
        for index in range(10**6):
            ledger.commit(shard_record(index))
        """
    )
    root = Path(__file__).parents[2]
    for delay in (0.01, 0.05, 0.12):
        folder = tmp_path / str(delay)
        worker = subprocess.Popen(
            [sys.executable, "-c", script, str(folder), str(root)], stdout=subprocess.PIPE, text=True
        )
        assert worker.stdout is not None
        worker.stdout.readline()
        threading.Event().wait(delay)
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        found = Ledger(open_files(str(folder))).records()
        assert [record.shard.index for record in found.values()] == list(range(len(found)))
        leftovers = [path.name for path in folder.rglob(".*") if path.is_file()]
        assert all(re.fullmatch(r"\..*\.[0-9a-f]{16}\.tmp", name) for name in leftovers)


def test_a_disk_error_other_than_full_passes_unchanged(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output"):
        ledger.commit(shard_record())
