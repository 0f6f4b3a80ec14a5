"""What merged files, pools and sums say is made again from what lies beneath; whatever does not fit is damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commandcase import jsonl
from plainrun import snapshot
from runcase import run

from harvest.checking.verify import verify_run
from harvest.records import StoredObject
from harvest.reduce.base import load_states, save_states
from harvest.reduce.histogram import Histogram
from harvest.reduce.moments import Moments
from harvest.results import summarise
from harvest.store.ledger import Ledger
from harvest.store.opening import open_files

TEXTS = ["abc", "", "a much longer text than the others", "d", "ee ee ee", "xyz" * 9, "last one"]
SMALL = {"store": {"shard_documents": 3}, "tokens": {"context": 16}, "capture": {"layers": [1, 2]}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A complete run of three shards."""
    source = jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    run(tmp_path / "run", source, **{**SMALL, "capture": {"layers": [1, 2], "pool": ["mean", "last", "max"]}})
    return tmp_path / "run"


def found(path: Path) -> list[str]:
    """The findings, as text; verifying changes nothing."""
    before = snapshot(path)
    findings = [str(finding) for finding in verify_run(path).findings]
    assert snapshot(path) == before
    return findings


def vouched(path: Path, inside: str, change: Callable[[bytes], bytes], at: int = 0) -> None:
    """Changes an object of a shard, and the ledger and the totals with it: only the contents are wrong."""
    ledger = Ledger(open_files(str(path)))
    record = list(ledger.records().values())[at]
    target = path / "shards" / record.attempt / inside
    data = change(target.read_bytes())
    target.write_bytes(data)
    record.objects[inside] = StoredObject(bytes=len(data), crc32c=f"{google_crc32c.value(data):08x}")  # type: ignore[index]
    ledger.remove(record.shard.key)
    assert ledger.commit(record)
    ledger.complete(summarise(ledger.records().values()))


def test_a_run_as_it_was_has_no_finding_also_when_another_writer_packed_its_statistics(path: Path) -> None:
    assert found(path) == []
    table = pq.read_table(path / "statistics.parquet")
    pq.write_table(table, path / "statistics.parquet", compression="snappy", row_group_size=1)
    assert found(path) == []


def rewritten(table: pa.Table, column: str, change: Callable[[list[Any]], list[Any]]) -> pa.Table:
    at = table.schema.get_field_index(column)
    changed = pa.array(change(table.column(column).to_pylist()), table.schema.field(at).type)
    return table.set_column(at, table.schema.field(at), changed)


def one_ulp(values: list[list[float]]) -> list[list[float]]:
    return [[float(np.nextafter(row[0], 1e9)), *row[1:]] for row in values]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda table: rewritten(table, "mean", one_ulp), "mean is not what the shards' sums give"),
        (lambda table: rewritten(table, "count", lambda values: [values[0] + 1, *values[1:]]), "count is not what"),
        (lambda table: table.slice(1), "other columns or rows"),
        (lambda table: table.drop_columns(["norm_max"]), "other columns or rows"),
    ],
)
def test_statistics_that_the_saved_sums_do_not_give_are_damage(
    change: Callable[[pa.Table], pa.Table], what: str, path: Path
) -> None:
    pq.write_table(change(pq.read_table(path / "statistics.parquet")), path / "statistics.parquet")
    (finding,) = found(path)
    assert finding.startswith("damage: statistics.parquet: ")
    assert what in finding
    assert "verify --repair" in finding


def test_statistics_that_are_gone_or_torn_are_damage(path: Path) -> None:
    whole = (path / "statistics.parquet").read_bytes()
    (path / "statistics.parquet").unlink()
    assert found(path) == ["damage: statistics.parquet: missing; harvest verify --repair mends it"]
    for data in (b"", whole[:-9], bytes([*whole[:40], whole[40] ^ 4, *whole[41:]])):
        (path / "statistics.parquet").write_bytes(data)
        (finding,) = found(path)
        assert finding.startswith("damage: statistics.parquet: not a readable Parquet file")


def test_a_shards_damaged_sums_are_told_once_and_not_of_the_statistics_too(path: Path) -> None:
    attempt = json.loads((path / "ledger/f00000-s000001.json").read_text())["attempt"]
    states = path / "shards" / attempt / "states.safetensors"
    states.write_bytes(states.read_bytes()[:-1] + b"\x77")
    (finding,) = found(path)
    assert f"{attempt}/states.safetensors: checksum" in finding


