"""A Ray cluster of one node for a test: `ray start --head` as a process of its own, ended by its own pid."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
START_SECONDS = 60
PORTS = (
    "port",
    "dashboard-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
    "ray-client-server-port",
    "node-manager-port",
    "object-manager-port",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A cluster that answers."""

    address: str
    """`127.0.0.1:PORT`, of the cluster itself."""
    dashboard: str
    """`http://127.0.0.1:PORT`."""
    metrics: str
    """Where Prometheus would scrape its node."""
    token: str
    session: Path
    """Where it keeps its files."""

    @property
    def client(self) -> dict[str, str]:
        """The environment of a process that may talk to it; nothing in it says where it is."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        return {
            **environment,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_metrics_report_interval_ms": "1000",  # an agent forgets gauges after two intervals of its own
            "RAY_USAGE_STATS_ENABLED": "0",
        }


@contextlib.contextmanager
def ray_head(cpus: int = 2) -> Iterator[Head]:
    """Starts it with a token of its own, on free ports of loopback, and ends it."""
    ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
    with tempfile.TemporaryDirectory(prefix="rh", dir="/tmp", ignore_cleanup_errors=True) as folder:
        head = Head(
            address=f"127.0.0.1:{ports['port']}",
            dashboard=f"http://127.0.0.1:{ports['dashboard-port']}",
            metrics=f"http://127.0.0.1:{ports['metrics-export-port']}/metrics",
            token=secrets.token_hex(32),
            session=Path(folder),
        )
        environment = {
            **head.client,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parent.parent),
            "RAY_TMPDIR": folder,  # short: the paths of unix sockets are
        }
        command = [str(BIN / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--num-cpus={cpus}"]
        command += ["--num-gpus=0", "--object-store-memory=100000000", "--min-worker-port=0", "--max-worker-port=0"]
        command += ["--dashboard-host=127.0.0.1", *(f"--{name}={port}" for name, port in ports.items())]
        with open(Path(folder) / "head.log", "wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_until_it_answers(head, process)
            yield head
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_until_it_answers(head: Head, process: subprocess.Popen[bytes]) -> None:
    request = urllib.request.Request(f"{head.dashboard}/api/jobs/", headers={"Authorization": f"Bearer {head.token}"})
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(request, timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError(f"ray start did not answer:\n{(head.session / 'head.log').read_text()[-3000:]}")


def _free_ports(count: int) -> list[int]:
    """Below the range from which the system takes ports by itself, above the one from which Ray's workers do."""
    found: list[int] = []
    with contextlib.ExitStack() as open_until_all_are_found:
        while len(found) < count:
            port = 20_000 + secrets.randbelow(12_000)
            listener = open_until_all_are_found.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                listener.bind(("127.0.0.1", port))
                found.append(port)
    return found
