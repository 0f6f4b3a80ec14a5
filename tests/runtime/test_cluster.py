"""Workers on a real Ray: actors that are killed, nodes that die, two coordinators, and the bits of one quiet worker."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from covariancecase import FILE, assert_of_stored_rows
from plainrun import PlainRun, attempts_without_record, first_difference, read_plain

import harvest
from harvest.config import load_job
from harvest.errors import RequestError, WorkError
from harvest.runtime import coordinate
from harvest.runtime.progress import Silent
from harvest.runtime.status import status_of

ray = pytest.importorskip("ray")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "jobs"))

import chaos  # noqa: E402

QUICK = {
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
    "health_check_timeout_ms": 1000,
    "health_check_initial_delay_ms": 500,
}
"""So that a dead node is noticed in seconds."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster of three nodes in this machine, with this process as its driver."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_AUTH_MODE"] = "disabled"  # loopback only
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ[name] = "testing"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "include_dashboard": False, "_system_config": QUICK},
    )
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, namespace="harvest", log_to_driver=False, logging_level="error")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class Watcher(Silent):
    """Does something at the n-th event of a kind, and remembers who joined and who was lost."""

    def __init__(self, kind: str = "", at: int = 1, then: Callable[[Watcher], None] = lambda watcher: None) -> None:
        self.kind, self.at, self.then = kind, at, then
        self.seen = 0
        self.pids: dict[str, int] = {}
        self.lost: list[str] = []
        self.retries: list[str] = []

    def _event(self, kind: str) -> None:
        self.seen += kind == self.kind
        if kind == self.kind and self.seen == self.at:
            self.then(self)

    def joined(self, worker: str, where: str, workers: int) -> None:
        found = re.fullmatch(r".*, pid (\d+)", where)
        assert found is not None
        self.pids[worker] = int(found[1])
        self._event("joined")

    def left(self, worker: str, why: str, workers: int) -> None:
        self.lost.append(why)

    def advanced(self, advance: Any) -> None:
        self._event("advanced")

    def committed(self, record: Any) -> None:
        self._event("committed")

    def retried(self, shard: str, error: str) -> None:
        self.retries.append(error)


def run(job: Path, path: Path, observer: Silent | None = None, *overrides: str) -> PlainRun:
    settings = [f"run.path={path}", "run.executor=ray", "run.workers=2", *overrides]
    coordinate.run(load_job(job, settings), observer=observer)
    return read_plain(path)


def kill(name: str) -> Callable[[Watcher], None]:
    return lambda watcher: os.kill(watcher.pids[name], signal.SIGKILL)


def test_two_workers_give_the_bits_of_one_and_nothing_passes_through_the_object_store(
    nodes: Any, job: Path, clean: PlainRun, tmp_path: Path
) -> None:
    """E62: what never enters the object store cannot fill it."""
    used: list[float] = []

    def look(watcher: Watcher) -> None:
        from ray._private.internal_api import memory_summary

        used.extend(float(mib) for mib in re.findall(r"Plasma memory usage (\d+) MiB", memory_summary(stats_only=True)))

    found = run(job, tmp_path / "run", Watcher("committed", 20, look))
    assert first_difference(clean, found) is None
    assert attempts_without_record(tmp_path / "run") == []
    assert used
    assert max(used) == 0


@pytest.mark.parametrize(("kind", "at"), [("advanced", 1), ("committed", 17)])
def test_a_killed_worker_loses_no_row_and_comes_back(
    kind: str, at: int, nodes: Any, job: Path, clean: PlainRun, tmp_path: Path
) -> None:
    watcher = Watcher(kind, at, lambda watcher: os.kill(next(iter(watcher.pids.values())), signal.SIGKILL))
    found = run(job, tmp_path / "run", watcher)
    assert len(watcher.lost) == 1
    assert first_difference(clean, found) is None
    assert attempts_without_record(tmp_path / "run") == []
    summary = json.loads((tmp_path / "run" / "complete.json").read_text())
    assert summary["rows"] == len(found.keys)  # E64: what a worker had counted for itself went with it
    assert summary["documents"] == len(found.documents)
    assert status_of(str(tmp_path / "run"))["rows"] == len(found.keys)


