"""Bytes of a row, of a document and of a chunk, from a job's settings and names alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harvest.concepts.examples import keeps_examples
from harvest.config import Job

if TYPE_CHECKING:
    from harvest.model.sites import Name

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
COMPRESSED_BYTES = 16 << 20
"""Of a compressed chunk of every name together: one of each is decoded for a single row, and mixed batches hold the
rows of many at a time."""
LEAST_COMPRESSED = 64 << 10
"""Of one of them: what is worth a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes, of all names together."""

    row: int
    """As stored."""
    captured: int
    """Of a row while it waits to be stored."""
    example: int
    """Of what directions keep of a document."""
    document: int
    """That, and its pooled rows."""


def sizes_of(job: Job, names: Sequence[Name], store_dtype: str) -> Sizes:
    """What the names and the job's pools and directions come to."""
    row = sum(row_bytes(name.width, store_dtype) for name in names)
    state = sum(row_bytes(name.width, "float32") for name in names)
    sequences = len(job.data.columns)
    example = sequences * state * _kept_states(job)
    return Sizes(
        row=row,
        captured=state if store_dtype == "int8" else row,
        example=example,
        document=sequences * state * len(job.capture.pool or ()) + example,
    )


def chunk_bytes_of(job: Job, names: int) -> int:
    """Of an inner chunk, at most."""
    most = int(job.store.chunk_mb * 2**20)
    if job.store.compression == "none":
        return most
    return min(most, max(COMPRESSED_BYTES // max(1, names), LEAST_COMPRESSED))


def row_bytes(width: int, dtype: str) -> int:
    """Of a stored row of one name, before compression; int8 has a scale beside it."""
    return width * ITEMSIZE[dtype] + (ITEMSIZE["float32"] if dtype == "int8" else 0)


def _kept_states(job: Job) -> int:
    """States that directions keep of a document as examples; of `all` there are too few to count."""
    kept = [d for d in job.read_directions if keeps_examples(d, stores_rows=job.capture.store)]
    return sum(read.kind != "all" for direction in kept for read in direction.reads)
