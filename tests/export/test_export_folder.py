"""The folder is there in full or says that it is not: wrong requests, failures, kills, object stores."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from fakes import Fake, write_run
from s3server import s3_server

import harvest
from harvest.__main__ import _status
from harvest.errors import WorkError
from harvest.export import folder as folders
from harvest.export.export import Request, export_run
from harvest.export.formats import npy
from harvest.export.known import format_names
from harvest.store.remote import RemoteFiles


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    large = {("residual.0", 2): 7e4}
    return write_run(tmp_path_factory.mktemp("run") / "r", change=large)


def refused(capsys: pytest.CaptureFixture[str], place: Path, *arguments: Any, status: int = 2) -> str:
    """One line, and nothing changed in the place."""
    before = sorted(place.rglob("*"))
    capsys.readouterr()
    assert _status(["export", *map(str, arguments)]) == status
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err[:9]) == ("", 1, "harvest: ")
    assert sorted(place.rglob("*")) == before
    return err


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--name", "residual.99"), "residual.99"),
        (("--dtype", "int3"), "--dtype"),
        (("--dtype", "bfloat16"), "bfloat16"),
        (("--dtype", "float16"), "residual.0 holds values up to 70000"),
        (("--rows", "layer == 1"), "layer"),
        (("--rows", "position > 99"), "no row"),
        (("--context", "0"), "--context"),
        (("--context", "99"), "longest stretch of one document has 9 rows"),
        (("--limit", "0"), "--limit"),
        (("--shuffle", "-1"), "--shuffle"),
        (("--shuffle", "x"), "--shuffle"),
        (("--naming", "nnsight"), "--naming"),
        (("--naming", "tl"), "mlp.1"),
        (("--frobnicate",), "frobnicate"),
    ],
    ids=str,
)
def test_wrong_options_cost_one_line_and_write_nothing(
    options: tuple[str, ...], names: str, fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert names in refused(capsys, tmp_path, "npy", fake.path, tmp_path / "out", *options)


def test_wrong_places_are_refused(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/notes.txt").write_text("mine")
    (tmp_path / "nested/empty").mkdir(parents=True)
    (tmp_path / "killed.unfinished").mkdir()
    for format, run, out, names in [
        ("npy", fake.path, tmp_path / "taken", "notes.txt"),
        ("npy", fake.path, tmp_path / "taken/notes.txt", "not a folder"),
        ("npy", fake.path, tmp_path / "nested", "empty"),
        ("npy", fake.path, tmp_path / "killed", "killed.unfinished"),
        ("npy", fake.path, f"{fake.path}/export", "within the run"),
        ("npy", tmp_path / "taken", tmp_path / "new", "not a run"),
        ("npy", fake.path, "s3://key:secret@bucket/x", "credentials"),
        ("csv", fake.path, tmp_path / "new", "npy, parquet"),
        ("gguf", fake.path, tmp_path / "new", "add --directions"),
    ]:
        assert names in refused(capsys, tmp_path, format, run, out)
    assert (tmp_path / "taken/notes.txt").read_text() == "mine"


def test_a_run_without_rows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sums = write_run(tmp_path / "sums", store=False)
    assert "stores no rows" in refused(capsys, tmp_path, "npy", sums.path, tmp_path / "out")
    empty = write_run(tmp_path / "empty", shards=[()])
    assert "holds no rows" in refused(capsys, tmp_path, "npy", empty.path, tmp_path / "out")


def test_a_disk_without_room_is_refused_before_anything_is_written(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harvest.store.local.LocalFiles.free_bytes", lambda _: 100)
    assert "100 are free" in refused(capsys, tmp_path, "npy", fake.path, tmp_path / "out")


def test_a_value_that_does_not_fit_ends_the_export_by_name_and_leaves_nothing(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(
        capsys,
        tmp_path,
        "npy",
        fake.path,
        tmp_path / "out",
        "--dtype",
        "float16",
        "--shuffle",
        1,
        "--limit",
        30,
        status=1,
    )
    assert "residual.0: document 2, position " in error
    assert "70000 does not fit into float16" in error


@pytest.mark.parametrize("format", format_names())
def test_a_failing_disk_leaves_nothing_and_an_empty_folder_stays(
    format: str, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    original = folders.Folder.open

    def failing(self: Any, path: str) -> Any:
        writer = original(self, path)
        if path == "README.md":
            writer._sink.write = full
        return writer

    monkeypatch.setattr(folders.Folder, "open", failing)
    with pytest.raises(WorkError, match=r"disk full: .*README\.md"):
        export_run(Request(format=format, run=fake.path, out=str(tmp_path / "out"), name=["residual.0"]))
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "out"]


SLOW = """
import sys, time
from harvest.export.formats import npy
blocks = npy.Selected.blocks
def slow(self, *a):
    for block in blocks(self, *a):
        yield block
        print("at work", flush=True)
        time.sleep(60)
