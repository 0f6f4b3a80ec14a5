"""Verification finds what was done to a run and names shard and object; a sound run has no finding; nothing changes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import LIFE, Fake, write_run

from harvest.checking.verify import Report, verify_run
from harvest.errors import RequestError
from harvest.records import ShardRecord, StoredObject
from harvest.reduce.base import load_states, save_states
from harvest.reduce.moments import Moments
from harvest.results import summarise
from harvest.store.ledger import Ledger
from harvest.store.tables import parquet_bytes

AT = 2
"""The shard that gets damaged: of five and one tokens."""


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def attempt(fake: Fake, at: int = AT) -> Path:
    return Path(fake.path) / "shards" / fake.records[at].attempt


def recommit(fake: Fake, at: int = AT, **changes: object) -> None:
    """Replaces a record by one that says something else; complete.json adds up what the records say."""
    ledger = Ledger(fake.files)
    ledger.remove(fake.records[at].shard.key)
    assert ledger.commit(dataclasses.replace(fake.records[at], **changes))
    ledger.complete(summarise(ledger.records().values()))


def rewrite(fake: Fake, inside: str, data: bytes, at: int = AT) -> None:
    """Replaces an object and lets the ledger vouch for it: only the contents are wrong."""
    (attempt(fake, at) / inside).write_bytes(data)
    stored = StoredObject(bytes=len(data), crc32c=f"{google_crc32c.value(data):08x}")
    recommit(fake, at, objects={**fake.records[at].objects, inside: stored})


def only(report: Report) -> str:
    """The one finding, as text."""
    assert len(report.findings) == 1, report.text
    return str(report.findings[0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "options", [{}, {"moments": False}, {"store": False}, {"object_bytes": 100, "chunk_bytes": 50}]
)
def test_a_sound_run_has_no_finding_and_stays_as_it_was(tmp_path: Path, dtype: str, options: dict[str, int]) -> None:
    fake = write_run(
        tmp_path / "r", [[3, 1, 4], [], [1, 0, 5], [9, 2, 6]], dtype=dtype, files_of=[0, 0, 1, 1], **options
    )
    before = snapshot(tmp_path)
    report = verify_run(fake.path)
    assert (report.findings, report.damaged) == ((), False)
    assert (report.shards, report.rows) == (4, 31)
    assert report.bytes == sum(item.bytes for record in fake.records for item in record.objects.values())
    assert "everything is as it was" in report.text
    assert json.loads(json.dumps(report.data))["damaged"] is False
    assert snapshot(tmp_path) == before


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("inside", "harm", "what"),
    [
        ("residual.0/c.0.0", Path.unlink, "missing"),
        ("residual.0/c.0.0", lambda path: path.write_bytes(path.read_bytes()[:-1]), "short: "),
        ("residual.0/c.0.0", lambda path: path.write_bytes(path.read_bytes() + b"\0"), "long: "),
        ("residual.0/c.0.0", lambda path: flip(path, 5), "checksum "),
        ("residual.0/zarr.json", lambda path: flip(path, 0), "checksum "),
        ("tokens.parquet", lambda path: flip(path, 40), "checksum "),
        ("documents.parquet", Path.unlink, "missing"),
        ("states.safetensors", lambda path: flip(path, -3), "checksum "),
        ("zarr.json", Path.unlink, "missing"),
    ],
)
def test_any_harm_to_an_object_is_damage_that_names_it(
    tmp_path: Path, inside: str, harm: Callable[[Path], object], what: str
) -> None:
    fake = write_run(tmp_path / "r")
    harm(attempt(fake) / inside)
    before = snapshot(tmp_path)
    report = verify_run(fake.path)
    assert only(report).startswith(f"damage: shards/{fake.records[AT].attempt}/{inside}: {what}")
    assert report.findings[0].shard == fake.records[AT].shard.key
    assert report.damaged
    assert snapshot(tmp_path) == before


def test_every_single_flipped_byte_of_a_shard_is_found(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r", [[2]], {"mlp.1": 2})
    for inside in fake.records[0].objects:
        path = attempt(fake, 0) / inside
        data = path.read_bytes()
        for at in np.random.default_rng(0).integers(0, len(data), 6).tolist():
            flip(path, at)
            assert verify_run(fake.path).damaged, (inside, at)
            path.write_bytes(data)
    assert not verify_run(fake.path).damaged


def test_an_index_that_disowns_a_chunk_is_found_though_the_checksum_of_the_object_holds(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r", [[40]], {"mlp.1": 4}, chunk_bytes=160, object_bytes=320)
    path = attempt(fake, 0) / "mlp.1/c.1.0"
    data = path.read_bytes()
    index = b"\xff" * 16 + data[-20:-4]
    path.write_bytes(data[:-36] + index + int(google_crc32c.value(index)).to_bytes(4, "little"))
    assert google_crc32c.value(path.read_bytes()) == google_crc32c.value(data)
    assert only(verify_run(fake.path)).endswith("mlp.1/c.1.0: its chunk index is not the one that was written")


def test_a_whole_attempt_that_is_gone_is_damage_and_does_not_stop_the_rest(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r")
    shutil.rmtree(attempt(fake, 0))
    (attempt(fake, 3) / "mlp.1" / "c.0.0").unlink()
    report = verify_run(fake.path)
    missing = [finding for finding in report.findings if finding.what == "missing"]
    assert {finding.shard for finding in missing} == {fake.records[0].shard.key, fake.records[3].shard.key}
    assert len([f for f in missing if f.shard == fake.records[0].shard.key]) == len(fake.records[0].objects)


def test_objects_and_attempts_and_files_that_nobody_vouches_for_are_noted(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r")
    (attempt(fake) / "mlp.1" / "c.7.0").write_bytes(b"stray")
    stray = Path(fake.path) / "shards" / f"{fake.records[0].shard.key}.{LIFE}-2"
    stray.mkdir()
    (stray / "zarr.json").write_bytes(b"{}")
    (Path(fake.path) / "note.txt").write_text("mine")
    report = verify_run(fake.path)
    assert not report.damaged
    assert sorted((finding.object, finding.what.split(":")[0]) for finding in report.findings) == [
        ("note.txt", "not written by a run"),
        (f"shards/{stray.name}", "an attempt without a commit record; the next run removes it"),
        (f"shards/{fake.records[AT].attempt}/mlp.1/c.7.0", "foreign"),
    ]
    assert (Path(fake.path) / "note.txt").exists()


def test_a_shard_that_is_missing_is_damage_in_a_complete_run_and_a_note_in_another(tmp_path: Path) -> None:
    for complete in (True, False):
        fake = write_run(tmp_path / f"{complete}", [[3], [2], [4]], complete=complete)
        key = fake.records[1].shard.key
        Ledger(fake.files).remove(key)
        shutil.rmtree(attempt(fake, 1))
        report = verify_run(fake.path)
        assert report.findings[0].object == f"ledger/{key}.json"
        assert report.damaged == complete


@pytest.mark.parametrize("text", ["", "{", '{"format": 1}', None])
def test_a_torn_record_is_damage_and_the_other_shards_are_still_read(tmp_path: Path, text: str | None) -> None:
    fake = write_run(tmp_path / "r")
    path = Path(fake.path) / "ledger" / f"{fake.records[AT].shard.key}.json"
    path.write_text(path.read_text().replace('"rows": 6', '"rows": 7') if text is None else text)
    report = verify_run(fake.path)
    assert report.damaged
    assert report.findings[0].object == f"ledger/{path.name}"
    assert report.shards == 3


CHANGES: list[tuple[dict[str, object], str]] = [
    ({"rows": 7}, r"tokens\.parquet: 6 rows, the ledger says 7"),
    ({"documents": 3}, r"documents\.parquet: documents: 2, the ledger says 3"),
    ({"skipped": {"empty": 1}}, r"documents\.parquet: skipped: \{\}, the ledger says \{'empty': 1\}"),
    ({"keys_digest": "00"}, r"tokens\.parquet: keys digest [0-9a-f]{32}, the ledger says 00"),
    ({"non_finite": {"mlp.1": 2}}, r"mlp\.1: 0 non-finite values, the ledger says 2"),
    ({"zero_rows": {"mlp.1": 1}}, r"mlp\.1: 0 rows of zeros, the ledger says 1"),
]


@pytest.mark.parametrize(("changes", "what"), CHANGES)
def test_a_record_that_tells_other_counts_than_the_tables_is_damage(
    tmp_path: Path, changes: dict[str, object], what: str
) -> None:
    fake = write_run(tmp_path / "r")
    recommit(fake, **changes)
    report = verify_run(fake.path)
    assert report.damaged
    assert re.search(what, report.text), report.text


def test_tables_that_contradict_one_another_are_damage_though_every_checksum_holds(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r")
    table = pq.read_table(attempt(fake) / "documents.parquet")
    swapped = table.set_column(2, table.schema.field("rows"), pa.array([5, 1], pa.int64()))
    rewrite(fake, "documents.parquet", parquet_bytes(swapped))
    assert "document 3: 5 rows, the token table has 1" in only(verify_run(fake.path))

    fake = write_run(tmp_path / "order")
    tokens = pq.read_table(attempt(fake) / "tokens.parquet")
    for order, row in (([1, 0, 2, 3, 4, 5], 1), ([0, 1, 3, 2, 4, 5], 3)):  # of documents, of positions in one
        rewrite(fake, "tokens.parquet", parquet_bytes(tokens.take(order)))
        assert f"row {row} is out of order" in verify_run(fake.path).text
        assert "keys digest" in verify_run(fake.path).text


def test_sums_that_the_stored_rows_do_not_give_are_damage(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r", dtype="bfloat16")
    moments = Moments()
    states = dict(load_states(moments, (attempt(fake) / "states.safetensors").read_bytes()))
    part = states["mlp.1"].ordinary
    wrong = dataclasses.replace(part, mean=part.mean + np.array([0, 0, 1e-4, 0]))
    states["mlp.1"] = dataclasses.replace(states["mlp.1"], ordinary=wrong)
    rewrite(fake, "states.safetensors", save_states([(moments, states)]))
    assert "mlp.1: ordinary.mean is not what the stored rows give" in only(verify_run(fake.path))
    states["mlp.1"] = moments.zero()
    rewrite(fake, "states.safetensors", save_states([(moments, states)]))
    assert "mlp.1: sums over 0 rows, the shard has 6" in only(verify_run(fake.path))
    del states["mlp.1"]
    rewrite(fake, "states.safetensors", save_states([(moments, states)]))
    assert "mlp.1: no sums are saved" in only(verify_run(fake.path))


def test_an_array_of_another_shape_than_the_plan_says_is_damage(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r")
    path = attempt(fake) / "mlp.1" / "zarr.json"
    rewrite(fake, "mlp.1/zarr.json", path.read_bytes().replace(b"float32", b"float16"))
    assert f"{fake.records[AT].attempt}/mlp.1" in only(verify_run(fake.path))


def test_non_finite_values_that_the_ledger_counted_are_no_damage(tmp_path: Path) -> None:
    def spoil(rows: np.ndarray) -> np.ndarray:
        rows[1, 2] = np.nan
        rows[3, :2] = np.inf
        return rows

    fake = write_run(tmp_path / "r", change={("mlp.1", 5): spoil}, dtype="float16")
    (record,) = (record for record in fake.records if record.non_finite == {"mlp.1": 3})
    found = [str(finding) for finding in verify_run(fake.path).findings]
    assert found == [f"note: shards/{record.attempt}/mlp.1: non-finite values in document 5"]


def test_documents_of_nothing_but_zeros_or_one_repeated_row_are_listed(tmp_path: Path) -> None:
    fake = write_run(
        tmp_path / "r",
        change={("residual.10", 2): 0.0, ("mlp.1", 5): lambda rows: rows * 0 + rows[:1], ("mlp.1", 3): 7.0},
    )
    report = verify_run(fake.path)
    assert not report.damaged
    where = [fake.records[0].attempt, fake.records[2].attempt, fake.records[3].attempt]
    assert sorted(map(str, report.findings)) == sorted(
        [
            f"note: shards/{where[0]}/residual.10: all rows are zero in document 2",
            f"note: shards/{where[1]}/mlp.1: all rows are the same or constant in document 3",
            f"note: shards/{where[2]}/mlp.1: all rows are the same or constant in document 5",
        ]
    )
    assert fake.records[0].zero_rows == {"residual.10": 4}


def test_a_document_of_zeros_is_found_across_the_blocks_of_the_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harvest.checking.scan.SCAN_BYTES", 4 * 6 * 3)  # three rows
    fake = write_run(
        tmp_path / "r", [[4, 11, 5]], {"a": 6}, change={("a", 1): 0.0, ("a", 2): lambda rows: rows * 0 + rows[:1]}
    )
    found = [finding.what for finding in verify_run(fake.path).findings]
    assert found == ["all rows are zero in document 1", "all rows are the same or constant in document 2"]


def test_a_folder_that_is_no_run_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("keep me")
    before = snapshot(tmp_path)
    with pytest.raises(RequestError, match=r"is not a run \(no run\.json\)"):
        verify_run(tmp_path)
    with pytest.raises(RequestError, match="is not a run"):
        verify_run(tmp_path / "absent")
    assert snapshot(tmp_path) == before
    assert os.listdir(tmp_path) == ["note.txt"]


def test_a_run_in_memory_is_verified_like_one_on_disk(tmp_path: Path) -> None:
    fake = write_run(f"memory://{tmp_path.name}-verify")
    assert verify_run(fake.path).findings == ()
    record: ShardRecord = fake.records[AT]
    fake.files.delete(f"shards/{record.attempt}/mlp.1/c.0.0")
    assert only(verify_run(fake.path)).endswith(f"{record.attempt}/mlp.1/c.0.0: missing")