def test_the_covariance_of_killed_workers_and_of_a_resumed_run_is_that_of_the_rows_with_the_bits_of_one_worker(
    nodes: Any, job: Path, tmp_path: Path
) -> None:
    """The first life of the second run loses a worker, and then its coordinator."""

    class EnoughError(Exception):
        pass

    class Unlucky(Watcher):
        def left(self, worker: str, why: str, workers: int) -> None:
            super().left(worker, why, workers)
            raise EnoughError

    def harm(watcher: Watcher) -> None:
        os.kill(next(iter(watcher.pids.values())), signal.SIGKILL)

    asked = ("statistics.covariance=true", "store.shard_documents=16")
    run(job, tmp_path / "one", None, *asked, "run.workers=1", "run.executor=inline")
    assert_of_stored_rows(tmp_path / "one")
    crew, unlucky = Watcher("advanced", 5, harm), Unlucky("committed", 2, harm)
    run(job, tmp_path / "crew", crew, *asked)
    with pytest.raises(EnoughError):
        run(job, tmp_path / "resumed", unlucky, *asked)
    run(job, tmp_path / "resumed", None, *asked, "run.workers=3")
    assert [len(watcher.lost) for watcher in (crew, unlucky)] == [1, 1]
    expected = (tmp_path / "one" / FILE).read_bytes()
    assert (tmp_path / "crew" / FILE).read_bytes() == (tmp_path / "resumed" / FILE).read_bytes() == expected
    assert_of_stored_rows(tmp_path / "resumed")


def test_a_stopped_worker_is_replaced(
    nodes: Any, job: Path, clean: PlainRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harvest.runtime.lead.SILENT_SECONDS", 8.0)
    monkeypatch.setattr("harvest.runtime.schedule.LATE_SECONDS", 1000.0)
    watcher = Watcher("committed", 3, lambda watcher: os.kill(next(iter(watcher.pids.values())), signal.SIGSTOP))
    found = run(job, tmp_path / "run", watcher, "run.workers=1")
    assert "has not answered" in watcher.lost[0]
    assert first_difference(clean, found) is None


def test_a_whole_node_dies_and_no_shard_is_blamed(nodes: Any, job: Path, clean: PlainRun, tmp_path: Path) -> None:
    def remove(watcher: Watcher) -> None:
        nodes.remove_node(nodes.add_node(num_cpus=0), allow_graceful=False)  # an empty one: nothing happens
        nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)

    watcher = Watcher("committed", 3, remove)
    found = run(job, tmp_path / "run", watcher, "run.workers=3", "run.attempts=1")
    assert first_difference(clean, found) is None
    nodes.add_node(num_cpus=2)


def test_a_node_with_a_preemption_notice_is_left_in_order(
    nodes: Any, job: Path, clean: PlainRun, tmp_path: Path
) -> None:
    """Its worker gets nothing new, and when the node has gone no shard is blamed."""
    leaving = nodes.add_node(num_cpus=1, resources={"spot": 1})
    said: list[str] = []

    def announce(watcher: Watcher) -> None:
        reason = "DRAIN_NODE_REASON_PREEMPTION"
        words = ["drain-node", f"--address={nodes.address}", f"--node-id={leaving.node_id}", f"--reason={reason}"]
        words += ["--reason-message=spot", "--deadline-remaining-seconds=3"]
        done = subprocess.run(
            [Path(sys.executable).parent / "ray", *words], capture_output=True, text=True, check=False
        )
        said.append(done.stdout + done.stderr)
        assert done.returncode == 0, said

    found = run(job, tmp_path / "run", Watcher("committed", 3, announce), "run.workers=3", "run.attempts=1")
    assert said
    assert first_difference(clean, found) is None
    nodes.remove_node(leaving)