npy.Selected.blocks = slow
import harvest
from harvest.__main__ import main
sys.argv = ["harvest", "export", "npy", *sys.argv[1:]]
main()
"""


@pytest.fixture
def at_work(fake: Fake, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """An export in the middle of its rows."""
    command = [sys.executable, "-c", SLOW, fake.path, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        yield process
        process.kill()


def test_a_killed_export_says_that_it_is_unfinished_and_the_next_one_says_what_to_do(
    at_work: Any, fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at_work.kill()
    at_work.wait()
    assert not (tmp_path / "out").exists()
    left = tmp_path / "out.unfinished"
    assert json.loads((left / "UNFINISHED.json").read_text())["pid"] == at_work.pid
    assert not (left / "export.json").exists()
    assert "remove it" in refused(capsys, tmp_path, "npy", fake.path, tmp_path / "out")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_export_ends_with_130_and_leaves_nothing(number: int, at_work: Any, tmp_path: Path) -> None:
    os.kill(at_work.pid, number)
    assert at_work.wait(timeout=60) == 130
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_becomes_the_export_and_json_prints_the_card(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    assert _status(["export", "npy", fake.path, str(tmp_path / "out"), "--json", "--name", "mlp.1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rows"] == 31
    assert sorted(shown["files"]) == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert _status(["export", "hf", fake.path, str(tmp_path / "hf"), "--naming", "hf", "--limit", "5"]) == 0
    assert "5 of 31" in capsys.readouterr().out


@pytest.mark.parametrize("format", format_names())
def test_an_export_to_an_object_store_holds_the_files_of_a_local_one(format: str, fake: Fake, tmp_path: Path) -> None:
    out = f"memory://exports/{format}-{time.monotonic_ns()}"
    request = {"format": format, "run": fake.path, "name": ["residual.0"], "shuffle": 3}
    local = export_run(Request(out=str(tmp_path / "out"), **request))
    remote = export_run(Request(out=out, **request))
    assert {p: f for p, f in local["files"].items() if p not in ("README.md", "export.json")} == {
        p: f for p, f in remote["files"].items() if p not in ("README.md", "export.json")
    }
    system = fsspec.filesystem("memory")
    root = out.removeprefix("memory:/")
    held = {path.removeprefix(f"{root}/") for path in system.find(root)}
    assert held == set(remote["files"])
    for path in held - {"README.md", "export.json"}:
        assert system.cat_file(f"{root}/{path}") == (tmp_path / "out" / path).read_bytes()


def test_a_failed_export_to_an_object_store_leaves_nothing(
    fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: Any) -> None:
        raise WorkError("scripted")

    made = npy.Format(write=broken, opens="", dtypes=("float32",), known=("float32",))
    monkeypatch.setattr(npy, "FORMAT", made)
    out = f"memory://exports/failed-{time.monotonic_ns()}"
    with pytest.raises(WorkError, match="scripted"):
        export_run(Request(format="npy", run=fake.path, out=out))
    system = fsspec.filesystem("memory")
    assert system.find(out.removeprefix("memory:/")) == []
    system.pipe_file(out.removeprefix("memory:/") + "/UNFINISHED.json", b"{}")
    assert "did not finish" in refused(capsys, tmp_path, "npy", fake.path, out)


def test_a_remote_run_goes_out_as_a_local_one(fake: Fake, tmp_path: Path) -> None:
    remote = write_run(f"memory://runs/{time.monotonic_ns()}", change={("residual.0", 2): 7e4})
    for options in ({}, {"shuffle": 5}, {"rows": "position > 1"}):
        folders = []
        for place, run in (("l", fake.path), ("r", remote.path)):
            out = tmp_path / f"{place}{len(options)}{'rows' in options}"
            export_run(Request(format="npy", run=run, out=str(out), **options))
            folders.append(out)
        for path in folders[0].glob("*.npy"):
            assert np.load(path).tobytes() == np.load(folders[1] / path.name).tobytes()
        assert pq.read_table(folders[0] / "tokens.parquet") == pq.read_table(folders[1] / "tokens.parquet")


def test_a_shuffled_export_of_a_remote_run_asks_for_no_row_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [[40] * 8, [40] * 8]
    remote = write_run(f"memory://runs/{time.monotonic_ns()}", shards=lengths, names={"residual.0": 6})
    asked: list[str] = []
    read_range = RemoteFiles.read_range

    def counting(self: Any, path: str, start: int, length: int) -> bytes:
        asked.append(path)
        return read_range(self, path, start, length)

    monkeypatch.setattr(RemoteFiles, "read_range", counting)
    monkeypatch.setattr("harvest.store.arrays.GAP_BYTES", 0)
    export_run(Request(format="npy", run=remote.path, out=str(tmp_path / "out"), shuffle=1))
    assert sum("residual.0" in path for path in asked) == len(lengths)
    order = np.concatenate(
        [r.numpy() for _, r in harvest.open(remote.path).batches("residual.0", with_rows=True, seed=1)]
    )
    np.testing.assert_array_equal(np.load(tmp_path / "out/residual.0.npy"), remote.rows["residual.0"][order].numpy())


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The name of a bucket on a server that the environment names as every S3 client reads it."""
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for key, value in server.environment.items():
            patch.setenv(key, value)
        yield server.bucket


def test_an_activault_export_on_s3_is_read_by_ranges_up_to_bytes_per_file(fake: Fake, bucket: str) -> None:
    export_run(Request(format="activault", run=fake.path, out=f"s3://{bucket}/run", name=["residual.0"], context=2))
    system = fsspec.filesystem("s3", skip_instance_cache=True)
    found = {path.removeprefix(f"{bucket}/run/residual.0/") for path in system.find(f"{bucket}/run/residual.0/")}
    described = json.loads(system.cat_file(f"{bucket}/run/residual.0/metadata.json"))
    (data,) = found - {"metadata.json", "statistics.json"}
    parts, size = [], described["bytes_per_file"]
    for start in range(0, size, 500):
        parts.append(system.cat_file(f"{bucket}/run/residual.0/{data}", start=start, end=min(start + 500, size)))
    saved = torch.load(io.BytesIO(b"".join(parts)), weights_only=True)
    tokens = pq.read_table(f"{bucket}/run/tokens.parquet", filesystem=system)
    np.testing.assert_array_equal(saved["input_ids"].reshape(-1).numpy(), tokens["token"].to_numpy())
    assert list(saved["states"].shape) == described["shape"]
    assert not system.exists(f"{bucket}/run/UNFINISHED.json")
