"""Files: create, replace and swap are whole and exclusive; nothing leaves the root."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvest.errors import RequestError, WorkError
from harvest.store import local
from harvest.store.files import Files, naming_full_disk, safe_path
from harvest.store.opening import open_files


@pytest.fixture(params=["local", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Files]:
    if request.param == "local":
        yield open_files(str(tmp_path / "run"))
    else:
        root = f"/test-{uuid.uuid4().hex}"
        yield open_files(f"memory:/{root}")
        memory = fsspec.filesystem("memory")
        if memory.exists(root):
            memory.rm(root, recursive=True)


@given(st.lists(st.text("a.-/~0", min_size=1, max_size=6), max_size=12))
def test_files_are_listed_in_the_order_of_their_paths(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            parts = [part for part in name.split("/") if part.strip(".")] or ["x"]
            with contextlib.suppress(OSError):  # a name that another file's folder has
                Path(folder, *parts[:-1]).mkdir(parents=True, exist_ok=True)
                Path(folder, *parts).write_text("")
        listed = [path for path, _ in open_files(folder).list()]
        assert listed == sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def test_what_was_written_is_read_back_whole_in_ranges_and_listed_sorted(files: Files) -> None:
    sink = files.open_write("shards/b/data")
    for part in (b"ab", memoryview(b"cdef"), np.arange(3, dtype=np.uint8)):
        sink.write(part)
    sink.close()
    assert files.create("a.json", b"{}")
    expected = b"abcdef\0\1\2"
    assert files.read("shards/b/data") == expected
    assert files.read_range("shards/b/data", 2, 3) == b"cde"
    assert files.read_range("shards/b/data", 7, 100) == b"\1\2"
    assert files.size("shards/b/data") == 9
    assert list(files.list()) == [("a.json", 2), ("shards/b/data", 9)]
    assert list(files.list("shards/b")) == [("shards/b/data", 9)]
    assert list(files.list("shards/c")) == []
    mapped = files.map("shards/b/data")
    assert mapped is None or (files.local and bytes(mapped) == expected and not mapped.flags.writeable)


def test_a_folder_is_not_a_prefix_of_names(files: Files) -> None:
    files.create("shards/a/x", b"1")
    files.create("shards/ab/x", b"1")
    assert [path for path, _ in files.list("shards/a")] == ["shards/a/x"]
    files.delete_tree("shards/a")
    assert [path for path, _ in files.list()] == ["shards/ab/x"]


def test_opening_a_folder_creates_nothing(tmp_path: Path) -> None:
    files = open_files(str(tmp_path / "deep" / "run"))
    assert list(files.list()) == []
    assert (files.free_bytes() or 0) > 0
    assert list(tmp_path.iterdir()) == []


def test_create_never_overwrites_and_says_so(files: Files) -> None:
    assert files.create("ledger/x.json", b"first")
    assert not files.create("ledger/x.json", b"second")
    assert files.read("ledger/x.json") == b"first"


def test_of_many_creators_exactly_one_wins_and_its_bytes_stay(files: Files) -> None:
    start = threading.Barrier(8)
    won: list[bytes] = []

    def take(data: bytes) -> None:
        start.wait()
        if files.create("ledger/x.json", data):
            won.append(data)

    threads = [threading.Thread(target=take, args=(bytes([65 + i]) * 5000,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert files.read("ledger/x.json") == won[0]
    assert [path for path, _ in files.list()] == ["ledger/x.json"], "no temporary file is left"


def test_swap_changes_only_what_it_expects(files: Files) -> None:
    assert not files.swap("c.json", b"", b"new"), "a missing object is not an empty one"
    files.create("c.json", b"old")
    assert not files.swap("c.json", b"other", b"new")
    assert files.read("c.json") == b"old"
    assert files.swap("c.json", b"old", b"new")
    assert not files.swap("c.json", b"old", b"newer")
    assert files.read("c.json") == b"new"


def test_concurrent_swaps_lose_no_increment(files: Files) -> None:
    files.create("n", b"0")

    def count() -> None:
        for _ in range(10):
            while True:
                old = files.read("n")
                if files.swap("n", old, b"%d" % (int(old) + 1)):
                    break

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert files.read("n") == b"40"


def test_swaps_of_several_processes_lose_no_increment(tmp_path: Path) -> None:
    files = open_files(str(tmp_path))
    files.create("n", b"0")
    script = textwrap.dedent(
        """
        import sys
        from harvest.store.opening import open_files
        files = open_files(sys.argv[1])
        for _ in range(25):
            while True:
                old = files.read("n")
                if files.swap("n", old, b"%d" % (int(old) + 1)):
                    break
        """
    )
    workers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(3)]
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    assert files.read("n") == b"75"


def test_a_swap_that_a_frozen_process_blocks_gives_up_naming_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "LOCK_SECONDS", 0.1)
    files = open_files(str(tmp_path))
    files.create("c.json", b"old")
    with local._locked(str(tmp_path / "c.json")), pytest.raises(WorkError, match=r"c\.json: locked by another"):
        files.swap("c.json", b"old", b"new")
    assert files.read("c.json") == b"old"
    assert files.swap("c.json", b"old", b"new")


def test_a_replaced_object_is_the_old_or_the_new_one_at_every_moment(tmp_path: Path) -> None:
    files = open_files(str(tmp_path))
    old, new = b"a" * 300_000, b"b" * 300_000
    files.replace("x", old)
    stop = threading.Event()
    seen: set[bytes] = set()

    def look() -> None:
        while not stop.is_set():
            seen.add(files.read("x"))

    reader = threading.Thread(target=look)
    reader.start()
    for _ in range(30):
        files.replace("x", new)
        files.replace("x", old)
    stop.set()
    reader.join()
    assert seen <= {old, new}


@pytest.mark.parametrize("operation", ["create", "replace", "swap"])
def test_a_failed_write_leaves_the_old_object_and_no_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    files = open_files(str(tmp_path))
    if operation != "create":
        files.create("x", b"old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        {"create": lambda: files.create("x", b"new"), "replace": lambda: files.replace("x", b"new")}.get(
            operation, lambda: files.swap("x", b"old", b"new")
        )()
    monkeypatch.undo()
    assert [path for path, _ in files.list() if not path.endswith(".lock")] == ([] if operation == "create" else ["x"])
    assert operation == "create" or files.read("x") == b"old"


def test_create_works_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    files = open_files(str(tmp_path))
    assert files.create("x", b"first")
    assert not files.create("x", b"second")
    assert files.read("x") == b"first"


def test_create_counts_a_link_whose_answer_was_lost_as_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def answer_lost(source: str, target: str) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", answer_lost)
    assert open_files(str(tmp_path)).create("x", b"mine")


def test_a_streamed_object_never_overwrites_one_and_abort_removes_it(tmp_path: Path) -> None:
    files = open_files(str(tmp_path))
    sink = files.open_write("a/x")
    sink.write(b"half")
    with pytest.raises(FileExistsError):
        files.open_write("a/x")
    sink.abort()
    sink.abort()
    assert not files.exists("a/x")


def test_abort_removes_the_object_from_memory_too(files: Files) -> None:
    sink = files.open_write("a/x")
    sink.write(b"half")
    sink.abort()
    assert list(files.list()) == []


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", "a/", "a\\..\\b", "a\0b"])
def test_no_path_leaves_the_root(files: Files, path: str) -> None:
    for operation in (files.read, files.delete, files.delete_tree, files.exists, files.open_write):
        with pytest.raises(ValueError, match="not a path inside"):
            operation(path)
    with pytest.raises(ValueError, match="not a path inside"):
        safe_path(path)


def test_delete_tree_removes_links_and_never_what_they_lead_to(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("data")
    files = open_files(str(tmp_path / "run"))
    files.create("shards/a/x", b"1")
    os.symlink(outside, tmp_path / "run/shards/a/link")
    os.symlink(outside / "precious", tmp_path / "run/shards/a/file")
    files.delete_tree("shards/a")
    assert not (tmp_path / "run/shards/a").exists()
    assert (outside / "precious").read_text() == "data"


def test_delete_refuses_a_folder_that_a_link_leads_out_of_the_root(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "a").mkdir(parents=True)
    (outside / "a" / "precious").write_text("data")
    files = open_files(str(tmp_path / "run"))
    files.create("run.json", b"{}")
    os.symlink(outside, tmp_path / "run/shards")
    for doom in (lambda: files.delete_tree("shards/a"), lambda: files.delete("shards/a/precious")):
        with pytest.raises(WorkError, match="leads out of the run folder"):
            doom()
    files.delete_tree("shards")
    assert (outside / "a" / "precious").read_text() == "data"


def test_delete_tree_keeps_what_is_not_named_and_its_folder(files: Files) -> None:
    for name in ("a/ours", "a/notes.txt", "a/deep/ours"):
        files.create(f"shards/{name}", b"1")
    files.delete_tree("shards", only=lambda path: path.endswith("ours"))
    assert [path for path, _ in files.list()] == ["shards/a/notes.txt"]


def test_missing_files_are_said_to_be_missing(files: Files) -> None:
    for operation in (files.read, files.size, lambda path: files.read_range(path, 0, 1)):
        with pytest.raises(FileNotFoundError):
            operation("nothing")
    assert not files.exists("nothing")
    files.delete("nothing")
    files.delete_tree("nothing")


def test_a_file_where_the_run_should_be_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    places = {tmp_path / "file": "it is a file, not a folder", tmp_path / "file/run": "/file is in the way"}
    for path, told in places.items():
        with pytest.raises(RequestError, match=rf"run\.path = .*{told}"):
            open_files(str(path))
    fsspec.filesystem("memory").pipe_file("/some-file", b"x")
    with pytest.raises(RequestError, match="is a file"):
        open_files("memory://some-file")
    fsspec.filesystem("memory").rm("/some-file")


@pytest.mark.parametrize(
    ("url", "storage", "said"),
    [
        ("runs/demo", {"endpoint": "x"}, r"run\.storage\.endpoint = 'x': a local folder"),
        ("s3://bucket/run", {"endpiont": "x"}, r"run\.storage\.endpiont = 'x': s3:// takes endpoint, profile, region"),
        ("nosuch://x/y", {}, r"run\.path = 'nosuch://x/y': unknown kind of store 'nosuch'"),
        ("s3://", {}, r"names no folder"),
        ("s3://me:secret@bucket/run", {}, r"credentials in a URL"),
    ],
)
def test_a_wrong_store_is_refused_in_one_line_without_secrets(url: str, storage: dict[str, str], said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        open_files(url, storage)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_only_stores_that_exclude_others_say_so(tmp_path: Path) -> None:
    assert open_files(str(tmp_path)).exclusive
    assert not open_files("memory://x").exclusive, "other processes have another memory"


def test_file_urls_are_local_folders(tmp_path: Path) -> None:
    assert open_files(f"file://{tmp_path}/run").url == f"{tmp_path}/run"


def test_a_full_disk_is_named_with_the_bytes_needed_and_other_faults_pass() -> None:
    with pytest.raises(WorkError, match=r"disk full: /run/x: 42 more bytes are needed"), naming_full_disk("/run/x", 42):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")
    with pytest.raises(PermissionError), naming_full_disk("/run/x", 42):
        raise PermissionError(errno.EACCES, "denied")