def test_workers_go_where_the_resources_that_they_take_are(
    nodes: Any, job: Path, clean: PlainRun, tmp_path: Path
) -> None:
    """Two GPUs for each replica, and a resource that only one node has; both are set aside, and seen by the actor."""
    special = nodes.add_node(num_cpus=2, num_gpus=4, resources={"fast_disk": 2})
    free: list[dict[str, float]] = []

    def look(watcher: Watcher) -> None:
        from ray._private.state import available_resources_per_node

        free.append(available_resources_per_node()[special.node_id])

    settings = ["run.gpus_per_worker=2", "run.resources={fast_disk = 1}", "model.device=cpu"]
    found = run(job, tmp_path / "run", Watcher("committed", 3, look), *settings)
    assert [(of.get("GPU", 0), of.get("fast_disk", 0), of.get("CPU", 0)) for of in free] == [(0, 0, 0)]
    assert first_difference(clean, found) is None
    nodes.remove_node(special)


def test_actors_write_to_object_storage_with_credentials_of_the_environment_alone(
    nodes: Any, job: Path, clean: PlainRun, tmp_path: Path, bucket: Any
) -> None:
    """One of them is killed on the way."""
    watcher = Watcher("advanced", 3, lambda watcher: os.kill(next(iter(watcher.pids.values())), signal.SIGKILL))
    coordinate.run(load_job(job, [*bucket.overrides, "run.executor=ray", "run.workers=2"]), observer=watcher)
    assert len(watcher.lost) == 1
    assert first_difference(clean, bucket.fetch(tmp_path)) is None
    assert attempts_without_record(tmp_path) == []


def test_resume_with_one_two_and_three_workers_in_turn(nodes: Any, job: Path, clean: PlainRun, tmp_path: Path) -> None:
    class EnoughError(Exception):
        pass

    def stop(watcher: Watcher) -> None:
        raise EnoughError

    for workers in (1, 2, 3):
        with pytest.raises(EnoughError):
            run(job, tmp_path / "run", Watcher("committed", 5, stop), f"run.workers={workers}")
    with pytest.raises(EnoughError):
        run(job, tmp_path / "run", Watcher("committed", 5, stop), "run.workers=1", "run.executor=inline")
    found = run(job, tmp_path / "run")
    assert first_difference(clean, found) is None
    assert attempts_without_record(tmp_path / "run") == []


def test_two_runs_share_a_cluster(nodes: Any, job: Path, clean: PlainRun, tmp_path: Path) -> None:
    """E63: names carry the coordinator's life, so a second run neither clashes with the first nor talks to it."""
    inner: list[PlainRun] = []

    def another(watcher: Watcher) -> None:
        inner.append(run(job, tmp_path / "a" / "run", None, "run.workers=1"))

    found = run(job, tmp_path / "b" / "run", Watcher("committed", 2, another), "run.workers=1")
    assert first_difference(clean, found) is None
    assert first_difference(clean, inner[0]) is None


def test_a_poison_document_costs_its_shard_alone_and_is_named(nodes: Any, job: Path, tmp_path: Path) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(f'{{"text": "abc {i}"}}\n' for i in range(24)) + '{"text": 5}\n')
    with pytest.raises(WorkError, match="f00000-s000003"):
        run(job, tmp_path / "run", None, f"data.path={data}", "data.on_bad=fail")
    assert len(read_plain(tmp_path / "run").records) <= 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.gpus_per_worker=1", r"run.gpus_per_worker = 1: no node of the cluster has that many; the largest has 0"),
        ("run.cpus_per_worker=64", r"run.cpus_per_worker = 64: no node of the cluster has that many; the largest has"),
        ("run.resources={spot=1}", r"run.resources.spot = 1: no node of the cluster has that many; the largest has 0"),
        ("run.resources={GPU=1}", r"run\.resources\.GPU: decided by run\.gpus_per_worker; leave it out"),
        ("run.path='memory://run'", r"memory://run cannot keep two writers apart"),
        ("run.executor=inline", r"run.workers = 2: run.executor = 'inline' is one worker"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    override: str, message: str, nodes: Any, job: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=message):
        run(job, tmp_path / "run", None, override)
    assert not (tmp_path / "run").exists()


def test_objects_of_the_caller_stay_inline(tmp_path: Path) -> None:
    from tiny import byte_tokenizer, tiny_llama

    with pytest.raises(RequestError, match="handed over as objects stay in this process"):
        harvest.run(
            {"run": {"path": str(tmp_path / "run"), "workers": 2}},
            model=tiny_llama(vocab=300),
            tokenizer=byte_tokenizer(),
            data=["a"],
        )


