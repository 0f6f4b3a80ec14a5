"""Peak memory of a whole run: a dataset against one 20 times as large, in processes of their own.

    python jobs/bench_memory.py [--pairs 3] [--times 20] [--out jobs/results]

The first block of SmolLM2-135M on movie reviews in shards of 16, moments included; the larger dataset holds the same
reviews over and over, so that no single one is longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from measuring import Found, Row, main
from work import MODEL, reviews

DOCUMENTS = 64
RUN = """
import json, resource, sys
import measuring
from harvest.runtime import coordinate
from harvest.runtime.progress import Silent
coordinate.run(json.loads(sys.argv[1]), observer=Silent())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak(folder: Path, times: int) -> float:
    """MiB of a run's process."""
    data, run = folder / "reviews.jsonl", folder / "run"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in reviews(DOCUMENTS))
    data.write_text(lines * times, encoding="utf-8")
    job = {
        "model": {"name": MODEL, "dtype": "float32"},
        "data": {"path": str(data)},
        "tokens": {"context": 256},
        "capture": {"layers": [0]},
        "store": {"shard_documents": 16},
        "run": {"path": str(run), "overwrite": True},
    }
    command = [sys.executable, "-c", RUN, json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [""])[-1])
    return int(done.stdout.split()[-1]) / 1024


def measure(times: int, pairs: int) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        found = [(peak(Path(folder), 1), peak(Path(folder), times)) for _ in range(pairs)]
    remark = " and ".join(f"{statistics.median(side):,.0f} MiB" for side in zip(*found))
    return Found(figures=[large / small for small, large in found], remark=remark)


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    times = 3 if asked.quick else asked.times
    run = partial(measure, times, asked.pairs)
    yield Row(what=f"peak memory, dataset {times} times as large / once", goal=1.05, at_most=True, measure=run)


def more(options: argparse.ArgumentParser) -> None:
    options.add_argument("--times", type=int, default=20)


if __name__ == "__main__":
    main(__doc__, rows, more)
