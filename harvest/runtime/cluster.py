"""Workers on a Ray cluster, or on one that is started on this machine: the only file that knows Ray.

Each worker is a named actor with one replica of the model. Ray restarts the process of a worker that dies; which shard
goes where is decided by the coordinator alone, which is the process that runs the command: when it dies its actors die
with it, and the same command resumes from the files. Rows never pass through Ray.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray._private.state import state as node_state
from ray.exceptions import ActorDiedError, RayActorError, RayError
from ray.util import metrics

from harvest.config import Job
from harvest.errors import RequestError, WorkError
from harvest.plan import Plan
from harvest.runtime import logs
from harvest.runtime.intake import Intake
from harvest.runtime.lead import Gone, Lead
from harvest.runtime.metrics import METRICS, SECONDS, Counted
from harvest.runtime.progress import Observer
from harvest.runtime.schedule import Schedule
from harvest.runtime.worker import Hire, Order, Reply, Worker, hire
from harvest.store.files import Files
from harvest.store.lease import Lease
from harvest.store.ledger import Ledger

NAMESPACE = "harvest"
OBJECT_STORE_BYTES = 100 << 20
"""Of a cluster started here; only descriptions and records travel, and Ray wants at least 75 MiB."""
CONNECT_SECONDS = 10.0
"""For a first answer from a cluster's address."""


@contextlib.contextmanager
def connected(job: Job, address: str | None) -> Iterator[None]:
    """Ray for as long as the block runs: that at `address`, else one of its own. Ends what it started, nothing else.

    Raises RequestError where the cluster does not answer, WorkError where Ray does not start here.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ours = not ray.is_initialized()
    if ours:
        _connect(job, address)
    try:
        yield
    finally:
        if ours:
            ray.shutdown()


def device(job: Job) -> str:
    """What the cluster's workers compute on. Raises RequestError for CUDA without a GPU in the cluster."""
    gpus = ray.cluster_resources().get("GPU", 0)
    if job.model.device == "auto":
        return "cuda" if gpus else "cpu"
    if job.model.device.startswith("cuda") and not gpus:
        raise RequestError(f"model.device = {job.model.device!r}: the cluster has no GPU; allowed are 'auto' and 'cpu'")
    return job.model.device


def crew_size(plan: Plan) -> int:
    """Workers that the job asks for; `auto`: one for each replica's share of the GPUs, or one.

    Raises RequestError where no node of the cluster could ever hold a worker.
    """
    _refuse_what_cannot_fit(plan)
    asked = plan.job.run.workers
    return asked if asked != "auto" else max(1, _room(plan))


