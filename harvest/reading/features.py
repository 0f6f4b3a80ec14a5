"""Pooled rows of a run as scikit-learn takes them: one float32 row per document that has rows, in documents() order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harvest.errors import RequestError
from harvest.records import ArraySpec, ShardRecord
from harvest.reduce.pool import DocumentPool
from harvest.store import layout
from harvest.store.arrays import StoredArray
from harvest.store.files import Files
from harvest.store.storedrows import StoredRows
from harvest.store.tables import StoredTable, sequence_numbers

POOLS = ("mean", "last", "max")
READ_BYTES = 8 << 20
"""Of stored rows, at a time, where they are pooled now."""


def pooled_rows(
    files: Files, records: Sequence[ShardRecord], name: str, pool: str, *, width: int, dtype: str, stored: Sequence[str]
) -> np.ndarray:
    """float32 [documents with rows, width]; `stored`: the pools that the run keeps, `dtype` of its rows.

    A pool that was not kept is computed from the rows, with the same bits. Raises RequestError where there are none,
    DamageError where an array is missing or has another number of rows than the documents table says.
    """
    if pool not in POOLS:
        raise RequestError(f"pool = {pool!r}: allowed are {', '.join(POOLS)}")
    parts = [np.empty((0, width), np.float32)]
    for record in records:
        if record.rows and pool in stored:
            spec = ArraySpec(rows=documents_with_rows(files, record), width=width, dtype="float32")
            parts.append(StoredArray(files, record.attempt, layout.pooled_name(pool, name), spec).read(0, spec.rows))
        elif record.rows and layout.TOKENS in record.objects:
            rows = StoredRows(files, record.attempt, name, ArraySpec(rows=record.rows, width=width, dtype=dtype))
            parts += _pooled_now(files, record, rows, pool)
        elif record.rows:
            kept = f"it keeps {', '.join(stored)}" if stored else "it keeps no pools"
            raise RequestError(f"features({name!r}, {pool!r}): this run stores no rows (capture.store = false); {kept}")
    return np.concatenate(parts)


def documents_with_rows(files: Files, record: ShardRecord) -> int:
    """How many rows each pooled array of a shard has; of a contrast, one for each sequence."""
    rows = StoredTable(files, _inside(record, layout.DOCUMENTS)).read(["rows"]).column("rows")
    return int((rows.to_numpy() > 0).sum())


def _inside(record: ShardRecord, path: str) -> str:
    return f"{layout.attempt_path(record.attempt)}/{path}"


def _pooled_now(files: Files, record: ShardRecord, rows: StoredRows, pool: str) -> Iterator[np.ndarray]:
    tokens = StoredTable(files, _inside(record, layout.TOKENS))
    variant = tokens.read(["variant"]).column("variant").to_numpy() if "variant" in tokens.schema.names else None
    numbers = sequence_numbers(tokens.read(["document"]).column("document").to_numpy(), variant)
    pooled = DocumentPool([pool], rows.shape[1])
    step = max(1, READ_BYTES // rows.row_bytes)
    for start in range(0, record.rows, step):
        stop = min(start + step, record.rows)
        sequence = numbers[start:stop]
        for found in pooled.update(rows.read(start, stop), sequence):
            yield found[pool]
    for found in pooled.finish():
        yield found[pool]


def labels_of(documents: pa.Table, labels: Sequence[str]) -> pa.Table:
    """The columns of the documents that have rows. Raises RequestError for one that documents() does not have."""
    for label in labels:
        if label not in documents.column_names:
            raise RequestError(
                f"labels: {label!r} is not in documents(): {', '.join(documents.column_names)}; "
                "data.keep says which columns of the data are kept"
            )
    return documents.filter(pc.greater(documents.column("rows"), 0)).select(list(labels))
