"""What `store.compression = "zstd"` and `store.dtype = "int8"` cost and save, on the rows of a float32 run.

    harvest run jobs/demo.toml --set store.dtype=float32 --set data.limit=60 --set run.path=runs/float32
    python jobs/bench_small.py runs/float32 [--name residual.15] [--rows 200000] [--pairs 5] [--write]

Sizes and errors are of the run's own rows. Speeds are of one name, its rows repeated: written as a shard, and read in
shuffled batches, each in turn beside uncompressed bfloat16, whose own rows/s are shown, too. `--write` adds the tables
to jobs/results/.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_store import write_shard  # the tables of a shard

import harvest
from harvest.records import Shard
from harvest.store.chunks import compressed
from harvest.store.int8 import codes_of, quantise
from harvest.store.ledger import Ledger, RunRecord
from harvest.store.opening import open_files

STORES = [("bfloat16", "none"), ("bfloat16", "zstd"), ("int8", "none"), ("int8", "zstd")]
CHUNK_BYTES = 8 << 20
BATCH = 4096
SHARDS = 4


def stored(rows: torch.Tensor, dtype: str) -> dict[str, np.ndarray]:
    """Suffix -> the arrays that hold float32 rows [n, d] in a dtype."""
    if dtype == "int8":
        block = rows.clone()
        scales = quantise(block)
        return {"": codes_of(block, scales).numpy(), ".scale": scales[:, None].numpy()}
    cast = rows.to(getattr(torch, dtype))
    return {"": (cast.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else cast.numpy())}


def size(arrays: dict[str, np.ndarray], compression: str) -> int:
    """Bytes, in chunks as a store has them."""
    if compression == "none":
        return sum(array.nbytes for array in arrays.values())
    flat = [array.reshape(-1).view(np.uint8) for array in arrays.values()]
    return sum(len(compressed(part[i : i + CHUNK_BYTES])) for part in flat for i in range(0, len(part), CHUNK_BYTES))


def errors(rows: torch.Tensor) -> tuple[float, float, float]:
    """What int8 does: relative L2 of all rows, the largest of a row, the smallest cosine of a row."""
    kept = rows.clone()
    quantise(kept)
    norms, off = rows.double().norm(dim=1), (kept.double() - rows.double()).norm(dim=1)
    cosine = torch.nn.functional.cosine_similarity(rows.double(), kept.double(), dim=1)
    return float(off.norm() / norms.norm()), float((off / norms).max()), float(cosine.min())


def sizes(run: Any, names: list[str]) -> list[str]:
    """A table: a name a line."""
    lines = [
        "| name | float32 + zstd | bfloat16 | bfloat16 + zstd | int8 | int8 + zstd | int8 error | worst row | cosine |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in names:
        rows = run[name][:]
        whole = rows.numpy().nbytes
        shares = [
            size(stored(rows, dtype), how) / whole for dtype, how in (("float32", "zstd"), *((d, c) for d, c in STORES))
        ]
        off, worst, cosine = errors(rows)
        lines.append(
            f"| {name} | "
            + " | ".join(f"{share:.3f}" for share in shares)
            + f" | {off:.4f} | {worst:.4f} | {cosine:.5f} |"
        )
    return lines


def write(folder: Path, name: str, rows: torch.Tensor, dtype: str, compression: str) -> float:
    """A run of these rows; returns rows/s, encoding included."""
    files = open_files(str(folder))
    plan = {
        "resolved": {"names": [name], "store_dtype": dtype, "chunk_bytes": CHUNK_BYTES},
        "names": {name: {"width": rows.shape[1], "module": name}},
    }
    ledger = Ledger(files)
    ledger.create_run(RunRecord(job={"store": {"compression": compression}}, plan=plan, fingerprint={}))
    began = time.perf_counter()
    for index, part in enumerate(rows.chunk(SHARDS)):
        shard = Shard(file=0, index=index, start=index, stop=index + 1)
        arrays = {f"{name}{suffix}": array for suffix, array in stored(part, dtype).items()}
        ledger.commit(write_shard(files, shard, arrays, compression))
    return len(rows) / (time.perf_counter() - began)


def read(folder: Path, name: str) -> float:
    """Rows/s of one epoch of shuffled batches, as float32."""
    run = harvest.open(folder)
    began = time.perf_counter()
    for _ in run.batches(name, BATCH, dtype="float32"):
        pass
    return len(run) / (time.perf_counter() - began)


def speeds(name: str, rows: torch.Tensor, pairs: int) -> list[str]:
    """A table: a store a line; medians of ratios to bfloat16 uncompressed, timed in the same round."""
    timed: dict[tuple[str, str], list[tuple[float, float]]] = {store: [] for store in STORES}
    for _ in range(pairs):
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            for store in STORES:
                place = Path(folder) / "-".join(store)
                timed[store].append((write(place, name, rows, *store), read(place, name)))
    lines = ["| store | written, rows/s | ratio | read shuffled, rows/s | ratio |", "| --- | --- | --- | --- | --- |"]
    base = timed[STORES[0]]
    for store, found in timed.items():
        cells = []
        for part in (0, 1):
            ratios = sorted(one[part] / other[part] for one, other in zip(found, base))
            cells += [
                f"{statistics.median(one[part] for one in found):,.0f}",
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            ]
        lines.append(f"| {' + '.join(part for part in store if part != 'none')} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--name", default="residual.15")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    run = harvest.open(options.run)
    names = [name for name in run.names if name.endswith((".0", ".8", ".15", ".20", ".22", ".29"))]
    own = run[options.name][:]
    rows = own.repeat(-(-options.rows // len(own)), 1)[: options.rows]
    text = "\n".join(
        [
            f"# Smaller stores: {len(run):,} rows of {run.record.job['model']['name']}",
            "",
            f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}; zstd level 1.",
            "Sizes are shares of float32. Error of int8: relative L2 of all rows together, of the worst row, and the",
            "smallest cosine of a row to what it was (bfloat16 is off by 0.002).",
            "",
            *sizes(run, names),
            "",
            f"{options.rows:,} rows of {options.name} ({own.shape[1]} wide) in {SHARDS} shards, {options.pairs} times;",
            f"batches of {BATCH} as float32. Compressed rows come through mixed blocks, the others shuffled globally.",
            "",
            *speeds(options.name, rows, options.pairs),
        ]
    )
    print(text)
    if options.write:
        Path(__file__).with_name("results").joinpath(f"small_stores_cpu_{time.strftime('%Y%m')}.md").write_text(
            text + "\n"
        )


if __name__ == "__main__":
    main()
