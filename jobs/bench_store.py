"""Reading for training against numpy and SAELens: rows/s of `run.batches` and of theirs, in turn.

    python jobs/bench_store.py [--rows 400000] [--shards 8] [--pairs 5] [--saelens PYTHON] [--write]

All read the same rows out of the page cache: numpy in the same shuffled order from one plain file by a list of row
numbers made beforehand, `run.batches` from the run's own objects, its shuffle included. SAELens' reader of cached
activations, where there is an interpreter that has it (`make test-peers` makes one), mixes an export of the run in a
buffer of four batches. `--write` adds the table to jobs/results/.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

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
SAELENS = Path(__file__).parents[1] / ".peers/saelens/bin/python"
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


def measure(folder: Path, pairs: int, batches: int, saelens: Path | None) -> list[tuple[float, ...]]:
    """(numpy, ours and, where it is there, SAELens) in rows/s, in turn."""
    run = harvest.open(folder / "run")
    plain = np.memmap(folder / "plain", np.uint16, "r").reshape(-1, WIDTH)

    def ours() -> list[torch.Tensor]:
        return list(itertools.islice(run.batches(NAME, BATCH, with_rows=True), batches))

    order = [rows.numpy() for _, rows in ours()]
    for (values, _), rows in zip(ours(), order):
        assert np.array_equal(values.view(torch.int16).numpy().view(np.uint16), plain[rows])
    total = sum(map(len, order))
    timed: list[tuple[float, ...]] = []
    if saelens:
        export = Request(format="saelens", run=str(folder / "run"), out=str(folder / "export"), context=CONTEXT,
                         dtype="float16", shuffle=0)  # fmt: skip
        export_run(export)
    for _ in range(pairs):
        began = time.perf_counter()
        for rows in order:
            plain[rows]
        turned = time.perf_counter()
        for _ in itertools.islice(run.batches(NAME, BATCH), batches):
            pass
        ended = time.perf_counter()
        timed.append((total / (turned - began), total / (ended - turned)))
        if saelens:
            timed[-1] += (read_by_saelens(saelens, folder / "export", batches - 1),)
    return timed


def read_by_saelens(python: Path, export: Path, batches: int) -> float:
    """Rows/s of its cached reader, in a process of its own environment."""
    hook = f"blocks.{NAME.rpartition('.')[2]}.hook_resid_post"
    command = [python, Path(__file__).with_name("read_saelens.py"), export, hook, CONTEXT, WIDTH, BATCH, batches]
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["rows_per_second"])


def table(timed: list[tuple[float, ...]], rows: int, shards: int) -> str:
    """The figures as Markdown."""
    rivals = ["numpy memmap gather", "SAELens, cached"][: len(timed[0]) - 1]
    lines = [
        f"Shuffled reading, {rows:,} rows of {WIDTH} {DTYPE} in {shards} shards, batches of {BATCH}",
        f"(numpy {np.__version__}, torch {torch.__version__}, {torch.get_num_threads()} cores, {platform.machine()}).",
        "",
        "| turn | run.batches, rows/s | " + " | ".join(f"{rival}, rows/s | ratio" for rival in rivals) + " |",
        "| --- | --- |" + " --- | --- |" * len(rivals),
    ]
    ratios: dict[str, list[float]] = {rival: [] for rival in rivals}
    for turn, (numpy_rate, ours, *more) in enumerate(timed, 1):
        cells = [str(turn), f"{ours:,.0f}"]
        for rival, rate in zip(rivals, (numpy_rate, *more)):
            ratios[rival].append(ours / rate)
            cells += [f"{rate:,.0f}", f"{ours / rate:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for rival, found in ratios.items():
        lines.append(f"{rival}: median {statistics.median(found):.2f}, {min(found):.2f} to {max(found):.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--saelens", type=Path, default=SAELENS if SAELENS.exists() else None)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder, options.rows, options.shards)
        batches = options.rows // options.shards * options.shards // BATCH
        text = table(measure(folder, options.pairs, batches, options.saelens), options.rows, options.shards)
    print(text)
    if options.write:
        name = f"reading_{platform.machine()}_{time.strftime('%Y%m')}.md"
        (Path(__file__).parent / "results" / name).write_text(f"# Reading for training\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
