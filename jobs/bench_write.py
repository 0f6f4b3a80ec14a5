"""Writing: bytes/s of an attempt against one plain sequential file write of the same bytes, in pairs.

    python jobs/bench_write.py [--folder /tmp] [--names 8] [--rows 16384] [--pairs 5]

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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
from measuring import Found, Row, in_turn, main, ratios

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


def seconds(way: Callable[..., None], parent: str, rows: np.ndarray, turns: int, names: int) -> float:
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        os.sync()
        begin = time.perf_counter()
        way(folder, rows, turns, names)
        return time.perf_counter() - begin
    finally:
        shutil.rmtree(folder)


def measure(asked: argparse.Namespace, durable: bool) -> Found:
    turns = 1 if asked.quick else max(1, asked.rows // ROWS_PER_APPEND)
    rows = np.random.default_rng(0).standard_normal((ROWS_PER_APPEND, WIDTH), np.float32)
    sides = (partial(seconds, way, asked.folder, rows, turns, asked.names) for way in (plain, ours))
    with mock.patch.object(os, "fsync", os.fsync if durable else lambda handle: None):
        timings = in_turn(*sides, asked.pairs)
    size = rows.nbytes * turns * asked.names / 1e9
    theirs, own = (size / statistics.median(side) for side in zip(*timings))
    return Found(figures=ratios(timings), remark=f"{own:.2f} against {theirs:.2f} GB/s, {size:.2f} GB")


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    yield Row(what="writing, durable / one plain file", goal=0.8, measure=partial(measure, asked, True))
    yield Row(what="writing to the page cache / one plain file", goal=None, measure=partial(measure, asked, False))


def more(options: argparse.ArgumentParser) -> None:
    options.add_argument("--folder", default=tempfile.gettempdir())
    options.add_argument("--names", type=int, default=8)
    options.add_argument("--rows", type=int, default=16_384)


if __name__ == "__main__":
    main(__doc__, rows, more)
