"""The groups of directions, counted in the data before anything runs: an empty one is refused while it costs seconds.

Pairs by dataset order need to know how many of each group lie before every shard; they alone read all labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harvest.config import Job
from harvest.errors import RequestError
from harvest.records import SourceRow
from harvest.settings.direction import DirectionSettings
from harvest.source.rows import Source
from harvest.text.examples import A, B, group_of

SCAN_ROWS = 2**18
"""Rows that are looked at for a group that has not been met; where there are more, only the end can tell."""
WHOLE_FILE = 2**53
"""More rows than a file has."""


@dataclass(slots=True)
class _Count:
    """Of one direction."""

    settings: DirectionSettings
    every: list[int] = field(default_factory=lambda: [0, 0])
    """Of A and B, whatever their documents hold: what pairs by order count."""
    usable: list[int] = field(default_factory=lambda: [0, 0])
    """Those with something to read."""

    @property
    def settled(self) -> bool:
        """Each group that is needed has been met, and nothing else is asked."""
        needed = (A,) if self.settings.modes == ("single_group",) else (A, B)
        return self.settings.pair != "order" and all(self.usable[group] for group in needed)


class GroupsBefore:
    """Of every direction that pairs by order, how many of A and of B the dataset holds before a shard."""

    def __init__(self, shard_documents: int) -> None:
        self._shard_documents = shard_documents
        self._marks: dict[tuple[int, int], Mapping[str, tuple[int, int]]] = {}

    def note(self, file: int, row: int, counts: Sequence[_Count]) -> None:
        """What has been counted when a row is reached; rows rise within a file, and need not be all there are."""
        key = (file, row // self._shard_documents)
        if key not in self._marks:
            self._marks[key] = _ordered(counts)

    def __call__(self, file: int, start: int) -> Mapping[str, tuple[int, int]]:
        """For the shard of a file that starts at this row; empty without such directions."""
        return self._marks.get((file, start // self._shard_documents), {})


def _ordered(counts: Sequence[_Count]) -> dict[str, tuple[int, int]]:
    return {c.settings.name: (c.every[A], c.every[B]) for c in counts if c.settings.pair == "order"}


def count_groups(job: Job, source: Source, shard_documents: int) -> GroupsBefore:
    """Reads labels until every group has been met, be it beyond `data.limit`; all of them where pairs go by order.

    Raises RequestError naming a group without a document, and groups of different size where they are paired by order.
    """
    counts = [_Count(direction) for direction in job.read_directions]
    before = GroupsBefore(shard_documents)
    _refuse_order_of_streams(counts, source)
    looked, limit, broken = 0, job.data.limit, list[str]()
    for looked, (file, row) in enumerate(_rows(source), 1):
        within = limit is None or looked <= limit
        if within:
            before.note(file, row.row, counts)
        if all(count.settled for count in counts):
            return before
        if looked > SCAN_ROWS and not (within and any(count.settings.pair == "order" for count in counts)):
            break
        if row.error is not None:
            broken.append(row.error)
        usable = all(_holds(row.values.get(column)) for column in job.data.columns)
        for count in counts:
            for variant in range(len(job.data.columns)):
                group = group_of(count.settings, row.values, variant)
                if group in (A, B):
                    count.every[group] += within
                    count.usable[group] += usable
    else:
        if _can_tell(source):
            for count in counts:
                _refuse_empty(count, looked, broken)
    for count in counts:
        _refuse_unequal(count, job)
    return before


def _holds(value: Any) -> bool:
    """A cell has something to read."""
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def _rows(source: Source) -> Iterator[tuple[int, SourceRow]]:
    """(file, row) of every document of the data, as far as that can be read ahead."""
    for file in source.files:
        if file.rows is None and file.format in ("stream", "objects"):
            return
        for row in source.rows(file.number, 0, WHOLE_FILE if file.rows is None else file.rows):
            yield file.number, row


def _can_tell(source: Source) -> bool:
    return not any(file.rows is None and file.format in ("stream", "objects") for file in source.files)


def _refuse_order_of_streams(counts: Sequence[_Count], source: Source) -> None:
    ordered = next((count for count in counts if count.settings.pair == "order"), None)
    if ordered is not None and not _can_tell(source):
        raise RequestError(
            f"direction {ordered.settings.name!r}: pair = 'order' counts the groups ahead, which a stream does not "
            "allow; allowed here is 'column:NAME'"
        )


def _refuse_empty(count: _Count, looked: int, broken: Sequence[str]) -> None:
    """`broken`: the faults of documents that cannot be read, which may be why."""
    settings = count.settings
    why = f"; {len(broken)} cannot be read, the first one: {broken[0]}" if broken else ""
    if settings.by_variant and not count.usable[A]:
        raise RequestError(
            f"direction {settings.name!r}: groups A and B are empty: in none of {looked} documents do both texts of "
            f"data.contrast hold anything{why}"
        )
    for group, values in ((A, settings.positive), (B, settings.negative)):
        if values is None or count.usable[group]:
            continue
        asked = values if isinstance(values, str) else ", ".join(map(repr, values))
        raise RequestError(
            f"direction {settings.name!r}: group {'AB'[group]} is empty (A {count.usable[A]} documents, "
            f"B {count.usable[B]}): {settings.column} is {asked} in none of {looked} documents "
            f"that hold anything{why}"
        )


def _refuse_unequal(count: _Count, job: Job) -> None:
    settings, (a, b) = count.settings, count.every
    paired = {"paired_rejection", "pca"} & set(settings.modes)
    if settings.pair == "order" and paired and a != b and job.data.on_bad == "fail":
        raise RequestError(
            f"direction {settings.name!r}: pair = 'order' of {a} documents of A and {b} of B; allowed are as many of "
            "each, or data.on_bad = 'skip', which leaves out those without a partner"
        )