def _room(plan: Plan) -> int:
    """Workers that all GPUs of the cluster are enough for; 0 for workers that take none."""
    each = gpus_per_worker(plan)
    return int(ray.cluster_resources().get("GPU", 0) // each) if each else 0


def run_cluster(
    plan: Plan,
    workers: int,
    *,
    files: Files,
    lease: Lease,
    schedule: Schedule,
    observer: Observer,
    begin: float,
    reserve_memory: bool,
    together: bool = False,
) -> None:
    """Runs the schedule to its end with so many workers. `begin` is when the command began (monotonic).

    `reserve_memory`: the cluster is shared with others, and counts what the plan says a worker takes. `together`: the
    first shard waits until all workers are ready. Failures are left in `schedule.failures`; raises WorkError when no
    worker is left, LostLeaseError after a takeover.
    """
    if schedule.finished:
        return
    meter = RayMeter(run=_run_name(plan), worker="coordinator")
    counted = Counted(observer, meter)
    crew = RayCrew(plan, workers, lease.life, reserve_memory=reserve_memory)
    try:
        Lead(
            crew,
            schedule=schedule,
            intake=Intake(Ledger(files), lease, schedule, counted),
            lease=lease,
            observer=counted,
            meter=meter,
            begin=begin,
            together=together,
        ).run()
    finally:
        crew.close()


class RayCrew:
    """One actor per worker, each with at most one call under way."""

    def __init__(self, plan: Plan, workers: int, life: str, *, reserve_memory: bool) -> None:
        self.workers: Sequence[str] = [f"worker-{number}" for number in range(workers)]
        self.needs = _in_words(_needs(plan))
        self._plan, self._life, self._reserve_memory = plan, life, reserve_memory
        self._calls: dict[Any, str] = {}
        self._births: Counter[str] = Counter()
        self._nodes: dict[str, str] = {}
        self._actors = {worker: self._create(worker) for worker in self.workers}

    def _create(self, worker: str) -> Any:
        plan = self._plan
        self._births[worker] += 1
        again = f" ({self._births[worker]})" if self._births[worker] > 1 else ""  # the killed one's name is free later
        threads = str(plan.resolved.threads)
        return _Actor.options(  # type: ignore[attr-defined]
            name=f"harvest {_run_name(plan)} {self._life} {worker}{again}",
            namespace=NAMESPACE,
            num_cpus=cpus_per_worker(plan),
            num_gpus=gpus_per_worker(plan),
            resources=dict(plan.job.run.resources),
            memory=plan.estimate.memory_bytes if self._reserve_memory else None,
            scheduling_strategy="SPREAD",
            max_restarts=-1,
            max_task_retries=0,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", "TQDM_DISABLE": "1"}},
        ).remote(hire(plan, worker, self._life), _run_name(plan))

    def send(self, worker: str, order: Order) -> None:
        """Opens a conversation."""
        self._calls[self._actors[worker].exchange.remote(order)] = worker

    def wait(self, seconds: float) -> list[tuple[str, Reply | Gone]]:
        """All replies that are there, after a first one or `seconds`."""
        calls = list(self._calls)
        first, _ = ray.wait(calls, num_returns=1, timeout=seconds)
        if not first:
            return []
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        return [(worker, self._news(worker, call)) for call in done if (worker := self._calls.pop(call))]

    def _news(self, worker: str, call: Any) -> Reply | Gone:
        news = _reply(call)
        if isinstance(news, Reply):
            self._nodes[worker] = news.node
        elif news.blame and _is_gone(self._nodes.get(worker, "")):
            return replace(news, reason="its node died", blame=False)
        return news

    def restart(self, worker: str) -> None:
        """Kills the actor and creates it anew: what Ray thinks of its state does not matter."""
        self.dismiss(worker)
        self._actors[worker] = self._create(worker)

    def dismiss(self, worker: str) -> None:
        """Kills the actor, and does not listen to it any more."""
        self._calls = {call: other for call, other in self._calls.items() if other != worker}
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self._actors.pop(worker), no_restart=True)

    def newcomers(self) -> Sequence[str]:
        """More workers where nodes with more GPUs have joined and the job leaves the number open; they stay named.

        Raises WorkError where no node is left, not even one to wait on: GCS answers, but nothing will ever run.
        """
        if not any(node["Alive"] for node in ray.nodes()):
            raise WorkError("Ray's last node has died, and every worker with it; the same command resumes")
        room = _room(self._plan) if self._plan.job.run.workers == "auto" else 0
        new = [f"worker-{number}" for number in range(len(self.workers), room)]
        self.workers = [*self.workers, *new]
        self._actors.update({worker: self._create(worker) for worker in new})
        return new

    def leaving(self) -> frozenset[str]:
        """Nodes that Ray drains: told of a preemption, scaled down, or by `ray drain-node`."""
        return frozenset(node_state.get_draining_nodes())

    def close(self) -> None:
        """Ends every worker."""
        for worker in list(self._actors):
            self.dismiss(worker)


class HarvestWorker(Worker):
    """The actor; its methods' names are what the dashboard shows."""

    def __init__(self, hire: Hire, run: str) -> None:
        logs.always(run=run)
        node = ray.get_runtime_context().get_node_id()
        super().__init__(hire, RayMeter(run=run, worker=hire.name), node)


_Actor = ray.remote(HarvestWorker)


class RayMeter:
    """Our metrics as Ray's, created at their first use."""

    def __init__(self, run: str, worker: str) -> None:
        self._labels = {"run": run, "worker": worker}
        self._metrics: dict[str, Any] = {}

    def record(self, name: str, value: float, **labels: str) -> None:
        """Adds to a counter, sets a gauge, or observes into a histogram."""
        metric = self._metrics.get(name) or self._metrics.setdefault(name, self._make(name))
        labels = {**self._labels, **labels}
        if isinstance(metric, metrics.Counter):
            if value > 0:
                metric.inc(value, tags=labels)
        elif isinstance(metric, metrics.Gauge):
            metric.set(value, tags=labels)
        else:
            metric.observe(value, tags=labels)

    @staticmethod
    def _make(name: str) -> Any:
        metric = METRICS[name]
        keys = ("run", "worker", *metric.labels)
        if metric.kind == "histogram":
            return metrics.Histogram(name, description=metric.about, boundaries=list(SECONDS), tag_keys=keys)
        kind = metrics.Counter if metric.kind == "counter" else metrics.Gauge
        return kind(name, description=metric.about, tag_keys=keys)


