"""Reading for training against numpy and SAELens: `run.batches` and theirs in turn.

    python jobs/bench_store.py [--rows 400000] [--shards 8] [--pairs 5] [--out jobs/results]

All read the same rows out of the page cache: numpy in the same shuffled order from one plain file by a list of row
numbers made beforehand, `run.batches` from the run's own objects, its shuffle included. SAELens' reader of cached
activations, in an environment of its own, mixes an export of the run in a buffer of four batches.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import measuring  # noqa: F401  # before torch: it says how threads wait
import numpy as np
import torch
from measuring import Found, Row, in_turn, main, ratios
from peer import Peer, python

import harvest
from harvest.export.export import Request, export_run
from harvest.records import FORMAT_VERSION, ArraySpec, Shard, ShardRecord, TokenColumns
from harvest.store import layout
from harvest.store.attempt import AttemptWriter
from harvest.store.files import Files
from harvest.store.ledger import Ledger, RunRecord
from harvest.store.opening import open_files
from harvest.store.tables import documents_table, keys_digest, tokens_table

NAME, WIDTH, BATCH = "residual.15", 576, 4096
DTYPE = "bfloat16"
STORED = {"<u2": "bfloat16", "|i1": "int8", "<f4": "float32"}
"""Dtype of the bits -> what is stored."""
CONTEXT = 128
"""Of the export that SAELens reads, in float16, since it knows no bfloat16."""
PIECE_ROWS = 2**20 // (2 * WIDTH)


def write(folder: Path, rows: int, shards: int) -> None:
    """A run of random rows and, beside it, the same rows as one plain file."""
    files = open_files(str(folder / "run"))
    ledger = Ledger(files)
    plan = {
        "resolved": {"names": [NAME], "store_dtype": DTYPE},
        "names": {NAME: {"width": WIDTH, "module": "layers.15"}},
    }
    ledger.create_run(RunRecord(job={}, plan=plan, fingerprint={}))
    generator = np.random.default_rng(0)
    with (folder / "plain").open("wb", buffering=0) as plain:
        for index in range(shards):
            count = rows // shards
            values = generator.integers(0x3E00, 0x4100, (count, WIDTH), np.uint16)  # bfloat16 of 0.1 to 8
            for start in range(0, count, PIECE_ROWS):  # as the store writes: pages cached alike on both sides
                plain.write(values[start : start + PIECE_ROWS].data)
            shard = Shard(file=0, index=index, start=index, stop=index + 1)
            ledger.commit(write_shard(files, shard, {NAME: values}))


def write_shard(files: Files, shard: Shard, arrays: dict[str, np.ndarray], compression: str = "none") -> ShardRecord:
    """Arrays in their stored bits; one document per shard: the tables are not what is measured."""
    n = len(next(iter(arrays.values())))
    tokens = TokenColumns(
        document=np.full(n, shard.start),
        position=np.arange(n, dtype=np.int32),
        token=np.zeros(n, np.int32),
        chunk=np.zeros(n, np.int32),
        special=np.zeros(n, bool),
    )
    attempt = layout.attempt_name(shard.key, "0" * 8, 1)
    specs = {
        name: ArraySpec(rows=n, width=rows.shape[1], dtype=STORED[rows.dtype.str], compression=compression)
        for name, rows in arrays.items()
    }
    with AttemptWriter(files, attempt, specs, chunk_bytes=8 << 20) as writer:
        for name, rows in arrays.items():
            writer.append(name, rows)
        writer.table(layout.TOKENS, tokens_table(tokens))
        writer.table(layout.DOCUMENTS, documents_table([]))
        objects = writer.close()
    return ShardRecord(
        format=FORMAT_VERSION,
        shard=shard,
        attempt=attempt,
        rows=n,
        documents=1,
        skipped={},
        tokens=n,
        dropped_tokens=0,
        forward_tokens=n,
        non_finite={},
        zero_rows={},
        objects=objects,
        keys_digest=keys_digest(tokens.document, tokens.position, tokens.token),
        source_digest="",
        ended=False,
        cut=False,
        cursor=None,
        self_check={},
        environment={},
        seconds={},
    )


@contextlib.contextmanager
def stored(rows: int, shards: int) -> Iterator[Path]:
    """A folder with the run and the plain file."""
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), rows, shards)
        yield Path(name)


def batches(folder: Path, with_rows: bool) -> list[torch.Tensor]:
    """One epoch of full batches, or of what they hold and their row numbers."""
    run = harvest.open(folder / "run")
    return list(itertools.islice(run.batches(NAME, BATCH, with_rows=with_rows), len(run) // BATCH))


def ours(run: harvest.Run, count: int) -> float:
    """Seconds a row of `count` batches."""
    began = time.perf_counter()
    for _ in itertools.islice(run.batches(NAME, BATCH), count):
        pass
    return (time.perf_counter() - began) / (count * BATCH)


def against_numpy(rows: int, shards: int, pairs: int) -> Found:
    with stored(rows, shards) as folder:
        plain = np.memmap(folder / "plain", np.uint16, "r").reshape(-1, WIDTH)
        order = [chosen.numpy() for _, chosen in batches(folder, with_rows=True)]
        for values, chosen in zip(batches(folder, with_rows=False), order):
            assert np.array_equal(values.view(torch.int16).numpy().view(np.uint16), plain[chosen])

        def gather() -> float:
            began = time.perf_counter()
            for chosen in order:
                plain[chosen]
            return (time.perf_counter() - began) / (len(order) * BATCH)

        return found(in_turn(gather, partial(ours, harvest.open(folder / "run"), len(order)), pairs))


def against_saelens(rows: int, shards: int, pairs: int) -> Found:
    interpreter = python("saelens")
    with stored(rows, shards) as folder:
        out, count = str(folder / "export"), rows // BATCH - 1
        options = {"context": CONTEXT, "dtype": "float16", "shuffle": 0}
        export_run(Request(format="saelens", run=str(folder / "run"), out=out, **options))  # type: ignore[arg-type]
        hook = f"blocks.{NAME.rpartition('.')[2]}.hook_resid_post"
        arguments = [out, hook, *map(str, (CONTEXT, WIDTH, BATCH, count))]
        with Peer(interpreter, "saelens_reading.py", arguments) as peer:
            return found(in_turn(peer.seconds, partial(ours, harvest.open(folder / "run"), count), pairs))


def found(timings: list[tuple[float, float]]) -> Found:
    theirs, own = (1 / statistics.median(side) for side in zip(*timings))
    return Found(figures=ratios(timings), remark=f"{own:,.0f} against {theirs:,.0f} rows/s")


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    size = (40_000 if asked.quick else asked.rows, asked.shards, asked.pairs)
    torch.set_num_threads(asked.threads)
    yield Row(what="shuffled reading / numpy memmap gather", goal=1, measure=partial(against_numpy, *size))
    yield Row(what="shuffled reading / SAELens' cached reader", goal=2, measure=partial(against_saelens, *size))


def more(options: argparse.ArgumentParser) -> None:
    options.add_argument("--rows", type=int, default=400_000)
    options.add_argument("--shards", type=int, default=8)


if __name__ == "__main__":
    main(__doc__, rows, more)