@pytest.mark.parametrize("key", ["rows", "tokens", "bytes", "shards", "skipped", "seconds", "environments"])
def test_totals_that_the_records_do_not_add_up_to_are_damage(key: str, path: Path) -> None:
    told = json.loads((path / "complete.json").read_text())
    told[key] = told[key] + 1 if isinstance(told[key], int) else {} if told[key] else {"empty": 1}
    (path / "complete.json").write_text(json.dumps(told))
    (finding,) = found(path)
    assert finding.startswith(f"damage: complete.json: {key}: ")
    del told[key]
    (path / "complete.json").write_text(json.dumps(told))
    assert found(path)[0].startswith(f"damage: complete.json: {key}: None, the records say")


@pytest.mark.parametrize("text", ["", '{"format": 1, "rows"', "[]"])
def test_a_torn_completion_is_damage_and_the_way_out_is_named(text: str, path: Path) -> None:
    (path / "complete.json").write_text(text)
    (finding,) = found(path)
    assert finding.startswith("damage: complete.json: ")
    assert finding.endswith("harvest verify --repair mends it")


@pytest.mark.parametrize("pool", ["mean", "last", "max"])
def test_a_pooled_row_that_the_stored_rows_do_not_give_is_damage(pool: str, path: Path) -> None:
    def change(data: bytes) -> bytes:
        rows = np.frombuffer(data[: 2 * 16 * 4], "<f4").copy()
        rows[16 + 3] *= np.float32(1 + 1e-5)  # of the shard's second document with rows
        return rows.tobytes() + data[rows.nbytes :]

    vouched(path, f"pooled/{pool}/residual.2/c.0.0", change)
    (finding,) = found(path)
    assert finding.endswith(f"pooled/{pool}/residual.2: row 1 is not what the stored rows of its document give")


def test_the_pools_of_a_document_are_made_again_over_the_blocks_of_the_scan(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harvest.checking.scan.SCAN_BYTES", 16 * 4 * 2)
    assert found(path) == []
    vouched(path, "pooled/max/residual.1/c.0.0", lambda data: data[:8] + bytes(4) + data[12:])
    assert "pooled/max/residual.1: row 0 is not what" in found(path)[0]


def test_a_mean_of_another_rounding_is_no_damage(path: Path) -> None:
    def change(data: bytes) -> bytes:
        rows = np.frombuffer(data[:64], "<f4")
        return np.nextafter(rows, np.float32(1e9)).tobytes() + data[64:]

    vouched(path, "pooled/mean/residual.2/c.0.0", change)
    assert found(path) == []
    vouched(path, "pooled/last/residual.2/c.0.0", change)
    assert len(found(path)) == 1


def moved(counts: np.ndarray) -> np.ndarray:
    """Three rows' norms, a bin further each."""
    at = np.flatnonzero(counts)[:3]
    changed = np.append(counts, 0)
    changed[at] -= 1
    changed[at + 1] += 1
    return changed


def test_a_histogram_of_norms_that_the_rows_do_not_give_is_damage(path: Path) -> None:
    def change(data: bytes) -> bytes:
        moments = Moments()
        states = dict(load_states(moments, data))
        state = states["residual.1"]
        norms = Histogram(first=state.ordinary.norms.first, counts=moved(state.ordinary.norms.counts))
        ordinary = type(state.ordinary)(**{**_fields(state.ordinary), "norms": norms})
        states["residual.1"] = type(state)(ordinary=ordinary, special=state.special)
        return save_states([(moments, states)])

    vouched(path, "states.safetensors", change)
    assert any("residual.1: ordinary.norms is not what the stored rows give" in finding for finding in found(path))


def _fields(sums: Any) -> dict[str, Any]:
    return {name: getattr(sums, name) for name in type(sums).__dataclass_fields__}


def test_a_shard_that_holds_rows_of_another_is_damage(path: Path) -> None:
    ledger = Ledger(open_files(str(path)))
    record = ledger.records()["f00000-s000001"]
    wider = type(record)(**{**_fields(record), "shard": type(record.shard)(file=0, index=1, start=2, stop=6)})
    ledger.remove(record.shard.key)
    ledger.commit(wider)
    assert any("begins at row 2, which f00000-s000000 holds already" in finding for finding in found(path))
