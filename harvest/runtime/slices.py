"""Which shards a dataset has, in dataset order, and which of them can be worked on now.

A file whose length is known is cut up front. One whose length only its end can tell is handed out slice by slice, each
after its forerunner has been read, because the cursor and the end come from there; so are all files where a limit
counts what only reading can tell. Files that do not wait for each other are lanes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harvest.records import Assignment, Shard, ShardRecord, SourceFile


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFacts:
    """What reading a shard told, whether it was committed in an earlier life or has just been tokenised."""

    documents: int
    """Documents taken, skipped ones included: what `data.limit` counts."""
    tokens: int
    """Tokens that run: what `data.max_tokens` counts."""
    ended: bool
    """The file ends here."""
    cut: bool
    """A limit ended the shard early, so nothing comes after it."""
    cursor: Mapping[str, Any] | None


def facts_of(record: ShardRecord) -> ReadFacts:
    """The same facts of a committed shard."""
    return ReadFacts(
        documents=record.documents, tokens=record.tokens, ended=record.ended, cut=record.cut, cursor=record.cursor
    )


class Slices:
    """The shards of a dataset that nobody has taken yet."""

    def __init__(
        self,
        files: Sequence[SourceFile],
        *,
        shard_documents: int,
        kept: Callable[[int, int, int], int],
        limit: int | None,
        max_tokens: int | None,
        committed: Mapping[str, ShardRecord],
        mark: Callable[[int, int], Mapping[str, Any] | None],
        before: Callable[[int, int], Mapping[str, tuple[int, int]]],
    ) -> None:
        """`kept(file, start, stop)` tells how many rows of a range the sample keeps, without reading them.

        `mark(file, row)` is a cursor close before a row, for files of which the coordinator has an index;
        `before(file, row)` what lies before a shard of the groups of directions that pair by order.
        """
        self._mark, self._before = mark, before
        self._shard_documents, self._kept = shard_documents, kept
        self._limit, self._max_tokens = limit, max_tokens
        self._facts = {key: facts_of(record) for key, record in committed.items()}
        self.done: set[str] = set(committed)
        """Keys of the shards that need no work any more."""
        together = max_tokens is not None or limit is not None
        self._unopened: Iterator[Sequence[SourceFile]] = iter([files] if together else [[file] for file in files])
        self._all_open = False
        self._lanes: list[_Lane] = []

    def take(self, worker: str, *, patient: bool) -> Assignment | None:
        """The next shard for a worker: of the file that it reads, else of a file that nobody reads, else of any.

        `patient`: the worker has something to do, and waits rather than leave its file. None: nothing now.
        """
        self._lanes = [lane for lane in self._lanes if not lane.over]  # else a worker's first file would stay its own
        own = next((lane for lane in self._lanes if lane.reader == worker), None)
        if own is not None and (own.head is not None or (patient and not own.over)):
            return own.take(worker)
        lane = self._open() or next((lane for lane in self._lanes if lane.head is not None), None)
        return None if lane is None else lane.take(worker)

    def read(self, key: str, facts: ReadFacts) -> None:
        """A shard has been read and tokenised."""
        self._facts.setdefault(key, facts)

    def waiting_for(self) -> list[str] | None:
        """Shards that must be read before more can be taken; None while some can be taken now, [] when none is left.

        Looks for the next file that has any, so call it when `take` has nothing more to give.
        """
        found = self._open()
        self._lanes = [lane for lane in self._lanes if not lane.over]
        if found is not None or any(lane.head is not None for lane in self._lanes):
            return None
        return [lane.waits_for for lane in self._lanes if lane.waits_for is not None]

    def _open(self) -> _Lane | None:
        """A lane with something to take that no worker reads yet."""
        unread = next((lane for lane in self._lanes if lane.reader is None and lane.head is not None), None)
        while unread is None and not self._all_open:
            files = next(self._unopened, None)
            if files is None:
                self._all_open = True
                break
            lane = _Lane(self._in_order(files), self._facts, self.done)
            if lane.head is not None:
                unread = lane
            if not lane.over:
                self._lanes.append(lane)
        return unread

    def _in_order(self, files: Sequence[SourceFile]) -> Iterator[tuple[Assignment, bool]]:
        """Every shard of these files, and whether what follows depends on what it holds."""
        documents, tokens = 0, 0
        counts = self._max_tokens is not None or (self._limit is not None and any(file.rows is None for file in files))
        for file in files:
            cursor: Mapping[str, Any] | None = None
            for shard in self._cut(file):
                if self._limit is not None and documents >= self._limit:
                    return
                waits = file.rows is None or counts
                assignment = Assignment(
                    shard=shard,
                    documents=None if self._limit is None else self._limit - documents,
                    tokens=None if self._max_tokens is None else self._max_tokens - tokens,
                    cursor=cursor if waits else self._mark(shard.file, shard.start),
                    before=self._before(shard.file, shard.start),
                )
                yield assignment, waits
                if not waits:
                    documents += self._kept(shard.file, shard.start, shard.stop)
                    continue
                facts = self._facts[shard.key]
                documents, tokens, cursor = documents + facts.documents, tokens + facts.tokens, facts.cursor
                if facts.cut:
                    return
                if facts.ended:
                    break

    def _cut(self, file: SourceFile) -> Iterator[Shard]:
        index = 0
        while file.rows is None or index * self._shard_documents < file.rows:
            start = index * self._shard_documents
            stop = start + self._shard_documents if file.rows is None else min(start + self._shard_documents, file.rows)
            yield Shard(file=file.number, index=index, start=start, stop=stop)
            index += 1


class _Lane:
    """Shards that come one after the other."""

    def __init__(
        self, order: Iterator[tuple[Assignment, bool]], facts: Mapping[str, ReadFacts], done: set[str]
    ) -> None:
        self._order, self._facts, self._done = order, facts, done
        self._head: Assignment | None = None
        self._forerunner: str | None = None
        self._ended = False
        self.reader: str | None = None
        """Who took the last one."""

    @property
    def head(self) -> Assignment | None:
        """The next shard that is not done; None where it is not known yet, or there is none."""
        while self._head is None and not self._ended and self.waits_for is None:
            found = next(self._order, None)
            if found is None:
                self._ended = True
            else:
                assignment, waits = found
                self._forerunner = assignment.shard.key if waits else None
                self._head = None if assignment.shard.key in self._done else assignment
        return self._head

    @property
    def waits_for(self) -> str | None:
        """The shard that must be read first."""
        return self._forerunner if self._head is None and self._forerunner not in self._facts else None

    @property
    def over(self) -> bool:
        return self.head is None and self._ended

    def take(self, worker: str) -> Assignment | None:
        taken, self._head = self.head, None
        if taken is not None:
            self.reader = worker
        return taken