def test_an_address_that_does_not_answer_is_a_wrong_request(job: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "harvest", "run", str(job), "--set", f"run.path='{tmp_path}/run'"]
    found = subprocess.run(
        [*command, "--set", "run.address='127.0.0.1:1'"], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 2
    assert "run.address = '127.0.0.1:1'" in found.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_a_ray_that_does_not_start_is_one_line_and_nothing_is_written(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is too busy to start one within 30 s raises a bare exception."""

    def start(**_: Any) -> None:
        raise Exception("The current node timed out\n during startup.")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", start)
    with pytest.raises(WorkError, match=r"^Ray does not start on this machine: The current node timed out during"):
        run(job, tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()


def test_of_two_coordinators_started_at_once_one_works_and_the_other_is_told_so(
    job: Path, clean: PlainRun, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "harvest", "run", str(job), "--set", f"run.path='{tmp_path}/run'"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    both = [
        subprocess.Popen(
            [*command, "--set", f"run.workers={workers}"], stderr=subprocess.PIPE, text=True, env=environment
        )
        for workers in (2, 1)
    ]
    errors = [process.communicate(timeout=240)[1] for process in both]
    assert 0 in [process.returncode for process in both], errors
    for process, error in zip(both, errors):
        assert process.returncode == 0 or (process.returncode == 2 and "is at work on this run" in error), error
    assert first_difference(clean, read_plain(tmp_path / "run")) is None


def test_a_killed_coordinator_takes_its_ray_along_and_the_same_command_resumes(
    job: Path, clean: PlainRun, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "harvest",
        "run",
        str(job),
        "--set",
        f"run.path='{path}'",
        "--set",
        "run.workers=2",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    first = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while len(list(path.glob("ledger/f*.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    first.kill()
    first.wait()
    again = subprocess.run(command, env=environment, timeout=240, check=False)
    assert again.returncode == 0
    assert first_difference(clean, read_plain(path)) is None
    assert attempts_without_record(path) == []
    workers = [process for process in _processes_of(first.pid) if "HarvestWorker" in process]
    assert workers == []  # Ray's own agents may take minutes to notice


def test_a_ray_whose_only_node_dies_ends_the_run_and_the_same_command_resumes(
    tmp_path: Path,
) -> None:
    """The command outlives its raylet, and would wait for ever for workers that no node can have.

    The worker stands still: one that sees its raylet's death late might finish the run first.
    """
    path, job = tmp_path / "run", chaos.tiny_job(tmp_path, documents=240)
    settings = ["--set", f"run.path='{path}'", "--set", "run.executor=ray"]
    command = [sys.executable, "-m", "harvest", "run", str(job), *settings]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while not (workers := chaos.workers_of(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    (raylet,) = chaos.descendants(process.pid, "raylet/raylet")
    os.kill(raylet, signal.SIGKILL)
    said = process.communicate(timeout=240)[1]
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    assert process.returncode == 1, said
    assert said.splitlines()[-1].startswith("harvest: Ray's last node has died"), said
    assert '"released": true' in (path / "coordinator.json").read_text()
    assert subprocess.run([*command, "--set", "run.executor=inline"], env=environment, check=False).returncode == 0
    assert [row["document"] for row in read_plain(path).documents] == list(range(240))
    assert attempts_without_record(path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_ends_with_130_and_gives_the_run_back(number: int, job: Path, tmp_path: Path) -> None:
    """Also a second and a third signal, as from someone who is impatient."""
    path = tmp_path / "run"
    settings = ["--set", f"run.path='{path}'", "--set", "run.executor=ray"]
    command = [sys.executable, "-m", "harvest", "run", str(job), *settings]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(path.glob("ledger/f*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    for _ in range(3 if number == signal.SIGINT else 1):
        process.send_signal(number)
        time.sleep(0.3)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 130, said
    assert said.splitlines()[-1].startswith("harvest: interrupted; the same command resumes: harvest run ")
    assert "harvest: stopping: committed shards are kept" in said
    if number == signal.SIGTERM:
        assert '"released": true' in (path / "coordinator.json").read_text()


def _processes_of(session: int) -> list[str]:
    """Command lines of living processes in the session of one that was killed."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append((stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found
