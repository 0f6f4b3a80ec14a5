"""S3: conditional puts decide between writers; checked against a server on loopback."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from s3server import S3Server, s3_server

from harvest.errors import LostLeaseError, RequestError
from harvest.records import ArraySpec
from harvest.store import lease as lease_module
from harvest.store.arrays import StoredArray
from harvest.store.attempt import AttemptWriter
from harvest.store.files import Files
from harvest.store.folder import remove_strays
from harvest.store.lease import Lease
from harvest.store.ledger import Ledger
from harvest.store.opening import open_files
from tests.store.test_store_ledger import RUN, shard_record

pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as started:
        yield started


@pytest.fixture
def files(server: S3Server, request: pytest.FixtureRequest) -> Files:
    name = request.node.name.replace("[", "-").strip("]")
    return open_files(f"s3://{server.bucket}/{name}/run", server.storage)


def test_create_is_put_if_absent_and_one_of_many_wins(files: Files) -> None:
    assert files.exclusive
    start = threading.Barrier(6)
    won: list[bytes] = []

    def take(data: bytes) -> None:
        start.wait()
        if files.create("ledger/x.json", data):
            won.append(data)

    threads = [threading.Thread(target=take, args=(bytes([65 + number]) * 100,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert files.read("ledger/x.json") == won[0]
    assert not files.create("ledger/x.json", b"later")


def test_swap_holds_by_etag(files: Files) -> None:
    assert not files.swap("c.json", b"old", b"new")
    files.create("c.json", b"old")
    assert not files.swap("c.json", b"other", b"new")
    assert files.swap("c.json", b"old", b"new")
    assert files.read("c.json") == b"new"


def test_a_swap_that_is_overtaken_between_look_and_put_loses(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.create("c.json", b"old")
    system = files.system  # type: ignore[attr-defined]
    call = system.call_s3

    def overtaken(method: str, **arguments: object) -> object:
        if method == "put_object":
            monkeypatch.setattr(system, "call_s3", call)
            files.replace("c.json", b"someone else's")
        return call(method, **arguments)

    monkeypatch.setattr(system, "call_s3", overtaken)
    assert not files.swap("c.json", b"old", b"new")
    assert files.read("c.json") == b"someone else's"


def test_an_attempt_is_written_committed_read_and_its_strays_removed(files: Files) -> None:
    rows = np.arange(400, dtype=np.float32).reshape(100, 4)
    ledger = Ledger(files)
    assert ledger.create_run(RUN)
    assert not ledger.create_run(RUN) or ledger.read_run() == RUN
    for index in range(2):
        attempt = f"f00000-s{index:06d}.9c1f02ab-1"
        spec = {"residual.0": ArraySpec(rows=100, width=4, dtype="float32")}
        with AttemptWriter(files, attempt, spec, chunk_bytes=256, object_bytes=1000) as writer:
            writer.append("residual.0", rows)
            objects = writer.close()
        if index == 0:
            assert ledger.commit(shard_record(0, objects=objects))
    assert list(ledger.records()) == ["f00000-s000000"]
    stored = StoredArray(files, "f00000-s000000.9c1f02ab-1", "residual.0")
    np.testing.assert_array_equal(stored.gather(np.array([99, 3, 50])), rows[[99, 3, 50]])
    assert remove_strays(files, ["f00000-s000000.9c1f02ab-1"]) == ["f00000-s000001.9c1f02ab-1"]
    assert not any("s000001" in path for path, _ in files.list())


@pytest.mark.parametrize("size", [1, 9 << 20])
def test_an_aborted_object_is_not_there(files: Files, size: int) -> None:
    sink = files.open_write("a/x")
    sink.write(b"y" * size)
    sink.abort()
    del sink  # a file that is only garbage would be uploaded here
    gc.collect()
    assert list(files.list()) == []


def test_the_lease_works_on_s3(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "REMOTE_SECONDS", 0.0)
    with Lease.acquire(files, interval=0.1, silent=30) as lease:
        with pytest.raises(RequestError, match="is at work"):
            Lease.acquire(files, interval=0.1, silent=30)
        lease.check()
        files.replace("coordinator.json", files.read("coordinator.json").replace(lease.life.encode(), b"0badcafe"))
        with pytest.raises(LostLeaseError):
            lease.check()


@pytest.mark.parametrize("profile", [None, "nobody"])
def test_without_credentials_every_call_is_refused_in_one_line_that_names_the_setting(
    server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, profile: str | None
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    storage = {**server.storage, **({"profile": profile} if profile else {})}
    files = open_files("s3://runs/nobody/run", storage, setting="out")
    for call in (
        lambda: list(files.list()),
        lambda: files.read("run.json"),
        lambda: files.create("run.json", b"{}"),
        lambda: files.exists("run.json"),
        lambda: files.swap("run.json", b"", b"{}"),
    ):
        with pytest.raises(RequestError) as raised:
            call()
        assert "\n" not in str(raised.value)
        assert str(raised.value).startswith("out = 's3://runs/nobody/run': ")
        assert "AWS_ACCESS_KEY_ID" in str(raised.value)


def test_the_environment_is_read_when_a_store_is_opened_not_when_one_was_before(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    path = f"s3://{server.bucket}/told/run"
    with pytest.raises(ConnectionError):
        open_files(path, {}).create("a.json", b"{}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    assert open_files(path, {}).create("a.json", b"{}")


def test_an_endpoint_that_does_not_answer_is_an_os_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    files = open_files("s3://runs/nowhere", {"endpoint": "http://127.0.0.1:9"}, setting="out")
    with pytest.raises(ConnectionError, match=r"^out = 's3://runs/nowhere': Could not connect") as raised:
        list(files.list())
    assert "\n" not in str(raised.value)
