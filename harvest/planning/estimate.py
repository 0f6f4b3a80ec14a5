"""What a run will hold and take: shard size by the first documents, bytes by what all are judged to come to, memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from harvest import glance
from harvest.concepts.examples import labelled
from harvest.config import Job
from harvest.errors import RequestError
from harvest.planning.totals import Totals, of_first, of_whole
from harvest.reduce.base import Block, Saved, save_states
from harvest.reduce.concepts import Concepts
from harvest.reduce.covariance import Covariance, held_bytes, saved_bytes
from harvest.reduce.known import reductions_of
from harvest.reduce.labels import make_labels
from harvest.source.rows import Rows, Source
from harvest.text.tokenise import Tokeniser

T = TypeVar("T")
MIB = 2**20
SHARD_BYTES = 1024 * MIB
SHARD_TOKENS = 131_072
"""`store.shard_documents = "auto"`: the largest power of two of documents within both."""
MAX_SHARD_DOCUMENTS = 2**20
PROBE_DOCUMENTS = 256
"""Documents, the first of the dataset, that shard size is judged from."""
PROBE_ROWS = 65_536
"""Source rows that the probe reads at most, however small the sample."""
TABLE_BYTES_PER_ROW = 4
"""Of the token table, compressed; measured on texts."""
LIBRARY_BYTES = 900 * MIB
"""torch, transformers, pyarrow and datasets once they are imported."""
BYTES_PER_BATCH_TOKEN = 128 * 1024
"""Of a forward's own intermediate values, for models of the 1B class."""
NORMS = 16.0
"""Of the rows of a name, the largest against the smallest: 64 counts of a histogram to every factor of two."""
TEXT_BYTES = 2 * SHARD_TOKENS * 256
"""Two shards of tokens and their tables: one being run, one read ahead."""
SUMS_SHARE = 0.1
"""What the sums of a covariance may come to, of the rows of their shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What the run will hold and take."""

    documents: int | None
    """Kept by the sample and limit; None where only reading to the end can tell."""
    tokens: int | None
    tokens_low: int | None
    tokens_high: int | None
    """Between these they are in 19 of 20 cases; None where nothing tells."""
    judged: str | None
    """As in Totals: from how much of the data the tokens are judged."""
    judged_documents: int
    """From so many documents that were tokenised."""
    tokens_each: float
    """Of the first documents, on average; nothing else is known where nobody knows how many there are."""
    rows: int | None
    shards: int | None
    bytes_per_row: int
    """Of all names together."""
    state_bytes: int
    """Of a shard's sums, without what waits for its partner in another shard."""
    store_bytes: int | None
    memory_bytes: int
    """Peak of one worker."""
    free_bytes: int | None
    """On the disk of the run; None for a store that does not say."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What the first documents hold."""

    documents: int
    tokens: int
    """That would run."""
    rows: int


def probe_documents(source: Source, tokeniser: Tokeniser) -> Probe:
    """Tokenises the first documents of the dataset, at most PROBE_DOCUMENTS of them."""
    sizes = _of_first_documents(source, tokeniser.sizes)
    return Probe(len(sizes), sum(tokens for tokens, _ in sizes), sum(rows for _, rows in sizes))


def span_names(source: Source, tokeniser: Tokeniser) -> frozenset[str]:
    """Of all spans in the same documents."""
    return frozenset().union(*_of_first_documents(source, tokeniser.span_names))


def _of_first_documents(source: Source, read: Callable[[Rows, int], Sequence[T]]) -> list[T]:
    """What `read(rows, at most so many documents)` finds in each of the first ones."""
    found: list[T] = []
    for file in source.files:
        rows = source.rows(file.number, 0, PROBE_ROWS if file.rows is None else min(file.rows, PROBE_ROWS))
        found += read(rows, PROBE_DOCUMENTS - len(found))
        if len(found) >= PROBE_DOCUMENTS:
            break
    return found


