"""The Slurm script, run: a cluster, a run, the signal before the time is up, the queue again, the rest of the run."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from plainrun import attempts_without_record, first_difference, read_plain

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "jobs"))

from chaos import tiny_job  # noqa: E402

WAIT_SECONDS = 240
JOB_ID = "77"


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An allocation of one node: `srun` runs the command here, `scontrol` names the node and notes a requeue."""
    commands = tmp_path / "bin"
    commands.mkdir()
    scripts = {
        "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "scontrol": f'if [[ $1 == show ]]; then echo localhost; else echo "$@" >>"{tmp_path}/requeued"; fi',
    }
    for name, text in scripts.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (commands / name).chmod(0o755)
    with tempfile.TemporaryDirectory(prefix="sl", dir="/tmp", ignore_cleanup_errors=True) as short:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "SLURM_"))}
        yield {
            **kept,
            "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(tmp_path),
            "RAY_TMPDIR": short,
            "SLURM_JOB_ID": JOB_ID,
            "SLURM_JOB_NODELIST": "localhost",
            "HARVEST_HEAD_IP": "127.0.0.1",
            "HARVEST_PORT": str(20_000 + 10 * secrets.randbelow(1_200)),
        }


def start(job: Path, environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with open(log, "wb") as out:
        command = ["bash", str(ROOT / "infra" / "slurm.sh"), str(job)]
        return subprocess.Popen(command, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL)


def processes_of(environment: dict[str, str]) -> list[str]:
    """Command lines that still know this cluster's folder or port."""
    marks = [environment["RAY_TMPDIR"], f":{environment['HARVEST_PORT']}", f"={environment['HARVEST_PORT']}"]
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if any(mark in line for mark in marks):
            found.append(line)
    return found


@pytest.mark.slow
def test_a_run_goes_back_into_the_queue_when_its_time_is_up_and_ends_in_the_next_life(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    job = tiny_job(tmp_path, documents=400, shard_documents=4)
    ledger, token = tmp_path / "run" / "ledger", tmp_path / f".harvest-ray-token-{JOB_ID}"
    first = start(job, slurm, tmp_path / "first.log")
    give_up = time.monotonic() + WAIT_SECONDS
    while not any(ledger.glob("f*.json")):
        assert first.poll() is None, (tmp_path / "first.log").read_text()
        assert time.monotonic() < give_up
        time.sleep(0.05)
    assert token.stat().st_mode & 0o777 == 0o600
    secret = token.read_text()
    assert len(secret) == 64
    first.send_signal(signal.SIGUSR1)
    assert first.wait(WAIT_SECONDS) == 130
    log = (tmp_path / "first.log").read_text()
    assert (tmp_path / "requeued").read_text() == f"requeue {JOB_ID}\n", log
    assert json.loads((tmp_path / "run" / "coordinator.json").read_text())["released"] is True
    assert not (tmp_path / "run" / "complete.json").exists()
    assert not token.exists()
    assert secret not in log
    assert processes_of(slurm) == []

    second = start(job, slurm, tmp_path / "second.log")
    assert second.wait(WAIT_SECONDS) == 0, (tmp_path / "second.log").read_text()
    assert (tmp_path / "requeued").read_text() == f"requeue {JOB_ID}\n"
    assert attempts_without_record(tmp_path / "run") == []
    assert processes_of(slurm) == []
    here = [sys.executable, "-m", "harvest", "run", str(job), "--set", f"run.path='{tmp_path}/here'"]
    subprocess.run(here, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    assert first_difference(read_plain(tmp_path / "here"), read_plain(tmp_path / "run")) is None


def test_without_a_job_file_it_says_how_it_is_called() -> None:
    done = subprocess.run(["bash", str(ROOT / "infra" / "slurm.sh")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: sbatch infra/slurm.sh JOB" in done.stderr


def test_a_head_that_does_not_start_is_said_and_leaves_no_token(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bin" / "ray").write_text("#!/usr/bin/env bash\nexit 1\n")
    (tmp_path / "bin" / "ray").chmod(0o755)
    process = start(tmp_path / "job.toml", slurm, tmp_path / "log")
    assert process.wait(60) == 1
    assert "head of the Ray cluster did not start" in (tmp_path / "log").read_text()
    assert not list(tmp_path.glob(".harvest-ray-token*"))