# ---- what a worker takes, and who is there to give it -----------------------------------------------------------


def gpus_per_worker(plan: Plan) -> float:
    """One on CUDA, unless the job says otherwise."""
    asked = plan.job.run.gpus_per_worker
    return (1 if plan.resolved.device == "cuda" else 0) if asked == "auto" else asked


def cpus_per_worker(plan: Plan) -> float:
    """A share that Ray keeps for a worker; the number of its threads is `run.threads`."""
    asked = plan.job.run.cpus_per_worker
    return 1 if asked == "auto" else asked


def _connect(job: Job, address: str | None) -> None:
    run = job.run
    before = signal.getsignal(signal.SIGTERM)
    try:
        if address:
            _require_listener(address)
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
            return
        share = 1.0 if run.cpus_per_worker == "auto" else run.cpus_per_worker
        needed = math.ceil(share * (1 if run.workers == "auto" else run.workers))
        ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=max(os.cpu_count() or 1, needed),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            log_to_driver=False,
            logging_level="error",
        )
    except Exception as error:  # Ray raises whatever it likes, bare exceptions too: a machine too busy to start in 30 s
        reason = " ".join(str(error).split())[:300]
        if address:
            raise RequestError(f"run.address = {address!r}: Ray does not answer: {reason}") from error
        raise WorkError(f"Ray does not start on this machine: {reason}; the same command tries again") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray's own would end the process with status 1


def _require_listener(address: str) -> None:
    """Ray looks for a cluster for minutes; whether anyone listens there is known at once."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():  # else a name that Ray resolves itself, such as `auto`
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()


def _needs(plan: Plan) -> dict[str, float]:
    """What Ray sets aside for one worker."""
    needs = {"CPU": cpus_per_worker(plan), "GPU": gpus_per_worker(plan), **plan.job.run.resources}
    return {kind: amount for kind, amount in needs.items() if amount}


def _in_words(needs: dict[str, float]) -> str:
    plural = {"CPU": "CPUs", "GPU": "GPUs"}
    return " and ".join(f"{amount:g} {plural.get(kind, kind)}" for kind, amount in needs.items()) or "nothing"


def _refuse_what_cannot_fit(plan: Plan) -> None:
    """A worker that fits on no node would be waited for until the end of days."""
    needs = _needs(plan)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(kind, 0) >= amount for kind, amount in needs.items()) for node in nodes):
        return
    settings = {"CPU": "cpus_per_worker", "GPU": "gpus_per_worker"}
    for kind, amount in needs.items():
        most = max((node.get(kind, 0) for node in nodes), default=0)
        if amount > most:
            setting = settings.get(kind, f"resources.{kind}")
            raise RequestError(
                f"run.{setting} = {amount:g}: no node of the cluster has that many; the largest has {most:g}"
            )
    raise RequestError(f"run: no single node of the cluster has {_in_words(needs)}")


def _run_name(plan: Plan) -> str:
    return Path(plan.job.run.path.rstrip("/")).name or "run"


def _reply(call: Any) -> Reply | Gone:
    try:
        reply: Reply = ray.get(call)
        return reply
    except RayActorError as error:
        node = "node" in str(error).lower() and "died" in str(error).lower()
        birth = f", at its birth: {_last_line(error)}" if "creation task" in str(error) else ""
        return Gone(
            reason=f"its {'node' if node else 'process'} died{birth}",
            blame=not node,
            final=isinstance(error, ActorDiedError),
        )
    except RayError as error:
        raise WorkError(f"Ray: {_last_line(error)}") from error


def _is_gone(node: str) -> bool:
    """Whether a node is dead. Ray itself knows after many seconds only, so its daemon is knocked at."""
    found = next((one for one in ray.nodes() if one["NodeID"] == node), None)
    if found is None or not found["Alive"]:
        return found is not None
    try:
        socket.create_connection((found["NodeManagerAddress"], found["NodeManagerPort"]), timeout=1.0).close()
    except OSError:
        return True
    return False


def _last_line(error: RayError) -> str:
    """What went wrong, without the stack that led there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
