"""Promises 1 and 3 with real processes: SIGKILL at random moments, then the bits of a run that was left alone."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from plainrun import attempts_without_record, first_difference, read_plain

from harvest.checking.verify import verify_run

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "jobs"))

import chaos  # noqa: E402

LAUNCHER = """
import os, signal, sys, time
import harvest.model.load, harvest.runtime.coordinate, harvest.show, tiny
from harvest.__main__ import _status
tiny.tiny_llama(), tiny.byte_tokenizer()  # what takes seconds, once: transformers imports its parts at first use
for line in sys.stdin:
    delay, *arguments = line.rstrip("\\n").split("\\t")
    pid, begin = os.fork(), time.monotonic()
    if pid == 0:
        os.dup2(2, 1)
        os._exit(_status(arguments))
    done, status = 0, 0
    while delay and not done and time.monotonic() - begin < float(delay):
        time.sleep(0.002)
        done, status = os.waitpid(pid, os.WNOHANG)
    if delay and not done:
        os.kill(pid, signal.SIGKILL)
    if not done:
        done, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""
"""Forks a process for each command line: all that a life of its own is, without the seconds of importing."""


class Lives:
    """Processes that run one command each, started within milliseconds."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
        self._launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def run(self, *arguments: str, kill_after: float | None = None) -> int:
        """The exit status; -9 where it was killed so many seconds after its start."""
        assert self._launcher.stdin is not None
        assert self._launcher.stdout is not None
        self._launcher.stdin.write("\t".join(["" if kill_after is None else str(kill_after), *arguments]) + "\n")
        self._launcher.stdin.flush()
        return int(self._launcher.stdout.readline())

    def close(self) -> None:
        assert self._launcher.stdin is not None
        self._launcher.stdin.close()
        self._launcher.wait(60)


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    lives = Lives()
    yield lives
    lives.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_killed_again_and_again_ends_with_the_bits_of_one_left_alone(
    seed: int, lives: Lives, tmp_path: Path
) -> None:
    job = chaos.tiny_job(tmp_path, documents=320, shard_documents=8)
    assert lives.run("run", str(job), "--set", f"run.path='{tmp_path}/clean'") == 0
    clean, dice, stages, number = read_plain(tmp_path / "clean"), random.Random(seed), Counter[str](), 0
    while stages.total() < 8:  # a run that ends before the kills are used up is compared, and another begun
        number += 1
        run = tmp_path / f"run-{number}"
        arguments = ("run", str(job), "--set", f"run.path='{run}'")
        while stages.total() < 8:
            before, life = {path.name for path in run.glob("ledger/f*.json")}, chaos.life_of(run)
            delay = dice.uniform(0.05, 1.2)
            status = lives.run(*arguments, kill_after=delay)
            if status == 0:
                break
            assert status == -signal.SIGKILL
            stages[chaos.stage_of(run, before_life=life, before=before)] += 1
            print(f"seed {seed}, run {number}: killed after {delay:.2f} s, {len(before)} shards before, {stages}")
        assert lives.run(*arguments) == 0
        assert first_difference(clean, read_plain(run)) is None
        assert attempts_without_record(run) == []
        assert not verify_run(run).damaged


@pytest.mark.slow
def test_the_chaos_command_kills_processes_and_says_identical(tmp_path: Path) -> None:
    arguments = ["--kills", "2", "--seed", "4", "--documents", "80", "--folder", str(tmp_path)]
    found = subprocess.run(
        [sys.executable, str(ROOT / "jobs/chaos.py"), *arguments], capture_output=True, text=True, timeout=240
    )
    assert found.returncode == 0, found.stderr
    assert re.fullmatch(r"identical: \d+ runs, 2 kills, seed 4", found.stdout.splitlines()[-1])


def test_the_chaos_comparison_sees_a_single_bit(lives: Lives, tmp_path: Path) -> None:
    job = chaos.tiny_job(tmp_path, documents=20)
    for name in ("clean", "run"):
        assert lives.run("run", str(job), "--set", f"run.path='{tmp_path}/{name}'") == 0
    assert first_difference(read_plain(tmp_path / "clean"), read_plain(tmp_path / "run")) is None
    target = next((tmp_path / "run/shards").glob("f00000-s000001.*")) / "mlp.1/c.0.0"
    content = bytearray(target.read_bytes())
    content[3] ^= 1
    target.write_bytes(content)
    assert "mlp.1: 1 rows differ" in (
        first_difference(read_plain(tmp_path / "clean"), read_plain(tmp_path / "run")) or ""
    )
