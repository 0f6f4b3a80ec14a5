"""A peer that is measured: a process of its own environment, which works once whenever it is told to.

`jobs/peers/` has what runs there; `make bench-peers` makes the environments.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import NotHereError

ENVIRONMENTS = Path(__file__).parents[1] / ".peers"
SCRIPTS = Path(__file__).parent / "peers"


def python(environment: str) -> str:
    """The interpreter of a peer's environment. Raises NotHereError."""
    path = ENVIRONMENTS / environment / "bin/python" if environment else Path(sys.executable)
    if not path.exists():
        raise NotHereError(f"no environment .peers/{environment}: `make .peers/{environment}/installed`")
    return str(path)


class Peer:
    """A process that works when it is told to."""

    def __init__(self, python: str, script: str, arguments: Sequence[str], totals: Sequence[float] = ()) -> None:
        """`totals`: what the absolute values of each site's rows must sum to."""
        self._script, self._totals = script, totals
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with it; a pipe that nobody reads would fill
        self._process = subprocess.Popen(
            [python, str(SCRIPTS / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "WANDB_MODE": "disabled", "PYTHONWARNINGS": "ignore"},
        )

    def _said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        self._process.wait()
        self._errors.seek(0)
        error = (self._errors.read().strip().splitlines() or ["no word"])[-1]
        raise RuntimeError(f"{self._script} ended: {error}")

    def seconds(self) -> float:
        """Of its work, done once more. Raises RuntimeError where it ended, or captured something else."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("again\n")
            self._process.stdin.flush()
        answer = self._said()
        for ours, theirs in zip(self._totals, answer["totals"], strict=True):
            if abs(theirs - ours) > 1e-3 * ours:
                raise RuntimeError(f"it captured something else: absolute values sum to {theirs}, not {ours}")
        return float(answer["seconds"])

    def __enter__(self) -> Peer:
        self._said()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()
