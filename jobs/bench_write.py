"""Writing: bytes/s of an attempt against one plain sequential file write of the same bytes, in pairs.

    python jobs/bench_write.py [--folder /tmp] [--names 8] [--rows 16384] [--pairs 9]

Both are measured without fsync (page cache) and with it (plain: one file, one fsync; ours: every object and folder).
The attempt checksums what it writes. What the kernel still holds is flushed before each measurement.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np

from harvest.records import ArraySpec
from harvest.store.attempt import AttemptWriter
from harvest.store.opening import open_files

WIDTH = 576
ROWS_PER_APPEND = 4096


def ours(folder: Path, rows: np.ndarray, turns: int, names: int) -> None:
    """One attempt of `names` arrays, appended in turn as a sort window is."""
    spec = {f"residual.{i}": ArraySpec(rows=len(rows) * turns, width=WIDTH, dtype="float32") for i in range(names)}
    files = open_files(str(folder / "run"))
    with AttemptWriter(files, "f00000-s000000.00000000-1", spec, chunk_bytes=8 << 20) as writer:
        for _ in range(turns):
            for name in spec:
                writer.append(name, rows)
        writer.close()


def plain(folder: Path, rows: np.ndarray, turns: int, names: int) -> None:
    """The same bytes, front to back, into one file."""
    with open(folder / "plain", "wb", buffering=0) as file:
        for _ in range(turns * names):
            view = memoryview(rows).cast("B")  # type: ignore[arg-type]  # a buffer
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def seconds(way: object, parent: str, rows: np.ndarray, turns: int, names: int) -> float:
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        os.sync()
        begin = time.perf_counter()
        way(folder, rows, turns, names)  # type: ignore[operator]
        return time.perf_counter() - begin
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--names", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    turns = max(1, options.rows // ROWS_PER_APPEND)
    rows = np.random.default_rng(0).standard_normal((ROWS_PER_APPEND, WIDTH), np.float32)
    size = rows.nbytes * turns * options.names / 1e9
    print(f"{options.names} names, {size:.2f} GB in {options.folder}; {options.pairs} pairs; GB/s are medians")
    print("| durable | plain GB/s | store GB/s | ratio, median | ratio, quartiles |\n| --- | --- | --- | --- | --- |")
    for durable in (False, True):
        fsync = os.fsync if durable else lambda handle: None
        with mock.patch.object(os, "fsync", fsync):
            pairs = [
                (
                    seconds(plain, options.folder, rows, turns, options.names),
                    seconds(ours, options.folder, rows, turns, options.names),
                )
                for _ in range(options.pairs + 1)
            ][1:]
        low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        speeds = [size / statistics.median(times) for times in zip(*pairs)]
        print(f"| {durable} | {speeds[0]:.2f} | {speeds[1]:.2f} | {middle:.2f} | {low:.2f} to {high:.2f} |")


if __name__ == "__main__":
    main()
