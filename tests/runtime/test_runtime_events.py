"""`harvest run --json`: every line obeys the schema, totals are the disk's, and the last line says how it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commandcase import furnished, job_file, jsonl
from eventcase import events_of, kinds, of
from plainrun import read_plain

from harvest.__main__ import _status
from harvest.runtime import telling
from harvest.store.ledger import Ledger

Command = Callable[..., tuple[int, list[dict[str, Any]], str]]
LOADED = ["model_loading", "model_loaded"]
NAME = "runs <b>&\u001b[31m"
"""Of a run; what is special to a terminal or a page stays text."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnished(tmp_path_factory.mktemp("place"), [{"text": f"text {i}" if i % 7 else ""} for i in range(40)])


@pytest.fixture
def job(place: Path, tmp_path: Path) -> Path:
    return job_file(tmp_path / "job.toml", place, tmp_path / NAME, shard_documents=8, on_bad="skip")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`harvest ... --json` in this process: (exit status, events, stderr)."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def call(*arguments: Any) -> tuple[int, list[dict[str, Any]], str]:
        capsys.readouterr()
        status = _status([*map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        return status, events_of(out), err

    return call


def test_a_run_tells_its_plan_its_shards_and_at_the_end_what_the_disk_holds(
    command: Command, job: Path, tmp_path: Path
) -> None:
    status, events, err = command("run", job)
    plain = read_plain(tmp_path / NAME)
    assert (status, err) == (0, "")
    assert [event["event"] for event in events[:5]] == [
        "run_started",
        "plan",
        "model_loading",
        "model_loaded",
        "first_forward",
    ]
    loaded, forward = events[3], events[4]
    assert 0 < loaded["load_seconds"] <= loaded["seconds"] <= forward["seconds"]
    assert kinds(events)["first_forward"] == 1
    assert kinds(events)["shard_committed"] == len(plain.records) == 5
    assert {event["run"] for event in events} == {str(tmp_path / NAME)}
    rows, documents = len(plain.rows["residual.0"]), len(plain.documents)
    committed = of(events, "shard_committed")
    for key in ("rows", "tokens", "documents", "bytes"):
        assert sum(event[key] for event in committed) == events[-1][key]
    assert (events[-1]["rows"], events[-1]["documents"], events[-1]["skipped"]) == (rows, documents, {"empty": 6})
    assert {event["shard"]: event["attempt"] for event in committed} == {
        key: record["attempt"] for key, record in plain.records.items()
    }
    (last,) = of(events, "progress")
    assert (last["rows"], last["expected_rows"], last["tokens"], last["expected_tokens"]) == (rows,) * 4
    assert (last["documents"], last["skipped"], last["shards"], last["workers"]) == (documents, 6, 5, 1)
    (check,) = of(events, "self_check")
    assert set(check["errors"]) == set(plain.rows)
    assert max(check["errors"].values()) < 5e-5


def test_progress_rises_to_the_total_and_counts_earlier_lives(
    command: Command, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "PROGRESS_SECONDS", 0.0)
    assert command("run", job, "--set", "data.limit=16")[0] == 0
    status, events, _ = command("run", job)
    assert status == 0
    plan = of(events, "plan")[0]
    assert (plan["committed_shards"], plan["documents"], plan["shards"]) == (1, 40, 5), "the second one was cut"
    told = of(events, "progress")
    assert len(told) > 5
    assert told[0]["tokens"] > plan["committed_tokens"] > 0
    for key in ("tokens", "rows", "documents", "shards", "bytes"):
        assert [event[key] for event in told] == sorted(event[key] for event in told)
        assert told[-1][key] == events[-1][key]
    assert all(event["tokens"] <= events[-1]["tokens"] for event in told)


def test_a_finished_run_is_told_as_completed_at_once(command: Command, job: Path) -> None:
    first = command("run", job)[1][-1]
    status, events, _ = command("run", job)
    assert (status, [event["event"] for event in events]) == (0, ["run_started", "already_complete", "run_completed"])
    assert events[1]["rows"] == first["rows"] > 0
    assert {**events[-1], "time": ""} == {**first, "time": ""}


@pytest.mark.parametrize(
    ("settings", "status", "told", "error"),
    [
        (["data.limit=0"], 2, ["run_failed"], "data.limit = 0"),
        (["capture.layers=[99]"], 2, ["run_started", "run_failed"], "capture.layers"),
        (["data.on_bad=fail"], 1, ["run_started", "plan", *LOADED, "shard_failed", "run_failed"], "document 0"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_whatever_ends_a_run_is_the_last_event_and_the_last_line_of_stderr(
    settings: list[str], status: int, told: list[str], error: str, command: Command, job: Path, tmp_path: Path
) -> None:
    if status == 1:
        jsonl(tmp_path / "bad.jsonl", [{"text": None}])
        settings = [*settings, f"data.path={tmp_path}/bad.jsonl"]
    found, events, err = command("run", job, *(part for setting in settings for part in ("--set", setting)))
    assert (found, events[-1]["status"]) == (status, status)
    assert [event["event"] for event in events] == told
    assert error in events[-1]["error"]
    assert err.splitlines()[-1] == f"harvest: {events[-1]['error']}"


def test_what_fails_once_is_told_as_tried_again(
    command: Command, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harvest.model import capture

    calls, forward = [], capture.Capture.__call__

    def once(self: Any, *args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise OSError("the cable fell out")
        return forward(self, *args, **more)

    monkeypatch.setattr(capture.Capture, "__call__", once)
    status, events, _ = command("run", job)
    (again,) = of(events, "shard_retried")
    assert status == 0
    assert "the cable fell out" in again["error"]
    assert of(events, "progress")[-1]["retries"] == 1
    assert events[-1]["rows"] == len(read_plain(tmp_path / NAME).rows["residual.0"])


def test_a_fault_of_our_own_is_told_too(command: Command, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "complete", lambda *_: [][0])
    status, events, err = command("run", job)
    assert (status, events[-1]["event"], events[-1]["status"]) == (1, "run_failed", 1)
    assert "IndexError" in events[-1]["error"]
    assert err.splitlines()[-1] == f"harvest: {events[-1]['error']}"


# ---- real processes --------------------------------------------------------------------------------------------------


def process(*arguments: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "harvest", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_an_interrupted_run_says_so_in_its_last_event(job: Path, tmp_path: Path) -> None:
    jsonl(tmp_path / "long.jsonl", [{"text": f"text {i}"} for i in range(2000)])
    life = process("run", job, "--json", "--set", f"data.path={tmp_path}/long.jsonl")
    assert life.stdout is not None
    lines = []
    for line in life.stdout:
        lines.append(line)
        if '"shard_committed"' in line:
            break
    life.send_signal(signal.SIGINT)
    rest, err = life.communicate(timeout=200)
    events = events_of("".join(lines) + rest)
    assert (life.returncode, events[-1]["status"]) == (130, 130)
    assert events[-1]["error"] == "interrupted; the same command resumes"
    assert err.startswith("harvest: interrupted; the same command resumes: harvest run ")
    assert kinds(events)["stopping"] == 1


def test_a_run_whose_reader_leaves_is_finished_all_the_same(job: Path, tmp_path: Path) -> None:
    life = process("run", job, "--json")
    assert life.stdout is not None
    assert json.loads(life.stdout.readline())["event"] == "run_started"
    life.stdout.close()
    deadline = time.monotonic() + 200
    while life.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert life.stderr is not None
    assert (life.returncode, life.stderr.read()) == (0, "")
    assert read_plain(tmp_path / NAME).complete
