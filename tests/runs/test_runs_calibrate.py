"""`harvest plan --calibrate`: a part of the job, harvested and gone; the run untouched, whatever ends the measuring."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from commandcase import jsonl
from plainrun import snapshot
from s3server import s3_server
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.__main__ import _status
from harvest.errors import RequestError, WorkError
from harvest.model.capture import Capture
from harvest.runtime.calibrate import calibrate
from harvest.runtime.coordinate import plan_run
from harvest.runtime.forecast import Forecast, cores
from harvest.stages import stages_of
from harvest.store.opening import open_files


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and texts."""
    folder = tmp_path_factory.mktemp("place")
    tiny_llama(vocab=300).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    jsonl(folder / "texts.jsonl", [{"text": f"text {i} " * (1 + i % 3)} for i in range(400)])
    return folder


def job_file(place: Path, folder: Path, more: str = "", run: str = "") -> Path:
    path = folder / "job.toml"
    path.write_text(
        f'model = {{name = "{place}/model"}}\ndata = {{path = "{place}/texts.jsonl"}}\n'
        f'store = {{shard_documents = 64}}\nrun = {{path = "{folder}/run", threads = 1{run}}}\n{more}'
    )
    return path


@pytest.fixture
def job(place: Path, tmp_path: Path) -> Path:
    return job_file(place, tmp_path)


def calibrated(job: Path, workers: int | None = None, seconds: float = 0.2) -> Forecast:
    return calibrate(plan_run(job), workers, begin=time.monotonic(), seconds=seconds)


