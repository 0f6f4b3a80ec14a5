"""Which shard comes next, what a failure means, when the run is over: a pure state machine.

It knows no Ray, no files, no clock and no threads; outcomes go in, assignments come out. Shards are handed
out in dataset order. A file whose length is known is cut up front; one whose length only its end can tell is
handed out slice by slice, each after its forerunner has been read (`read`), because the cursor, the end and
what is left of `data.limit` and `data.max_tokens` come from there.
"""

from __future__ import annotations

from collections import deque
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A shard that was given up."""

    shard: Shard
    attempts: int
    error: str
    permanent: bool
    """The error would repeat itself."""


class Schedule:
    """Hands out shards until every one is committed or given up."""

    def __init__(
        self,
        files: Sequence[SourceFile],
        *,
        shard_documents: int,
        attempts: int,
        kept: Callable[[int, int, int], int],
        limit: int | None = None,
        max_tokens: int | None = None,
        committed: Mapping[str, ShardRecord] | None = None,
    ) -> None:
        """`kept(file, start, stop)` tells how many rows of a range the sample keeps, without reading them."""
        self._files, self._shard_documents, self._attempts, self._kept = files, shard_documents, attempts, kept
        self._limit, self._max_tokens = limit, max_tokens
        self._facts: dict[str, ReadFacts] = {key: facts_of(record) for key, record in (committed or {}).items()}
        self._done: set[str] = set(self._facts)
        self._tries: dict[str, int] = {}
        self._retry: deque[Assignment] = deque()
        self._running: dict[str, Assignment] = {}
        self.failures: list[Failure] = []
        self._order = self._in_dataset_order()
        self._waiting_for: str | None = None
        self._over = False
        self._stopped = False

    # ---- out ---------------------------------------------------------------------------------------------------

    def next(self) -> Assignment | None:
        """The next shard to work on; None where there is none now (see `finished`)."""
        if self._stopped:
            return None
        if self._retry:
            return self._hand_out(self._retry.popleft())
        if self._stuck:
            return None
        while not self._over:
            assignment = next(self._order, None)
            if assignment is None:
                self._over = True
            elif assignment.shard.key not in self._done:
                return self._hand_out(assignment)
        return None

    @property
    def finished(self) -> bool:
        """Nothing is running and nothing will be handed out any more, as far as `next` has looked."""
        if self._running or self._retry:
            return False
        return self._stopped or self._over or self._stuck

    @property
    def _stuck(self) -> bool:
        """The next slice cannot be known before its forerunner has been read."""
        return self._waiting_for is not None and self._waiting_for not in self._facts

    @property
    def running(self) -> list[str]:
        """Keys of the shards that are out, in the order in which they went."""
        return list(self._running)

    # ---- in ----------------------------------------------------------------------------------------------------

    def read(self, key: str, facts: ReadFacts) -> None:
        """A shard has been read and tokenised; its forward is still to come."""
        self._facts.setdefault(key, facts)

    def committed(self, record: ShardRecord) -> None:
        """A shard's record stands in the ledger."""
        self._running.pop(record.shard.key, None)
        self._facts.setdefault(record.shard.key, facts_of(record))
        self._done.add(record.shard.key)

    def failed(self, key: str, error: str, *, permanent: bool) -> bool:
        """A try has failed; True when the shard will be tried again, False when it is given up.

        `permanent` marks an error that would repeat itself.
        """
        assignment = self._running.pop(key)
        if not permanent and self._tries[key] < self._attempts:
            self._retry.append(assignment)
            return True
        self.failures.append(
            Failure(shard=assignment.shard, attempts=self._tries[key], error=error, permanent=permanent)
        )
        return False

    def stop(self) -> None:
        """Hands out nothing more; what is running may still report."""
        self._stopped = True
        self._retry.clear()

    # ---- inside ------------------------------------------------------------------------------------------------

    def _hand_out(self, assignment: Assignment) -> Assignment:
        key = assignment.shard.key
        self._tries[key] = self._tries.get(key, 0) + 1
        self._running[key] = assignment
        return assignment

    def _in_dataset_order(self) -> Iterator[Assignment]:
        """Every shard of the dataset. Where the next one depends on what this one holds, it waits for its facts."""
        documents, tokens = 0, 0
        for file in self._files:
            cursor: Mapping[str, Any] | None = None
            for shard in self._slices(file):
                if self._limit is not None and documents >= self._limit:
                    return
                yield Assignment(
                    shard=shard,
                    documents=None if self._limit is None else self._limit - documents,
                    tokens=None if self._max_tokens is None else self._max_tokens - tokens,
                    cursor=cursor,
                )
                if file.rows is not None and self._max_tokens is None:
                    documents += self._kept(shard.file, shard.start, shard.stop)
                    continue
                facts = self._facts[shard.key]
                documents, tokens, cursor = documents + facts.documents, tokens + facts.tokens, facts.cursor
                if facts.cut:
                    return
                if facts.ended:
                    break

    def _slices(self, file: SourceFile) -> Iterator[Shard]:
        """The shards of a file, which wait for their forerunner where the length is not known."""
        index = 0
        while file.rows is None or index * self._shard_documents < file.rows:
            start = index * self._shard_documents
            stop = start + self._shard_documents if file.rows is None else min(start + self._shard_documents, file.rows)
            shard = Shard(file=file.number, index=index, start=start, stop=stop)
            sequential = file.rows is None or self._max_tokens is not None
            self._waiting_for = shard.key if sequential else None
            yield shard
            index += 1
