"""Datasets without data: files of a true length, and what the pipeline would tell about each shard of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from harvest.records import Assignment, Shard, ShardRecord, SourceFile
from harvest.runtime.schedule import Schedule
from harvest.runtime.slices import ReadFacts


def files(*rows: int | None) -> list[SourceFile]:
    return [
        SourceFile(number=i, name=f"{i}", path="", format="jsonl", rows=n, fingerprint="") for i, n in enumerate(rows)
    ]


def record(shard: Shard, facts: ReadFacts, attempt: int = 1) -> ShardRecord:
    blank: dict[str, Any] = {field.name: {} for field in dataclasses.fields(ShardRecord)}
    return ShardRecord(
        **blank
        | {
            "format": 1,
            "shard": shard,
            "attempt": f"{shard.key}.00000000-{attempt}",
            "rows": 0,
            "documents": facts.documents,
            "tokens": facts.tokens,
            "ended": facts.ended,
            "cut": facts.cut,
            "cursor": facts.cursor,
            "keys_digest": "",
            "source_digest": "",
        }
    )


class World:
    """Files of a true length, one token per document, read as the pipeline would read them."""

    def __init__(self, lengths: Sequence[int], known: Sequence[bool], size: int, **limits: int | None) -> None:
        self.lengths = lengths
        self.files = files(*(n if k else None for n, k in zip(lengths, known)))
        self.size, self.limits = size, limits
        self.kept = lambda file, start, stop: max(0, min(stop, lengths[file]) - start)

    def schedule(self, attempts: int = 3, committed: dict[str, ShardRecord] | None = None) -> Schedule:
        return Schedule(
            self.files,
            shard_documents=self.size,
            attempts=attempts,
            kept=self.kept,
            committed=committed,
            **self.limits,  # type: ignore[arg-type]
        )

    def facts(self, a: Assignment) -> ReadFacts:
        there = self.kept(a.shard.file, a.shard.start, a.shard.stop)
        taken = min(there, *(n for n in (a.documents, a.tokens) if n is not None), there)
        cut = taken < there or taken == a.documents
        ended = not cut and a.shard.stop >= self.lengths[a.shard.file]
        return ReadFacts(documents=taken, tokens=taken, ended=ended, cut=cut, cursor={"row": a.shard.start + taken})

    def expected(self) -> list[tuple[int, int]]:
        rows = [(file, row) for file, n in enumerate(self.lengths) for row in range(n)]
        limit = min(n for n in (self.limits.get("limit"), self.limits.get("max_tokens"), len(rows)) if n is not None)
        return rows[:limit]


def rows_of(ledger: dict[str, ShardRecord]) -> list[tuple[int, int]]:
    return sorted(
        (r.shard.file, row) for r in ledger.values() for row in range(r.shard.start, r.shard.start + r.documents)
    )


worlds = st.builds(
    lambda spec, size, limit, tokens: World(
        [n for n, _ in spec], [k for _, k in spec], size, limit=limit, max_tokens=tokens
    ),
    st.lists(st.tuples(st.integers(0, 25), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(1, 60)),
    st.one_of(st.none(), st.integers(1, 60)),
)
