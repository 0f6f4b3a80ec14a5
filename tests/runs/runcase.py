"""What the tests of whole runs share: a job over a tiny model, stores that die at an operation, data in files."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from commandcase import jsonl
from oracle import alone
from plainrun import PlainRun, read_plain
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.runtime import coordinate
from harvest.store.files import Files
from harvest.store.opening import open_files

WIDTH = 16


def job(path: str | Path, **tables: dict[str, Any]) -> dict[str, Any]:
    """A job for `harvest.run`; `tables` are laid over it."""
    return {**tables, "run": {"path": str(path), "threads": 1, **tables.get("run", {})}}


def run(path: str | Path, source: Any = None, *, model: Any = None, tokenizer: Any = "byte", **tables: Any) -> PlainRun:
    """Runs a job over a file (`source` is a path) or over objects; returns what is on disk afterwards."""
    if isinstance(source, str | Path):
        tables["data"] = {"path": str(source), **tables.get("data", {})}
        source = None
    model = tiny_llama(vocab=300) if model is None else model
    tokenizer = byte_tokenizer() if tokenizer == "byte" else tokenizer
    harvest.run(job(path, **tables), model=model, tokenizer=tokenizer, data=source)
    return read_plain(path)


def errors_alone(plain: PlainRun, model: Any, documents: dict[int, list[int]], name: str = "residual.2") -> float:
    """Largest error of these documents (id -> token ids) against a hook on each of them alone."""
    worst = 0.0
    for document, ids in documents.items():
        stored = torch.from_numpy(plain.of(document, name)).double()
        expected = alone(model, ids, [name])[name].double()
        assert stored.shape == expected.shape, (document, stored.shape, expected.shape)
        worst = max(worst, float(((stored - expected).norm(dim=1) / expected.norm(dim=1)).max()))
    return worst


def write_texts(folder: Path, kind: str, texts: list[str]) -> Path:
    """The texts as one file of this format."""
    path = folder / f"texts.{kind}"
    rows = [{"text": text} for text in texts]
    if kind == "jsonl":
        return jsonl(path, rows)
    if kind == "jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["text"])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    else:
        raise ValueError(kind)
    return path


class Died(BaseException):
    """The process is gone: nothing after this cleans up."""


class Failing:
    """A `Files` whose operation number `at` (from 0, over everything that changes the store) fails.

    `dies`: that operation and everything after it raises Died, reads too, as for a killed process. Otherwise it
    raises OSError once. `torn`: half of the bytes of a failing write arrive.
    """

    CHANGING = ("create", "replace", "swap", "open_write", "sync", "delete", "delete_tree")

    def __init__(self, inner: Files, at: int | None = None, *, dies: bool = True, torn: bool = True) -> None:
        self.inner, self.at, self.dies, self.torn = inner, at, dies, torn
        self.url, self.local, self.exclusive = inner.url, inner.local, inner.exclusive
        self.log: list[str] = []
        self.dead = False

    def operation(self, what: str) -> bool:
        """Notes an operation; raises where it is the one to fail, unless it is a write, which tears itself."""
        if self.dead:
            raise Died(what)
        self.log.append(what)
        return len(self.log) - 1 == self.at

    def fail(self, what: str) -> None:
        if self.dies:
            self.dead = True
            raise Died(what)
        raise OSError(5, f"Input/output error (scripted, {what})")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **more: Any) -> Any:
            if name not in self.CHANGING:
                if self.dead:
                    raise Died(name)
                return found(*args, **more)
            if self.operation(f"{name} {args[0]}"):
                self.fail(f"{name} {args[0]}")
            result = found(*args, **more)
            return FailingSink(self, args[0], result) if name == "open_write" else result

        return call


class FailingSink:
    """One object of a failing store."""

    def __init__(self, files: Failing, path: str, inner: Any) -> None:
        self.files, self.path, self.inner = files, path, inner

    def write(self, data: Any) -> None:
        if self.files.operation(f"write {self.path}"):
            view = memoryview(data).cast("B")
            if self.files.torn and len(view):
                self.inner.write(view[: len(view) // 2])
            self.files.fail(f"write {self.path}")
        self.inner.write(data)

    def close(self) -> None:
        if self.files.operation(f"close {self.path}"):
            self.files.fail(f"close {self.path}")
        self.inner.close()

    def abort(self) -> None:
        if self.files.dead:
            raise Died("abort")
        self.inner.abort()


def install(monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Files], Any]) -> list[Any]:
    """Every run opened from now on works on `wrap(files)`; the wrapped ones are listed."""
    made: list[Any] = []

    def wrapped(*args: Any, **more: Any) -> Any:
        made.append(wrap(open_files(*args, **more)))
        return made[-1]

    monkeypatch.setattr(coordinate, "open_files", wrapped)
    return made


def bury(path: str | Path) -> None:
    """Makes the lease that a "dead" life in this very process left look like that of a process that is gone."""
    lease = Path(path) / "coordinator.json"
    if lease.exists():
        held = json.loads(lease.read_text())
        lease.write_text(json.dumps({**held, "started": 1}))


def stacked(plain: PlainRun, name: str) -> np.ndarray:
    """float64 rows of a name, for arithmetic."""
    return plain.rows[name].astype(np.float64)
