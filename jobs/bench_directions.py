"""What moments and a direction cost on top of the same run without, and what their merge over many shards takes.

    python jobs/bench_directions.py [--pairs 5] [--shards 10000] [--only float32] [--out jobs/results]

Cost: the common work (`jobs/work.py`), `residual` at all 30 layers stored, both runs in turn. The one keeps neither
moments nor directions, the other moments and a direction between two halves of the windows, paired, in the three closed
modes, with its examples. Every window is an example, so that a document is as short as it gets.

Merge: the sums of as many shards (30 names, 576 values, moments and one direction; every shard links the same file),
merged as at the end of a run: time, bytes read for each byte of sums, requests, and memory beside that of a tenth.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import measuring  # noqa: F401  # before torch: it says how threads wait
import torch
from measuring import Found, Row, in_turn, main
from work import Work, common

import harvest
from harvest.plan import Plan
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
GOALS = {"float32": 1.03, "bfloat16": 1.06}


# ---- cost ------------------------------------------------------------------------------------------------------------


def plan(work: Work, dtype: str, reduced: bool, folder: Path) -> Plan:
    windows = [{**window, "label": str(i % 2), "pid": i // 2} for i, window in enumerate(work.windows)]
    return work.plan(
        folder,
        rows=windows,
        model={"name": work.settings.name, "dtype": dtype},
        statistics={"moments": reduced},
        directions=[DIRECTION] if reduced else [],
    )


def cost(work: Work, dtype: str, pairs: int) -> Found:
    """Time with over time without, pair by pair."""
    work.model.to(getattr(torch, dtype))
    with tempfile.TemporaryDirectory() as name:
        sides = []
        for reduced in (False, True):
            folder = Path(name) / str(reduced)
            pipeline = work.pipeline(plan(work, dtype, reduced, folder), folder)
            sides.append(partial(work.harvest, pipeline, folder))
        return Found(figures=[reduced / bare for bare, reduced in in_turn(*sides, pairs)])


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


def merges(work: Work, shards: int) -> Found:
    """Peak memory of merging all shards over that of a tenth of them."""
    settings = {**DIRECTION, "modes": DIRECTION["modes"][:2], "holdout": 0, "examples": 1}
    del settings["pair"]
    windows = [{**window, "label": str(i % 2)} for i, window in enumerate(work.windows[:16])]
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "one"
        job = plan(work, "float32", True, source).job.model_dump(mode="json", exclude_unset=True)
        mine = {**job, "directions": [settings], "capture": {"store": False}, "run": {"path": str(source)}}
        harvest.run(mine, model=work.model, tokenizer=work.tokenizer, data=windows)
        peaks = []
        for count in (shards // 10, shards):
            folder = Path(name) / f"merge-{count}"
            size = many_shards(source, folder, count)
            command = [sys.executable, __file__, "--merge", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds, read, requests, peak = map(float, done.stdout.split())
            peaks.append(peak / 1024)
            shutil.rmtree(folder)
    remark = (
        f"{size * shards / 1e9:.2f} GB of sums in {seconds:.1f} s, {read / size / shards:.3f} bytes read for each, "
    )
    remark += f"{requests / shards:.1f} requests a shard, {peaks[1]:,.0f} MiB against {peaks[0]:,.0f}"
    return Found(figures=[peaks[1] / peaks[0]], remark=remark)


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    work, shards = common(asked), 200 if asked.quick else asked.shards
    for dtype, goal in GOALS.items():
        run = partial(cost, work, dtype, asked.pairs)
        what = f"moments and a direction, 30 layers, {dtype} / the same run without"
        yield Row(what=what, goal=goal, at_most=True, measure=run)
    if shards:
        run = partial(merges, work, shards)
        what = f"peak memory, merging sums of {shards:,} shards / of {shards // 10:,}"
        yield Row(what=what, goal=1.05, at_most=True, measure=run)


def more(options: argparse.ArgumentParser) -> None:
    options.add_argument("--shards", type=int, default=10_000, help="of the merge; 0 leaves it out")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--merge"]:
        merge(sys.argv[2])
    else:
        main(__doc__, rows, more)
