"""What is seen of a run before its first shard is committed, while it stops, and where there is nothing to do."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest import show
from harvest.outcome import Progress
from harvest.runtime import coordinate, inline
from harvest.runtime.progress import Silent
from harvest.runtime.status import Follower, status_of
from harvest.runtime.terminal import Log
from harvest.runtime.watch import _under_way
from harvest.store.ledger import Ledger


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    tiny_llama(vocab=300).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(12)))
    return {
        "model": {"name": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "texts.jsonl")},
        "store": {"shard_documents": 4},
        "run": {"path": str(tmp_path / "run"), "threads": 1},
    }


def test_a_look_before_the_first_shard_says_what_is_done_by_whom_and_for_how_long(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[dict[str, Any]] = []
    load, complete = inline.loaded, Ledger.complete
    look = lambda: looks.append(status_of(job["run"]["path"]))  # noqa: E731

    class Watcher(Silent):
        def first_forward(self, seconds: float) -> None:
            look()

    def completing(self: Ledger, summary: Any) -> None:
        look()
        complete(self, summary)

    monkeypatch.setattr(inline, "loaded", lambda plan: (look(), load(plan))[1])
    monkeypatch.setattr(Ledger, "complete", completing)
    coordinate.run(job, observer=Watcher())
    assert [one["worker"]["doing"] for one in looks] == [
        "loading the model",
        "harvesting",
        "merging what the shards hold",
    ]
    assert [(one["state"], one["committed"]) for one in looks] == [("running", 0), ("running", 0), ("running", 3)]
    assert {one["worker"]["pid"] for one in looks} == {os.getpid()}
    assert all(0 <= one["worker"]["doing_seconds"] < 100 for one in looks)
    said = show.status(looks[0]).text
    assert "running     none yet: loading the model, for 0 s" in said
    assert f"pid {os.getpid()} on " in said
    assert _under_way(looks[0]) == "running, loading the model"


def test_the_shards_in_work_are_in_the_heartbeat_before_the_first_is_committed(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from harvest.store.lease import Lease

    said: list[tuple[str, ...]] = []
    heartbeat = Lease.heartbeat

    def noted(self: Lease, running: Any = (), failed: Any = None) -> None:
        said.append(tuple(running))
        heartbeat(self, running, failed)

    class Watcher(Silent):
        def first_forward(self, seconds: float) -> None:
            assert any("f00000-s000000" in keys for keys in said)
            said.append(("seen",))

    monkeypatch.setattr(Lease, "heartbeat", noted)
    coordinate.run(job, observer=Watcher())
    assert ("seen",) in said


def test_a_complete_run_shows_nobody_at_work_though_its_report_is_still_being_written(job: dict[str, Any]) -> None:
    path = Path(job["run"]["path"])
    coordinate.run(job)
    lease = json.loads((path / "coordinator.json").read_text())
    alive = {**lease, "released": False, "heartbeat": time.time(), "doing": "writing the report"}
    (path / "coordinator.json").write_text(json.dumps(alive))
    found = status_of(str(path))
    assert (found["state"], found["worker"], found["running"]) == ("complete", None, [])
    assert "at work" not in show.status(found).text


def test_a_coordinator_elsewhere_that_is_long_silent_is_not_at_work_until_its_heart_is_seen_to_beat(
    job: dict[str, Any],
) -> None:
    path = Path(job["run"]["path"])
    coordinate.run(job)
    (path / "complete.json").unlink()
    lease = json.loads((path / "coordinator.json").read_text())
    old = {**lease, "released": False, "machine": "another", "heartbeat": time.time() - 3600, "doing": "harvesting"}
    (path / "coordinator.json").write_text(json.dumps(old))
    follower = Follower(str(path))
    assert (follower.look()["state"], follower.look()["worker"]) == ("unfinished", None)
    (path / "coordinator.json").write_text(json.dumps({**old, "heartbeat": old["heartbeat"] + 5}))
    assert follower.look()["state"] == "running", "its clock is an hour behind"


def test_a_finished_job_says_that_nothing_was_done_and_where_to_go(job: dict[str, Any]) -> None:
    coordinate.run(job)
    rows, path = len(harvest.open(job["run"]["path"])["residual.0"]), job["run"]["path"]
    stream = io.StringIO()
    coordinate.run(job, observer=Log(stream))
    assert stream.getvalue() == (
        f"harvest: already complete: {rows:,} rows in each name of {path}, nothing was done; harvest status {path} "
        "says more, --set run.path=PATH makes another run\n"
    )


def test_what_is_lost_when_a_run_stops_is_not_counted_as_kept() -> None:
    stream = io.StringIO()
    log = Log(stream)
    log.advanced(Progress(shard="f0-s0", attempt="a", tokens=70, rows=60, bytes=5, forward_seconds=0.1))
    assert log._tally.rows == 60
    log.stopped(KeyboardInterrupt())
    assert stream.getvalue().splitlines()[-1].endswith("; kept: documents 0  tokens 0  rows 0  shards 0")