def refuse_empty(job: Job, source: Source) -> None:
    """RequestError where the data hold no document, as far as that can be told without reading to an end."""
    for file in source.files:
        rows = source.rows(file.number, 0, 1)
        if (
            source.kept(file.number, 0, file.rows)
            if file.rows is not None
            else any(True for _ in rows) or not rows.ended
        ):
            return
    found = sum(file.rows or 0 for file in source.files)
    if found:
        raise RequestError(
            f"data.sample = {job.data.sample}: none of the {found:,} rows of data.path = {job.data.path!r} is kept; "
            "allowed are a larger share and another data.seed"
        )
    names = glance.few([file.name for file in source.files])
    raise RequestError(
        f"data.path = {job.data.path!r}: no row in {names}; allowed are data with at least one, below the header "
        "where the format has one"
    )


def _documents(job: Job, source: Source) -> int | None:
    if any(file.rows is None for file in source.files):
        return None
    kept = sum(source.kept(file.number, 0, file.rows or 0) for file in source.files)
    return kept if job.data.limit is None else min(kept, job.data.limit)


def _shards(job: Job, source: Source, shard_documents: int) -> int | None:
    """Shards of the whole run; None where the data's end or `data.max_tokens` decides."""
    if job.data.max_tokens is not None or any(file.rows is None for file in source.files):
        return None
    shards = documents = 0
    for file in source.files:
        for start in range(0, file.rows or 0, shard_documents):
            if job.data.limit is not None and documents >= job.data.limit:
                return shards
            documents += source.kept(file.number, start, min(start + shard_documents, file.rows or 0))
            shards += 1
    return shards


def totals_of(
    job: Job, source: Source, tokeniser: Tokeniser, probe: Probe, context: int, *, closely: bool
) -> Totals | None:
    """What all documents come to, judged from the first ones unless it shall be `closely` looked at; None: no end."""
    documents = _documents(job, source)
    if documents is None:
        return None
    found = of_whole(job, source, tokeniser, documents, context) if closely else None
    return found or of_first(documents, probe.documents, probe.tokens, probe.rows)


def estimate(
    job: Job,
    source: Source,
    probe: Probe,
    totals: Totals | None,
    *,
    shard_documents: int,
    bytes_per_row: int,
    bytes_per_document: int,
    state_bytes: int,
    memory_bytes: int,
    free_bytes: int | None,
) -> Estimate:
    """What `totals` come to on disk; `memory_bytes` from `worker_memory`, `state_bytes` from `state_bytes_of`,
    `bytes_per_document` of pooled rows."""
    documents = _documents(job, source)
    tokens = low = high = rows = stored = None
    shards = _shards(job, source, shard_documents)
    if documents is not None and totals is not None:
        most = math.inf if job.data.max_tokens is None else job.data.max_tokens
        share = min(1.0, most / max(1.0, totals.tokens))
        tokens, rows = round(share * totals.tokens), round(share * totals.rows)
        if totals.spread is not None:
            low, high = (round(min(most, max(0.0, totals.tokens + s))) for s in (-totals.spread, totals.spread))
        stored = rows * (bytes_per_row + TABLE_BYTES_PER_ROW) if job.capture.store else 0
        stored += round(share * documents) * bytes_per_document
        stored += state_bytes * (math.ceil(share * documents / shard_documents) if shards is None else shards)
    return Estimate(
        documents=documents,
        tokens=tokens,
        tokens_low=low,
        tokens_high=high,
        judged=None if totals is None else totals.judged,
        judged_documents=probe.documents if totals is None else totals.documents,
        tokens_each=probe.tokens / max(1, probe.documents),
        rows=rows,
        shards=shards,
        bytes_per_row=bytes_per_row,
        state_bytes=state_bytes,
        store_bytes=stored,
        memory_bytes=memory_bytes,
        free_bytes=free_bytes,
    )


