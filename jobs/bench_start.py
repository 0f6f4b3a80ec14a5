"""How long one waits: `harvest --help`, and a job with a wrong setting, in processes of their own.

python jobs/bench_start.py [--pairs 5] [--out jobs/results]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from measuring import Found, Row, main

JOB = Path(__file__).with_name("demo.toml")


def seconds(arguments: list[str], status: int) -> float:
    """Of one command. Raises RuntimeError where its exit status is another one."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "harvest", *arguments], capture_output=True, text=True)
    took = time.perf_counter() - began
    if done.returncode != status:
        raise RuntimeError(f"harvest {' '.join(arguments)}: exit status {done.returncode}, not {status}")
    return took


def measure(arguments: list[str], status: int, count: int) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        words = [word.format(run=f"{folder}/run") for word in arguments]
        seconds(words, status)
        return Found(figures=[seconds(words, status) for _ in range(count)])


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    wrong = ["run", str(JOB), "--set", "run.path={run}", "--set", "capture.layers=[99]"]
    for what, goal, arguments, status in (("harvest --help", 0.5, ["--help"], 0), ("a wrong setting", 3, wrong, 2)):
        run = partial(measure, arguments, status, asked.pairs)
        yield Row(what=what, goal=goal, at_most=True, unit="s", measure=run)


if __name__ == "__main__":
    main(__doc__, rows)
