"""Exporting against copying a file: time of `harvest export` and of a plain durable copy of as many bytes, in pairs.

    python jobs/bench_export.py [--rows 200000] [--shards 4] [--pairs 5] [--out jobs/results]

The copy reads one file of float32 rows in pieces of 8 MiB and writes them with one fsync, as an export ends with one.
The export reads the run's own objects, checksums what it writes, and writes tokens.parquet and its card too. Both
read out of the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import bench_store
import numpy as np
from measuring import Found, Row, in_turn, main, ratios

from harvest.export.export import Request, export_run

CASES = {
    "npy, in order": {"format": "npy"},
    "npy, shuffled": {"format": "npy", "shuffle": 0},
    "hf, in order": {"format": "hf"},
    "hf, shuffled": {"format": "hf", "shuffle": 0},
    "saelens, shuffled": {"format": "saelens", "shuffle": 0},
    "safetensors, in order": {"format": "safetensors"},
    "parquet, in order": {"format": "parquet"},
}
PIECE = 8 << 20


def copy(source: Path, target: Path) -> None:
    """One file, durable at the end."""
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as written:
        while piece := read.read(PIECE):
            written.write(piece)
        os.fsync(written.fileno())


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """(wall, processor) seconds."""
    began, spent = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - spent


def write(folder: Path, rows: int, shards: int) -> None:
    """A run of random float32 rows and, beside it, the same rows as one plain file."""
    files = bench_store.open_files(str(folder / "run"))
    ledger = bench_store.Ledger(files)
    name, width = bench_store.NAME, bench_store.WIDTH
    plan = {"resolved": {"names": [name], "store_dtype": "float32"}, "names": {name: {"width": width, "module": "m"}}}
    ledger.create_run(bench_store.RunRecord(job={}, plan=plan, fingerprint={}))
    generator = np.random.default_rng(0)
    with (folder / "plain").open("wb", buffering=0) as plain:
        for index in range(shards):
            values = generator.standard_normal((rows // shards, width), np.float32)
            plain.write(values.data)
            shard = bench_store.Shard(file=0, index=index, start=index, stop=index + 1)
            ledger.commit(bench_store.write_shard(files, shard, values))


def measure(options: dict[str, object], rows: int, shards: int, pairs: int) -> Found:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, rows, shards)
        size = (folder / "plain").stat().st_size
        spent: dict[str, list[float]] = {"copy": [], "export": []}
        request = Request(run=str(folder / "run"), out=str(folder / "out"), name=[bench_store.NAME], **options)  # type: ignore[arg-type]

        def copied() -> float:
            seconds, cpu = timed(lambda: copy(folder / "plain", folder / "copied"))
            (folder / "copied").unlink()
            spent["copy"].append(cpu)
            return seconds

        def exported() -> float:
            seconds, cpu = timed(lambda: export_run(request))
            shutil.rmtree(folder / "out")
            spent["export"].append(cpu)
            return seconds

        timings = in_turn(copied, exported, pairs)
    rates = " against ".join(f"{size / 1e6 / statistics.median(side):,.0f}" for side in list(zip(*timings))[::-1])
    cpu = " against ".join(f"{statistics.median(spent[side]) * 1e9 / size:.2f}" for side in ("export", "copy"))
    return Found(figures=ratios(timings), remark=f"{rates} MB/s, {cpu} processor seconds a GB, {size / 1e9:.2f} GB")


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    count = 20_000 if asked.quick else asked.rows
    for case, options in CASES.items():
        run = partial(measure, options, count, asked.shards, asked.pairs)
        yield Row(what=f"harvest export {case} / a plain copy", goal=None, measure=run)


def more(options: argparse.ArgumentParser) -> None:
    options.add_argument("--rows", type=int, default=200_000)
    options.add_argument("--shards", type=int, default=4)


if __name__ == "__main__":
    main(__doc__, rows, more)
