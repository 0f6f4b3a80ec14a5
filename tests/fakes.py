"""Runs written by the store alone, their rows coded from (document, position): every row says where it belongs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harvest.records import (
    DOCUMENTS_PER_FILE,
    FORMAT_VERSION,
    ArraySpec,
    DocumentRow,
    Shard,
    ShardRecord,
    TokenColumns,
)
from harvest.reduce.base import Block, save_states
from harvest.reduce.health import Health
from harvest.reduce.moments import Moments
from harvest.results import write_results
from harvest.store import layout
from harvest.store.attempt import AttemptWriter
from harvest.store.files import Files
from harvest.store.int8 import codes_of, quantise
from harvest.store.ledger import Ledger, RunRecord
from harvest.store.opening import open_files
from harvest.store.tables import documents_table, keys_digest, tokens_table

LIFE = "0123abcd"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.float32}
"""Stored dtype -> what rows are read as."""


@dataclass
class Fake:
    """A run that was written, and what it holds."""

    path: str
    files: Files
    names: dict[str, int]
    """Name -> width."""
    tokens: dict[str, np.ndarray]
    """Column -> all rows in order."""
    rows: dict[str, torch.Tensor]
    """Name -> all rows as they are read."""
    records: list[ShardRecord] = field(default_factory=list)


def coded_rows(name_index: int, document: np.ndarray, position: np.ndarray, width: int) -> np.ndarray:
    """float32 [n, width]: document row, position, name, then small whole numbers of all three; exact in bfloat16."""
    columns = np.arange(width)[None, :]
    row = document % DOCUMENTS_PER_FILE + 100 * (document // DOCUMENTS_PER_FILE)
    coded = (row[:, None] * 7 + position[:, None] * 3 + name_index * 5 + columns * 11) % 251 + 1.0
    coded[:, 0] = row % 256
    coded[:, 1] = position
    return coded.astype(np.float32)


def columns_of(shard: Shard, lengths: Sequence[int]) -> TokenColumns:
    """Document k of the shard has lengths[k] tokens, the first of them special."""
    ids = np.arange(shard.start, shard.start + len(lengths)) + shard.file * DOCUMENTS_PER_FILE
    document = np.repeat(ids, lengths).astype(np.int64)
    position = np.concatenate([np.zeros(0, np.int32), *(np.arange(n, dtype=np.int32) for n in lengths)]).astype(
        np.int32
    )
    return TokenColumns(
        document=document,
        position=position,
        token=((document * 13 + position) % 61).astype(np.int32),
        chunk=position // 8,
        special=position == 0,
    )


def write_run(
    path: str | Path,
    shards: Sequence[Sequence[int]] = ((3, 1, 4), (), (1, 5), (9, 2, 6)),
    names: Mapping[str, int] | None = None,
    dtype: str = "float32",
    *,
    files_of: Sequence[int] | None = None,
    moments: bool = True,
    store: bool = True,
    complete: bool = True,
    change: Mapping[tuple[str, int], Any] | None = None,
    object_bytes: int = 256 << 20,
    chunk_bytes: int = 256,
    compression: str = "none",
    model: str = "m",
) -> Fake:
    """A run with one shard per entry of `shards`, which lists the tokens of its documents.

    `files_of`: the source file of each shard, 0 for all by default; `change`: (name, document) -> what its rows
    become, a number or a function of them.
    """
    names = dict(names or {"residual.0": 6, "residual.10": 6, "mlp.1": 4})
    files = open_files(str(path))
    ledger = Ledger(files)
    numbers = list(files_of or [0] * len(shards))
    plan = {
        "resolved": {
            "names": list(names),
            "store_dtype": dtype,
            "shard_documents": 8,
            "chunk_bytes": chunk_bytes,
        },
        "files": [{"name": f"{number}.jsonl", "rows": None} for number in range(max(numbers, default=0) + 1)],
        "names": {name: {"width": width, "module": name} for name, width in names.items()},
    }
    job = {"data": {"limit": None, "max_tokens": None}, "store": {"compression": compression}}
    ledger.create_run(RunRecord(job=job, plan=plan, fingerprint={"fingerprint.model": model}))
    fake = Fake(str(path), files, names, {}, {})
    starts: dict[int, tuple[int, int]] = {}
    parts: list[TokenColumns] = []
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for at, (number, lengths) in enumerate(zip(numbers, shards, strict=True)):
        index, start = starts.get(number, (0, 0))
        shard = Shard(file=number, index=index, start=start, stop=start + len(lengths))
        starts[number] = index + 1, shard.stop
        columns = columns_of(shard, lengths)
        parts.append(columns)
        arrays = {
            name: _changed(coded_rows(i, columns.document, columns.position, width), name, columns, change or {}, dtype)
            for i, (name, width) in enumerate(names.items())
        }
        for name, array in arrays.items():
            rows[name].append(array)
        scales = {name: quantise(array) for name, array in arrays.items()} if dtype == "int8" else {}
        writer = AttemptWriter(
            files,
            layout.attempt_name(shard.key, LIFE, 1),
            _specs(arrays, dtype, compression) if store else {},
            chunk_bytes=chunk_bytes,
            object_bytes=object_bytes,
        )
        if store:
            _append(writer, arrays, scales, dtype)
        record = _write_shard(writer, shard, lengths, columns, arrays, moments, store)
        record = replace(record, ended=number not in numbers[at + 1 :])
        assert ledger.commit(record)
        fake.records.append(record)
    if complete:
        write_results(files)
    fake.rows = {name: torch.cat(parts) for name, parts in rows.items()}
    fake.tokens = {
        column: np.concatenate([getattr(part, column) for part in parts])
        for column in ("document", "position", "token", "chunk", "special")
    }
    return fake


def _changed(
    coded: np.ndarray, name: str, columns: TokenColumns, change: Mapping[tuple[str, int], Any], dtype: str
) -> torch.Tensor:
    for (changed, document), value in change.items():
        at = columns.document == document
        if changed == name and at.any():
            coded[at] = value(coded[at]) if callable(value) else value
    return torch.from_numpy(coded).to(DTYPES[dtype])


def _specs(arrays: Mapping[str, torch.Tensor], dtype: str, compression: str) -> dict[str, ArraySpec]:
    specs = {}
    for name, rows in arrays.items():
        specs[name] = ArraySpec(rows=len(rows), width=rows.shape[1], dtype=dtype, compression=compression)
        if dtype == "int8":
            specs[f"{name}.scale"] = ArraySpec(rows=len(rows), width=1, dtype="float32", compression=compression)
    return specs


def _append(
    writer: AttemptWriter, arrays: Mapping[str, torch.Tensor], scales: Mapping[str, torch.Tensor], dtype: str
) -> None:
    for name, rows in arrays.items():
        if dtype == "int8":
            writer.append(name, codes_of(rows, scales[name]).numpy())
            writer.append(f"{name}.scale", scales[name][:, None].numpy())
        else:
            writer.append(name, (rows.view(torch.int16) if dtype == "bfloat16" else rows).numpy().view(_stored(dtype)))


def _write_shard(
    writer: AttemptWriter,
    shard: Shard,
    lengths: Sequence[int],
    columns: TokenColumns,
    arrays: Mapping[str, torch.Tensor],
    moments: bool,
    store: bool,
) -> ShardRecord:
    reduction: Any = Moments() if moments else Health()
    states = {
        name: reduction.update(
            reduction.zero(),
            Block(rows=rows, special=columns.special, document=columns.document, position=columns.position),
        )
        for name, rows in arrays.items()
    }
    odd = {int(i) for rows in arrays.values() for i in columns.document[~rows.isfinite().all(dim=1).numpy()]}
    first = shard.file * DOCUMENTS_PER_FILE + shard.start
    documents = [
        DocumentRow(
            document=first + i,
            tokens=n,
            rows=n,
            status="stored" if n else "skipped",
            reason="empty" if not n else "non-finite values" if first + i in odd else None,
            kept={"label": str(i % 2)},
        )
        for i, n in enumerate(lengths)
    ]
    if store:
        writer.table(layout.TOKENS, tokens_table(columns))
    writer.table(layout.DOCUMENTS, documents_table(documents, ["label"]))
    writer.blob(layout.STATES, save_states([(reduction, states)]))
    return ShardRecord(
        format=FORMAT_VERSION,
        shard=shard,
        attempt=writer.attempt,
        rows=len(columns),
        documents=len(documents),
        skipped={"empty": sum(n == 0 for n in lengths)} if 0 in lengths else {},
        tokens=len(columns),
        dropped_tokens=0,
        forward_tokens=len(columns),
        non_finite_documents=len(odd),
        non_finite={name: s.non_finite_values for name, s in states.items() if s.non_finite_values},
        zero_rows={name: s.zero_rows for name, s in states.items() if s.zero_rows},
        objects=writer.close(),
        keys_digest=keys_digest(columns.document, columns.position, columns.token),
        source_digest="00",
        ended=False,
        cut=False,
        cursor=None,
        self_check={},
        environment={},
        seconds={},
    )


def _stored(dtype: str) -> str:
    return {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[dtype]
