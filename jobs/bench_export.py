"""Exporting against copying a file: time of `harvest export` and of a plain durable copy of as many bytes, in pairs.

    python jobs/bench_export.py [--rows 200000] [--shards 4] [--pairs 3] [--write]

The copy reads one file of float32 rows in pieces of 8 MiB and writes them with one fsync, as an export ends with one.
The export reads the run's own objects, checksums what it writes, and writes tokens.parquet and its card too. Both
read out of the page cache. `--write` adds the table to jobs/results/.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import bench_store
import numpy as np

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


def measure(folder: Path, pairs: int) -> list[tuple[str, float, float, float, float, float]]:
    """(case, copied bytes/s, exported bytes/s, median of their ratios, processor s/GB of the copy, of the export)."""
    size, found = (folder / "plain").stat().st_size, []
    for case, options in CASES.items():
        request = Request(run=str(folder / "run"), out=str(folder / "out"), name=[bench_store.NAME], **options)  # type: ignore[arg-type]
        copies, exports = [], []
        for _ in range(pairs):
            copies.append(timed(lambda: copy(folder / "plain", folder / "copied")))
            exports.append(timed(lambda request=request: export_run(request)))  # type: ignore[misc]
            (folder / "copied").unlink()
            shutil.rmtree(folder / "out")
        ratio = statistics.median(a[0] / b[0] for a, b in zip(copies, exports))
        (plain, plain_cpu), (ours, ours_cpu) = (map(statistics.median, zip(*one)) for one in (copies, exports))
        found.append((case, size / plain, size / ours, ratio, plain_cpu / size * 1e9, ours_cpu / size * 1e9))
    return found


def main() -> None:
    """Prints the table, and writes it with --write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    bench_store.DTYPE = "float32"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, asked.rows, asked.shards)
        found = measure(folder, asked.pairs)
        size = (folder / "plain").stat().st_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    lines = [
        f"# Exports, {os.cpu_count()} busy CPU cores, {time.strftime('%B %Y')}",
        "",
        f"{asked.rows:,} rows of {bench_store.WIDTH} float32 in {asked.shards} shards, {size / 1e9:.2f} GB; Python",
        f"{platform.python_version()}; load average {os.getloadavg()[0]:.0f}, from other work, so the wall times vary.",
        f"Medians of {asked.pairs} pairs; the ratio is the median of the pairs' own. Peak memory of the process,",
        f"mapped pages and making the data included: {peak:,.0f} MiB.",
        "",
        "| export | copy MB/s | export MB/s | ratio | copy CPU s/GB | export CPU s/GB |",
        "| --- | --- | --- | --- | --- | --- |",
        *(f"| {c} | {p / 1e6:,.0f} | {o / 1e6:,.0f} | {r:.2f} | {x:.2f} | {y:.2f} |" for c, p, o, r, x, y in found),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if asked.write:
        path = Path(__file__).parent / "results" / f"export_cpu_{time.strftime('%Y%m')}.md"
        path.write_text(text, encoding="utf-8")


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


if __name__ == "__main__":
    main()
