"""Folder: what the run did not write is never deleted, and a folder of someone else's is refused untouched."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from harvest.errors import DamageError, RequestError
from harvest.store.arrays import StoredArray
from harvest.store.files import Files
from harvest.store.folder import clear_run, foreign, remove_attempt, remove_strays, require_run_or_empty, stray_attempts
from harvest.store.lease import read_holder
from harvest.store.ledger import Ledger
from harvest.store.opening import open_files
from harvest.store.tables import StoredTable
from tests.faults import Faults, FaultyFiles
from tests.store.test_store_ledger import RUN, shard_record

OLD, NEW = "01d00000", "9c1f02ab"


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(params=["local", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return open_files(str(tmp_path / "run") if request.param == "local" else f"memory:/{tmp_path}")


def attempt(files: Files, index: int, life: str, number: int = 1) -> str:
    name = f"f00000-s{index:06d}.{life}-{number}"
    for path in ("zarr.json", "residual.0/zarr.json", "residual.0/c.0.0", "tokens.parquet"):
        files.create(f"shards/{name}/{path}", b"data")
    return name


def paths(files: Files) -> list[str]:
    return [path for path, _ in files.list()]


def test_strays_go_and_committed_own_and_foreign_files_stay(files: Files) -> None:
    committed = attempt(files, 0, OLD)
    stray, retried = attempt(files, 1, OLD), attempt(files, 0, OLD, number=2)
    own = attempt(files, 2, NEW)
    files.create(f"shards/{stray}/notes.txt", b"mine")
    files.create("shards/mine/zarr.json", b"{}")
    Ledger(files).commit(shard_record(0, life=OLD))
    assert stray_attempts(files, [committed], NEW) == sorted([stray, retried])
    assert remove_strays(files, [committed], NEW) == sorted([stray, retried])
    left = {path.split("/")[1] for path in paths(files) if path.startswith("shards/")}
    assert left == {committed, own, stray, "mine"}
    assert [path for path in paths(files) if stray in path] == [f"shards/{stray}/notes.txt"]


def test_an_attempt_committed_while_strays_are_removed_stays(files: Files) -> None:
    late = attempt(files, 3, OLD)
    Ledger(files).commit(shard_record(3, life=OLD))
    assert remove_strays(files, [], NEW) == [], "the list of the committed was older than the record"
    assert any(late in path for path in paths(files))


def test_a_stray_whose_name_begins_the_committed_ones_goes(files: Files) -> None:
    stray, committed = attempt(files, 3, OLD, 1), attempt(files, 3, OLD, 10)
    Ledger(files).commit(shard_record(3, attempt=committed))
    assert remove_strays(files, [committed], NEW) == [stray]


def test_only_an_attempts_name_can_be_removed(files: Files) -> None:
    for name in ("", "..", "mine", f"f00000-s000000.{OLD}-1/../x"):
        with pytest.raises(ValueError, match="not the name of an attempt"):
            remove_attempt(files, name)


def test_clearing_removes_the_runs_own_files_and_only_those(files: Files) -> None:
    Ledger(files).create_run(RUN)
    Ledger(files).commit(shard_record(0))
    Ledger(files).complete({})
    name = attempt(files, 0, NEW)
    for path in (
        "report.html",
        "statistics.parquet",
        "covariance.safetensors",
        "directions/x.json",
        "directions/x.safetensors",
    ):
        files.create(path, b"ours")
    theirs = ["README.md", "directions/mine.txt", "ledger/notes.txt", f"shards/{name}/notes.txt", "data/x.csv"]
    for path in theirs:
        files.create(path, b"theirs")
    files.create("coordinator.json", b"the lease is held meanwhile")
    assert clear_run(files) == sorted(theirs)
    assert paths(files) == sorted([*theirs, "coordinator.json"])


def test_clearing_twice_or_an_empty_folder_does_nothing(files: Files) -> None:
    assert clear_run(files) == []
    Ledger(files).create_run(RUN)
    assert clear_run(files) == []
    assert clear_run(files) == []


def test_a_clearing_killed_at_any_step_can_be_repeated_and_claims_nothing(tmp_path: Path) -> None:
    for step in range(4):
        files = open_files(str(tmp_path / str(step)))
        Ledger(files).create_run(RUN)
        Ledger(files).commit(shard_record(0))
        Ledger(files).complete({})
        attempt(files, 0, NEW)
        steps = iter(range(step))

        class Dying(FaultyFiles):
            def delete_tree(self, *arguments: object, **options: object) -> None:
                if next(steps, None) is None:  # noqa: B023
                    raise KeyboardInterrupt
                self.inner.delete_tree(*arguments, **options)  # type: ignore[arg-type]

        try:
            clear_run(Dying(files, Faults()))
        except KeyboardInterrupt:
            assert Ledger(files).completion() is None
            assert require_run_or_empty(files)
            committed = Ledger(files).records()
            assert all(files.exists(f"shards/{record.attempt}/zarr.json") for record in committed.values())
        assert clear_run(files) == []
        assert paths(files) == []


def test_a_folder_that_is_not_a_run_is_refused_and_stays_bit_for_bit(tmp_path: Path) -> None:
    """Case E83, for everything here that opens or clears a folder."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "notes.txt").write_text("precious")
    (tmp_path / "deep" / "zarr.json").write_text("{}")
    before = hashes(tmp_path)
    files = open_files(str(tmp_path))
    for act in (lambda: require_run_or_empty(files), lambda: clear_run(files)):
        with pytest.raises(RequestError, match=r"run\.path = .*holds files that are not a run \(deep/zarr\.json, not"):
            act()
    assert Ledger(files).read_run() is None
    assert Ledger(files).records() == {}
    assert Ledger(files).completion() is None
    assert read_holder(files) is None
    assert foreign(files) == ["deep/zarr.json", "notes.txt"]
    for read in (lambda: StoredArray(files, "x", "y"), lambda: StoredTable(files, "notes.txt")):
        with pytest.raises(DamageError):
            read()
    assert remove_strays(files, []) == []
    assert hashes(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == ["deep", "notes.txt"]


def test_a_folder_full_of_files_is_refused_after_a_look_at_a_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in range(20):
        (tmp_path / f"{folder:02}").mkdir()
        (tmp_path / f"{folder:02}" / "notes.txt").write_text("mine")
    opened: list[str] = []
    monkeypatch.setattr(os, "scandir", lambda path, scan=os.scandir: opened.append(path) or scan(path))
    with pytest.raises(RequestError, match=r"\(00/notes\.txt, 01/notes\.txt, 02/notes\.txt and more\)"):
        require_run_or_empty(open_files(str(tmp_path)))
    assert len(opened) <= 6


def test_the_root_of_the_file_system_is_refused_at_once() -> None:
    with pytest.raises(RequestError, match=r"run\.path = '/': holds files that are not a run"):
        require_run_or_empty(open_files("/"))


def test_attempts_without_run_json_are_not_taken_for_an_empty_folder(files: Files) -> None:
    attempt(files, 0, OLD)
    with pytest.raises(RequestError, match="holds files that are not a run"):
        require_run_or_empty(files)


def test_what_a_kill_before_run_json_leaves_is_no_obstacle(files: Files) -> None:
    assert not require_run_or_empty(files)
    files.create("coordinator.json", b"{}")
    files.create(".run.json.0123456789abcdef.tmp", b"{")
    assert not require_run_or_empty(files)
    Ledger(files).create_run(RUN)
    assert require_run_or_empty(files)