def state_bytes_of(job: Job, widths: Mapping[str, int]) -> int:
    """Bytes of one shard's saved sums; `widths`: name -> values of a row.

    Norms are taken to lie within a factor of NORMS of one another. Pairs come on top: their keys, and the members whose
    partner lies in another shard.
    """
    reductions = [one for one in reductions_of(job.statistics) if not isinstance(one, Covariance)]
    squares = sum(map(saved_bytes, widths.values())) if keeps_covariance(job) else 0
    number = np.arange(3, dtype=np.int64)
    rows = {name: torch.tensor([1.0, NORMS, 1.0])[:, None].expand(3, width) for name, width in widths.items()}
    concepts, labels = Concepts(), make_labels(np.array([0, 1, 1]), rows=3)
    blocks = {
        name: Block(rows=row, special=number == 2, document=number, position=number.astype(np.int32))
        for name, row in rows.items()
    }
    own: list[tuple[Saved[Any], Mapping[str, Any]]] = [
        (reduction, {name: reduction.update(reduction.zero(), block) for name, block in blocks.items()})
        for reduction in reductions
    ]
    one = {name: concepts.update(concepts.zero(), row, labels) for name, row in rows.items()}
    sums = {
        f"{direction.name}/{labelled(name, read.label)}": one[name]
        for direction in job.read_directions
        for read in direction.reads
        for name in rows
    }
    return len(save_states([*own, (concepts, sums)])) + squares


def keeps_covariance(job: Job) -> bool:
    """Whether the run keeps the covariance of every name."""
    return any(isinstance(one, Covariance) for one in reductions_of(job.statistics))


def refuse_heavy_sums(
    job: Job, probe: Probe, widths: Mapping[str, int], *, shard_documents: int, bytes_per_row: int
) -> None:
    """Sums of a covariance grow with the square of the width, and every shard has its own: RequestError where they
    come to more than SUMS_SHARE of the rows of a whole shard, as they are stored or would be."""
    rows = (job.data.sample or 1.0) * probe.rows / max(1, probe.documents) * shard_documents * bytes_per_row
    sums = sum(map(saved_bytes, widths.values())) if keeps_covariance(job) else 0
    if rows and sums > SUMS_SHARE * rows:
        asked = "covariance = true" if job.statistics.covariance else "also = 'covariance'"
        least = math.ceil(sums / SUMS_SHARE / rows * shard_documents)
        raise RequestError(
            f"statistics.{asked}: its sums are {glance.size(sums)} in every shard, whose rows are {glance.size(rows)}; "
            f"allowed is a tenth of these: store.shard_documents = {least} or more instead of {shard_documents}, or "
            "names of fewer values"
        )


def sums_memory(job: Job, widths: Mapping[str, int], threads: int) -> int:
    """Bytes that covariances take of a worker: those of a shard being written, those before and after a window, their
    saved form, and what the names that are reduced side by side need meanwhile."""
    held = sorted(map(held_bytes, widths.values())) if keeps_covariance(job) else []
    return 4 * sum(held) + 2 * sum(held[-threads:])


def worker_memory(
    *,
    rows_per_sort_window: int,
    sort_windows: int,
    bytes_per_row: int,
    tokens_per_batch: int,
    weight_bytes: int,
    examples_bytes: int = 0,
    chunks_bytes: int = 0,
    logits_bytes: int = 0,
    sums_bytes: int = 0,
) -> int:
    """Peak of one worker in bytes: libraries, weights while they load, sort windows, a batch, a shard's text, the
    examples of two shards, the chunks that fill up before they are compressed, the logits of a forward, and sums."""
    windows = sort_windows * rows_per_sort_window * bytes_per_row
    forward = tokens_per_batch * BYTES_PER_BATCH_TOKEN
    more = examples_bytes + chunks_bytes + logits_bytes + sums_bytes
    return LIBRARY_BYTES + 2 * weight_bytes + windows + forward + TEXT_BYTES + more


def shard_documents(job: Job, probe: Probe, bytes_per_row: int, bytes_per_document: int) -> int:
    """The largest power of two of source rows that stays within SHARD_BYTES and SHARD_TOKENS on average."""
    if job.store.shard_documents != "auto":
        return job.store.shard_documents
    if probe.documents == 0:
        return PROBE_DOCUMENTS
    share = job.data.sample or 1.0
    bytes_per_source_row = share * probe.rows / probe.documents * (bytes_per_row if job.capture.store else 0)
    bytes_per_source_row += share * bytes_per_document
    tokens_per_source_row = share * probe.tokens / probe.documents
    most = min(
        SHARD_BYTES / bytes_per_source_row if bytes_per_source_row else MAX_SHARD_DOCUMENTS,
        SHARD_TOKENS / tokens_per_source_row if tokens_per_source_row else MAX_SHARD_DOCUMENTS,
    )
    return 1 << max(0, min(int(most), MAX_SHARD_DOCUMENTS).bit_length() - 1)