def test_a_calibration_leaves_nothing_behind_and_says_what_the_job_comes_to(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the test's own handlers stay
    before = snapshot(tmp_path)
    assert _status(["plan", str(job), "--calibrate", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert snapshot(tmp_path) == before
    assert os.listdir(tmp_path) == ["job.toml"]
    found = told["calibration"]
    assert told["documents"] == 400
    assert found["measured"]["tokens"] > 0
    assert found["tokens"] == pytest.approx(told["tokens"], rel=0.02)
    assert (found["workers"], found["nodes"]) == (1, 1)
    assert found["seconds"] > found["start_seconds"] > 0
    assert found["shares"][found["limit"]] == 1.0
    _status(["plan", str(job), "--calibrate"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-5:]] == ["calibrated", "workers", "speed", "time", "limit"]


def test_the_whole_is_predicted_from_the_part_as_a_run_then_measures_it(job: Path) -> None:
    """The same data whole: bytes and tokens to the count, and the costs are those of the part's own records."""
    found = calibrated(job, seconds=60)
    run = harvest.run(job)
    assert found.measured.tokens == run.summary()["forward_tokens"]
    assert found.tokens == pytest.approx(found.measured.tokens, rel=0.02)
    assert found.measured.shards == len(run.shards)
    assert found.measured.bytes == pytest.approx(run.summary()["bytes"], rel=0.001)
    report = stages_of(run.shards)
    assert report is not None
    assert set(found.measured.stages.stages) == set(report.stages)
    busy = {name: stage.busy for name, stage in found.measured.stages.stages.items()}
    own = sum(busy[name] for name in ("forward", "copy", "reduce", "commit")) + found.measured.stages.other
    tokens, shards = found.measured.tokens, found.measured.shards
    assert found.costs.model * tokens + found.costs.model_shard * shards == pytest.approx(own)
    assert found.costs.write * tokens + found.costs.write_shard * shards == pytest.approx(
        busy["write"] + busy["finish"]
    )
    assert found.seconds == pytest.approx(found.start + max(found.found.lines.values()) + found.end)


def test_more_workers_share_the_tokens_and_the_cores_of_their_machine(job: Path) -> None:
    one, four = calibrated(job, 1), calibrated(job, 4)
    assert (one.found.nodes, four.found.nodes) == (1, 1), "without an address all are on this machine"
    assert four.found.lines["the cores of a node"] == pytest.approx(four.costs.cores * (four.tokens or 0) / cores())
    assert four.found.lines["reading and tokenising"] == pytest.approx(four.costs.read * (four.tokens or 0) / 4)


def test_workers_of_this_machine_are_measured_together_and_leave_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes of Ray's, each with shards of its own, whose seconds have in them what they take from each other;
    a count of workers that is not the job's is told from one alone, as it would be elsewhere."""
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # loopback only
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    job = job_file(place, tmp_path, run=", workers = 2")
    found = calibrated(job, seconds=2)
    assert os.listdir(tmp_path) == ["job.toml"]
    assert not ray.is_initialized()
    assert found.measured.stages.starts == 2, "both worked"
    assert found.measured.shards >= 4
    assert (found.measured.cores, found.costs.cores, found.workers) == (None, 0.0, 2)
    assert found.data()["measured"]["cores_seconds"] is None
    assert found.start > found.measured.stages.load, "Ray and the loads of its workers are in it"
    assert "2, on this machine, measured together" in found.text
    assert "on top" not in found.text
    alone = calibrated(job, 3)
    assert alone.measured.cores is not None
    assert "3, on this machine\n" in alone.text
    assert "Ray's own start comes on top" in alone.text


def test_a_part_smaller_than_a_document_grows_until_it_holds_one(tmp_path: Path, place: Path) -> None:
    jsonl(tmp_path / "long.jsonl", [{"text": "word " * 400} for _ in range(4)])
    job = job_file(place, tmp_path)
    plan = plan_run(json.loads(json.dumps({**_tables(job), "data": {"path": f"{tmp_path}/long.jsonl"}})))
    found = calibrate(plan, begin=time.monotonic(), seconds=0.001)
    assert found.measured.tokens > 1500


def _tables(job: Path) -> dict[str, Any]:
    return tomllib.loads(job.read_text())


def test_tokens_are_judged_from_all_over_the_data(tmp_path: Path, place: Path) -> None:
    """The first documents are short ones."""
    rows = [{"text": "a" if i < 300 else "b" * 40} for i in range(1200)]
    jsonl(tmp_path / "sorted.jsonl", rows)
    settings = {**_tables(job_file(place, tmp_path)), "data": {"path": f"{tmp_path}/sorted.jsonl"}}
    plan = plan_run(settings)
    truth = sum(len(row["text"]) + 1 for row in rows)
    found = calibrate(plan, begin=time.monotonic(), seconds=0.1)
    assert found.tokens == pytest.approx(truth, rel=0.02)


def test_neither_a_finished_nor_an_unfinished_run_is_touched(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        calls: list[int] = []
        original = Capture.__call__

        def failing(*args: Any, **more: Any) -> Any:
            calls.append(1)
            if len(calls) > 8:
                raise OSError(5, "Input/output error (scripted)")
            return original(*args, **more)

        patch.setattr(Capture, "__call__", failing)
        with pytest.raises(WorkError):
            harvest.run(job)
    unfinished = snapshot(tmp_path / "run")
    calibrated(job)
    assert snapshot(tmp_path / "run") == unfinished
    harvest.run(job)
    finished = snapshot(tmp_path)
    calibrated(job)
    assert snapshot(tmp_path) == finished


def test_a_part_that_fails_names_the_document_and_leaves_nothing(tmp_path: Path, place: Path) -> None:
    jsonl(tmp_path / "bad.jsonl", [{"text": "a"}, {"text": None}])
    settings = {**_tables(job_file(place, tmp_path)), "data": {"path": f"{tmp_path}/bad.jsonl"}}
    with pytest.raises(WorkError, match=r"--calibrate: .*document 1 "):
        calibrate(plan_run(settings), begin=time.monotonic(), seconds=0.1)
    assert sorted(os.listdir(tmp_path)) == ["bad.jsonl", "job.toml"]


def test_at_a_url_the_part_lies_beside_the_run_and_goes_with_the_measuring(tmp_path: Path, place: Path) -> None:
    settings = {**_tables(job_file(place, tmp_path)), "run": {"path": "memory://bucket/deep/run", "threads": 1}}
    found = calibrate(plan_run(settings), begin=time.monotonic(), seconds=0.1)
    assert found.measured.tokens > 0
    assert list(open_files("memory://bucket").list()) == []


def test_in_a_bucket_the_part_goes_with_the_measuring_and_the_bucket_keeps_what_was_there(
    tmp_path: Path, place: Path
) -> None:
    with s3_server() as server:
        bucket = open_files(f"s3://{server.bucket}", server.storage)
        assert bucket.create("run.calibrated/notes.txt", b"mine")
        run = {"path": f"s3://{server.bucket}/run", "threads": 1, "storage": server.storage}
        settings = {**_tables(job_file(place, tmp_path)), "run": run}
        found = calibrate(plan_run(settings), begin=time.monotonic(), seconds=0.1)
        assert found.measured.bytes > 0
        assert [path for path, _ in bucket.list()] == ["run.calibrated/notes.txt"]


def test_a_run_whose_folders_do_not_exist_yet_gets_none_from_a_calibration(tmp_path: Path, place: Path) -> None:
    settings = {**_tables(job_file(place, tmp_path)), "run": {"path": f"{tmp_path}/a/b/run", "threads": 1}}
    calibrate(plan_run(settings), begin=time.monotonic(), seconds=0.1)
    assert os.listdir(tmp_path) == ["job.toml"]


@pytest.mark.parametrize("words", [["--workers", "2"], ["--calibrate", "--workers", "0"]], ids=str)
def test_wrong_words_are_one_line_and_nothing_is_written(
    words: list[str],
    job: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert _status(["plan", str(job), *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"--workers {words[-1]}" in err
    assert os.listdir(tmp_path) == ["job.toml"]


def test_a_plan_for_cuda_is_refused_where_there_is_none(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_run(job)
    elsewhere = type(plan.resolved)(**{key: getattr(plan.resolved, key) for key in plan.resolved.__dataclass_fields__})
    object.__setattr__(elsewhere, "device", "cuda")
    object.__setattr__(plan, "resolved", elsewhere)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RequestError, match="CUDA"):
        calibrate(plan, begin=time.monotonic())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_calibration_ends_with_130_and_leaves_nothing(
    number: signal.Signals, tmp_path: Path, place: Path
) -> None:
    jsonl(tmp_path / "many.jsonl", [{"text": f"this is text number {i}"} for i in range(60_000)])
    job = job_file(place, tmp_path)
    command = [sys.executable, "-m", "harvest", "plan", str(job), "--calibrate"]
    command += ["--set", f"data.path={tmp_path}/many.jsonl"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".run.calibration-*/part/ledger/*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert sorted(os.listdir(tmp_path)) == ["job.toml", "many.jsonl"]
