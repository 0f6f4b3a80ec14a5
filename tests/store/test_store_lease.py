"""Lease: one holder at a time, taken over only from the dead, and a holder that was replaced finds out."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harvest.errors import DamageError, LostLeaseError, RequestError
from harvest.store import lease as module
from harvest.store.files import Files
from harvest.store.lease import Holder, Lease, process_start, read_holder, this_machine
from harvest.store.opening import open_files

QUICK = {"interval": 0.05, "silent": 5.0}
WATCHFUL = {"interval": 0.5, "silent": 5.0}
HOLD = """
import sys, time
from harvest.store.opening import open_files
from harvest.store.lease import Lease
from harvest.errors import HarvestError
files = open_files(sys.argv[1])
try:
    lease = Lease.acquire(files, interval=float(sys.argv[2]), silent=float(sys.argv[3]))
except HarvestError as error:
    print("refused", error, flush=True)
    sys.exit(error.status)
print("held", lease.life, flush=True)
"""


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return open_files(str(tmp_path / "run"))


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def start(processes: list[subprocess.Popen[str]], files: Files, then: str, *arguments: str) -> subprocess.Popen[str]:
    script = HOLD + textwrap.dedent(then)
    process = subprocess.Popen(
        [sys.executable, "-c", script, files.url, *(arguments or ("0.05", "0.5"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    processes.append(process)
    return process


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def leave(files: Files, **changes: object) -> bytes:
    """A lease of someone who is not here: another machine, so that only silence tells."""
    holder = Holder(
        life="0badcafe", host="elsewhere", pid=4711, machine="another boot", started=1, heartbeat=time.time()
    )
    data = module._encode(dataclasses.replace(holder, **changes))  # type: ignore[arg-type]
    files.replace("coordinator.json", data)
    return data


def test_a_live_lease_is_refused_naming_host_and_pid_and_a_released_one_is_free(files: Files) -> None:
    with Lease.acquire(files, **QUICK) as lease:
        lease.check()
        for _ in range(2):
            with pytest.raises(RequestError, match=rf"run\.path = .*pid {os.getpid()} on \S+ is at work") as caught:
                Lease.acquire(files, **QUICK)
            assert caught.value.status == 2
            assert "\n" not in str(caught.value)
        lease.check()
        first = lease.life
    with Lease.acquire(files, **QUICK) as second:
        assert second.life != first
        assert len(second.life) == 8


def test_the_file_tells_who_works_on_what_and_keeps_beating(files: Files) -> None:
    assert read_holder(files) is None
    with Lease.acquire(files, **QUICK) as lease:
        before = read_holder(files)
        assert before is not None
        assert (before.life, before.pid, before.machine) == (lease.life, os.getpid(), this_machine())
        lease.heartbeat(["f00000-s000001"], {"f00000-s000000": "worker lost"})
        deadline = time.monotonic() + 5
        while (now := read_holder(files)) is None or not now.running:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert now.running == ("f00000-s000001",)
        assert now.failed == {"f00000-s000000": "worker lost"}
        assert now.heartbeat > before.heartbeat
    after = read_holder(files)
    assert after is not None
    assert after.released
    assert after.running == ()


def test_a_live_holder_elsewhere_is_refused_and_a_silent_one_replaced(files: Files) -> None:
    leave(files)
    with pytest.raises(RequestError, match="pid 4711 on elsewhere"):
        Lease.acquire(files, **QUICK)
    leave(files, heartbeat=time.time() - 10)
    with Lease.acquire(files, **QUICK) as lease:
        lease.check()


@pytest.mark.parametrize("ahead", [-3600, 3600])
def test_a_holder_whose_clock_is_off_is_alive_while_it_beats_and_dead_when_it_stops(files: Files, ahead: float) -> None:
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.02):
            leave(files, heartbeat=time.time() + ahead)

    leave(files, heartbeat=time.time() + ahead)
    other = threading.Thread(target=beat)
    other.start()
    with pytest.raises(RequestError, match="is at work"):
        Lease.acquire(files, **WATCHFUL)
    stop.set()
    other.join()
    with Lease.acquire(files, **QUICK) as lease:
        lease.check()


@pytest.mark.skipif(not this_machine(), reason="needs /proc")
def test_a_killed_holder_of_this_machine_is_replaced_at_once(
    files: Files, processes: list[subprocess.Popen[str]]
) -> None:
    holder = start(processes, files, "time.sleep(60)", "5", "60")
    assert said(holder).startswith("held")
    with pytest.raises(RequestError, match=rf"pid {holder.pid} "):
        Lease.acquire(files)
    os.kill(holder.pid, signal.SIGKILL)
    while process_start(holder.pid) is not None:  # a zombie from here on, as nobody waited for it
        time.sleep(0.005)
    begin = time.monotonic()
    with Lease.acquire(files) as lease:
        lease.check()
    assert time.monotonic() - begin < 5, "not after a minute of silence"


@pytest.mark.skipif(not this_machine(), reason="needs /proc")
def test_a_reused_pid_does_not_keep_a_lease_alive(files: Files) -> None:
    leave(files, machine=this_machine(), pid=os.getpid(), started=1)
    with Lease.acquire(files) as lease:
        lease.check()


def test_a_pid_of_another_namespace_says_nothing(files: Files) -> None:
    leave(files, machine="", pid=2**22 - 1)
    with pytest.raises(RequestError, match="is at work"):
        Lease.acquire(files, **QUICK)


@pytest.mark.parametrize("before", ["nothing", "silent", "released"])
def test_of_takers_at_the_same_moment_exactly_one_wins(
    files: Files, processes: list[subprocess.Popen[str]], before: str
) -> None:
    if before != "nothing":
        leave(files, heartbeat=time.time() - 100, released=before == "released")
    script = HOLD.replace("try:", 'print("ready", flush=True); sys.stdin.readline()\ntry:', 1) + "time.sleep(60)"
    takers = []
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", script, files.url, "0.05", "5"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        takers.append(process)
    assert {said(taker) for taker in takers} == {"ready"}
    for taker in takers:
        assert taker.stdin is not None
        taker.stdin.write("go\n")
        taker.stdin.flush()
    answers = [said(taker) for taker in takers]
    won = [answer for answer in answers if answer.startswith("held")]
    assert len(won) == 1, answers
    assert all(answer.startswith("refused run.path") for answer in answers if answer not in won)
    holder = read_holder(files)
    assert holder is not None
    assert holder.life == won[0].split()[1]


def test_a_frozen_holder_that_was_replaced_finds_out_when_it_thaws(
    files: Files, processes: list[subprocess.Popen[str]]
) -> None:
    frozen = start(
        processes,
        files,
        """
        sys.stdin.readline()
        try:
            lease.check()
            print("still mine", flush=True)
        except HarvestError as error:
            print(type(error).__name__, error, flush=True)
        lease.release()
        """,
    )
    assert said(frozen).startswith("held")
    os.kill(frozen.pid, signal.SIGSTOP)
    time.sleep(0.7)
    with Lease.acquire(files, interval=0.05, silent=0.5) as lease:
        assert frozen.stdin is not None
        frozen.stdin.write("check\n")
        frozen.stdin.flush()
        os.kill(frozen.pid, signal.SIGCONT)
        assert said(frozen).startswith("LostLeaseError run ")
        assert frozen.wait(10) == 0
        lease.check()
        holder = read_holder(files)
        assert holder is not None
        assert holder.life == lease.life, "the loser's release touched nothing"


@pytest.mark.parametrize("how", ["removed", "replaced", "scribbled"])
@pytest.mark.parametrize("where", ["local", "memory"])
def test_a_lost_lease_is_lost_for_good(tmp_path: Path, how: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMOTE_SECONDS", 0.0)
    files = open_files(str(tmp_path) if where == "local" else f"memory:/{tmp_path}")
    lease = Lease.acquire(files, interval=60, silent=600)
    lease.check()
    own = files.read("coordinator.json")
    if how == "removed":
        files.delete("coordinator.json")
    elif how == "replaced":
        leave(files)
    else:
        files.replace("coordinator.json", b"hello")
    with pytest.raises(LostLeaseError, match=r"removed|taken over by pid 4711 on elsewhere|overwritten"):
        lease.check()
    files.replace("coordinator.json", own)
    with pytest.raises(LostLeaseError):
        lease.check()
    lease.release()
    assert files.read("coordinator.json") == own


def test_a_lease_that_is_no_longer_fresh_is_renewed_by_the_check(files: Files) -> None:
    lease = Lease.acquire(files, interval=60, silent=0.2)
    before = files.read("coordinator.json")
    lease.check()
    assert files.read("coordinator.json") == before
    time.sleep(0.1)
    lease.check()
    assert files.read("coordinator.json") != before
    lease.release()
    with pytest.raises(LostLeaseError, match="released"):
        lease.check()


def test_an_interrupt_between_a_renewal_and_the_note_of_it_costs_no_lease(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease.acquire(files, interval=60.0, silent=60.0)
    swap = files.swap

    def interrupted(*arguments: Any) -> bool:
        assert swap(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files, "swap", interrupted)
        patch.setattr(module, "_now", lambda now=module._now: now() + 30)  # no longer fresh
        with pytest.raises(KeyboardInterrupt):
            lease.check()
    lease.check()
    lease.release()
    holder = read_holder(files)
    assert holder is not None
    assert holder.released


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), RequestError("credentials have expired")])
def test_a_store_that_is_away_for_a_while_costs_no_lease(
    files: Files, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    away = threading.Event()
    swap = files.swap

    def sometimes(path: str, old: bytes, new: bytes) -> bool:
        if away.is_set():
            raise error
        return swap(path, old, new)

    monkeypatch.setattr(files, "swap", sometimes)
    with Lease.acquire(files, interval=0.02, silent=60) as lease:
        away.set()
        time.sleep(0.1)
        away.clear()
        before, until = read_holder(files), time.monotonic() + 20
        while read_holder(files) == before and time.monotonic() < until:
            time.sleep(0.02)
        assert read_holder(files) != before, "it beats again"
        lease.check()
        holder = read_holder(files)
        assert holder is not None
        assert time.time() - holder.heartbeat < 5


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": 1}', b"\xff"])
def test_a_foreign_coordinator_file_is_named_and_left_alone(files: Files, data: bytes) -> None:
    files.replace("coordinator.json", data)
    with pytest.raises((DamageError, RequestError), match=r"coordinator\.json") as caught:
        Lease.acquire(files, **QUICK)
    assert "\n" not in str(caught.value)
    assert files.read("coordinator.json") == data


def test_a_lease_of_a_later_format_is_refused(files: Files) -> None:
    files.replace("coordinator.json", b'{"format": 2}')
    with pytest.raises(RequestError, match="format 2"):
        Lease.acquire(files, **QUICK)
