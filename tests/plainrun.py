"""A run's folder read by json, numpy, pyarrow and hashes alone: what the product says about itself is not asked.

Only committed shards count: each record names its attempt, and the attempt holds the files.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}


@dataclass
class PlainRun:
    """What the committed shards of a run hold, in dataset order."""

    records: dict[str, dict[str, Any]]
    """Shard key -> its commit record."""
    tokens: dict[str, np.ndarray]
    """Column of tokens.parquet -> all rows; empty where the run stores no rows."""
    documents: list[dict[str, Any]]
    """Rows of documents.parquet."""
    rows: dict[str, np.ndarray]
    """Name -> [rows, width]; bfloat16 as its bits."""
    objects: dict[str, str]
    """`<shard key>/<path within the attempt>` -> hash of the bytes."""
    statistics: str | None
    """Hash of statistics.parquet; None where there is none."""
    complete: bool

    @property
    def keys(self) -> list[tuple[int, int]]:
        """(document, position) of every row."""
        return list(zip(self.tokens["document"].tolist(), self.tokens["position"].tolist()))

    def of(self, document: int, name: str) -> np.ndarray:
        """The rows of one document."""
        return self.rows[name][self.tokens["document"] == document]

    def ids(self, document: int) -> list[int]:
        """The stored token ids of one document."""
        ids: list[int] = self.tokens["token"][self.tokens["document"] == document].tolist()
        return ids


def read_plain(folder: str | Path) -> PlainRun:
    """Reads everything that is committed in a local run folder."""
    folder = Path(folder)
    found = [json.loads(path.read_text()) for path in folder.glob("ledger/f*.json")]
    found.sort(key=lambda record: (record["shard"]["file"], record["shard"]["index"]))
    attempts = {key_of(record): folder / "shards" / record["attempt"] for record in found}
    names = json.loads((folder / "run.json").read_text())["plan"]["names"] if (folder / "run.json").exists() else []
    tables = [pq.read_table(a / "tokens.parquet") for a in attempts.values() if (a / "tokens.parquet").exists()]
    documents = [pq.read_table(attempt / "documents.parquet").to_pylist() for attempt in attempts.values()]
    stored = [name for name in names if all((attempt / name).is_dir() for attempt in attempts.values())]
    statistics = folder / "statistics.parquet"
    return PlainRun(
        records={key_of(record): record for record in found},
        tokens={c: pa.concat_tables(tables)[c].to_numpy() for c in tables[0].column_names} if tables else {},
        documents=[row for table in documents for row in table],
        rows={n: np.concatenate([array(attempt / n) for attempt in attempts.values()]) for n in stored if attempts},
        objects={
            f"{key}/{path}": digest(attempt / path)
            for key, attempt in attempts.items()
            for path in files_below(attempt)
        },
        statistics=digest(statistics) if statistics.exists() else None,
        complete=(folder / "complete.json").exists(),
    )


def key_of(record: dict[str, Any]) -> str:
    """`f00000-s000017`."""
    return f"f{record['shard']['file']:05d}-s{record['shard']['index']:06d}"


def array(folder: Path) -> np.ndarray:
    """[rows, width] of one array: each object is its rows as they lie in memory, then the chunk index."""
    described = json.loads((folder / "zarr.json").read_text())
    rows, width = described["shape"]
    outer = described["chunk_grid"]["configuration"]["chunk_shape"][0]
    dtype = np.dtype(DTYPES[described["data_type"]])
    parts = [np.zeros((0, width), dtype)]
    for number in range(math.ceil(rows / outer)):
        count = min(outer, rows - number * outer)
        flat = np.fromfile(folder / f"c.{number}.0", dtype, count=count * width)
        parts.append(flat.reshape(count, width))
    return np.concatenate(parts)


def first_difference(clean: PlainRun, other: PlainRun) -> str | None:
    """Where two runs that should be the same differ, in words; None where every bit is equal."""
    for what, a, b in (
        ("committed shards", list(clean.records), list(other.records)),
        ("(document, position) of the rows", clean.keys, other.keys),
        ("token ids", clean.tokens["token"].tolist(), other.tokens["token"].tolist()),
        ("documents", clean.documents, other.documents),
    ):
        if a != b:
            at = next((i for i, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), min(len(a), len(b)))
            return f"{what}: {len(a)} and {len(b)}, first different at {at}: {a[at : at + 1]} and {b[at : at + 1]}"
    for name in clean.rows:
        if clean.rows[name].tobytes() != other.rows[name].tobytes():
            unequal = (clean.rows[name] != other.rows[name]).any(axis=1).nonzero()[0]
            return f"{name}: {len(unequal)} rows differ, the first at {unequal[:1].tolist()}"
    for path in sorted({*clean.objects, *other.objects}):
        if clean.objects.get(path) != other.objects.get(path):
            return f"object {path}: {clean.objects.get(path)} and {other.objects.get(path)}"
    if (clean.statistics, clean.complete) != (other.statistics, other.complete):
        return "statistics.parquet or complete.json"
    return None


def files_below(folder: str | Path) -> list[str]:
    """Every file, relative to the folder and sorted."""
    folder = Path(folder)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or path.is_symlink())


def digest(path: Path) -> str:
    """Hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def snapshot(folder: str | Path, *, without: Iterable[str] = ()) -> dict[str, tuple[int, str]]:
    """Path -> (time of change in ns, hash): equal before and after exactly when nothing was written."""
    folder = Path(folder)
    return {
        path: ((folder / path).stat().st_mtime_ns, digest(folder / path))
        for path in files_below(folder)
        if path not in without
    }


def attempts_without_record(folder: str | Path) -> list[Path]:
    """Folders of attempts that no commit record names: what a killed life leaves."""
    folder = Path(folder)
    named = {json.loads(path.read_text())["attempt"] for path in folder.glob("ledger/f*.json")}
    found = [path for path in folder.glob("shards/*") if re.fullmatch(r"f\d+-s\d+\.[0-9a-f]{8}-\d+", path.name)]
    return sorted(path for path in found if path.name not in named)
