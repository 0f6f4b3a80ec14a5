"""How far a run is: what is committed as its records say, what is under way as the workers tell, each token once.

A shard under way counts what the try at it that has come furthest has read, and from its record on what that says. So
a try that is repeated, or that two workers are at, moves nothing twice, and a worker that dies moves nothing back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harvest.records import ShardRecord

if TYPE_CHECKING:  # torch, which reading a run's status does without
    from harvest.outcome import Progress
    from harvest.plan import Plan

WINDOW_SECONDS = 60.0
"""Speeds are those of the last minute: workers come and go."""
SAMPLE_SECONDS = 1.0
"""Between two samples of the totals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a run will come to, as its plan judged; None where it could not."""

    documents: int | None
    tokens: int | None
    rows: int | None = None
    shards: int | None
    judged: str | None = None
    """From how much of the data, as in `planning.totals.Totals`; None where nobody says."""

    @classmethod
    def of(cls, plan: Plan) -> Expected:
        """As this plan judges."""
        told = plan.estimate
        amounts = {"documents": told.documents, "tokens": told.tokens, "rows": told.rows, "shards": told.shards}
        return cls(**amounts, judged=told.judged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Work that is done."""

    tokens: int = 0
    rows: int = 0
    bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(tokens=self.tokens + other.tokens, rows=self.rows + other.rows, bytes=self.bytes + other.bytes)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(tokens=self.tokens - other.tokens, rows=self.rows - other.rows, bytes=self.bytes - other.bytes)


NOTHING = Amount()


class Tally:
    """Totals, speeds and the time left. One thread tells it of events; any other may read it meanwhile."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.start(Expected(documents=None, tokens=None, shards=None), ())

    def start(self, expected: Expected, committed: Iterable[ShardRecord]) -> None:
        """Begins anew. What earlier lives committed is part of the way but not of the speed."""
        self._expected = expected
        self.shards = self.documents = self.skipped = self.failed = self.retries = 0
        self._kept = self._under_way = NOTHING
        self._tries: dict[str, dict[str, Amount]] = {}
        self._done: set[str] = set()
        self._shipped = 0
        """Bytes of this life, those of tries that failed included."""
        self._forward_seconds = self._worker_seconds = 0.0
        self.workers = 1
        self.ready()
        for record in committed:
            self.committed(record)
        self.ready()

    def ready(self) -> None:
        """Work begins: speeds count from now."""
        self.begin = self._since = self._clock()
        self._shipped = 0
        self._samples = deque([(self.begin, self.tokens, 0)])

    def crew(self, workers: int) -> None:
        """So many workers are ready from now on."""
        now = self._clock()
        self._worker_seconds += self.workers * (now - self._since)
        self._since, self.workers = now, workers

    def advanced(self, advance: Progress) -> None:
        """Some batches of a try at a shard."""
        self._forward_seconds += advance.forward_seconds
        self._shipped += advance.bytes
        if advance.shard not in self._done:  # else another try was faster
            tries = self._tries.setdefault(advance.shard, {})
            before = _furthest(tries)
            more = Amount(tokens=advance.tokens, rows=advance.rows, bytes=advance.bytes)
            tries[advance.attempt] = tries.get(advance.attempt, NOTHING) + more
            self._under_way += _furthest(tries) - before
        self._sample()

    def committed(self, record: ShardRecord) -> None:
        """A shard exists."""
        key, size = record.shard.key, sum(item.bytes for item in record.objects.values())
        if key in self._done:
            return
        if key not in self._tries:  # nobody has told of its batches
            self._shipped += size
        self._forget(key)
        self._done.add(key)
        self._kept += Amount(tokens=record.tokens, rows=record.rows, bytes=size)
        self.shards += 1
        self.documents += record.documents
        self.skipped += sum(record.skipped.values())
        self._sample()

    def retried(self) -> None:
        """A try at a shard failed, and it will be tried again."""
        self.retries += 1

    def gave_up(self, shard: str) -> None:
        """A shard failed for good: what was done of it is lost."""
        self.failed += 1
        self._forget(shard)

    def drop(self) -> None:
        """The work ends early: what is not committed is lost."""
        for shard in list(self._tries):
            self._forget(shard)

    def _forget(self, shard: str) -> None:
        self._under_way -= _furthest(self._tries.pop(shard, {}))

    def _sample(self) -> None:
        now = self._clock()
        if now - self._samples[-1][0] >= SAMPLE_SECONDS:
            self._samples.append((now, self.tokens, self._shipped))
            while now - self._samples[0][0] > WINDOW_SECONDS and len(self._samples) > 2:
                self._samples.popleft()

    # ---- totals --------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Of all lives, once each."""
        return self._kept.tokens + self._under_way.tokens

    @property
    def rows(self) -> int:
        """Captured, in each name."""
        return self._kept.rows + self._under_way.rows

    @property
    def bytes(self) -> int:
        """In the store, or on the way there."""
        return self._kept.bytes + self._under_way.bytes

    @property
    def expected_documents(self) -> int | None:
        """As planned."""
        return self._expected.documents

    @property
    def expected_shards(self) -> int | None:
        """As planned."""
        return self._expected.shards

    @property
    def expected_tokens(self) -> int | None:
        """Committed shards know better than a plan that has seen the first documents; one that has seen documents all
        over the data knows better what is still to come; and one that has seen all of them knows."""
        return self._judged(self._kept.tokens, self._expected.tokens)

    @property
    def expected_rows(self) -> int | None:
        """As `expected_tokens`."""
        return self._judged(self._kept.rows, self._expected.rows)

    def _judged(self, kept: int, planned: int | None) -> int | None:
        documents, judged = self._expected.documents, self._expected.judged
        if not documents or not self.documents or judged == "all":
            return planned
        if planned is not None and judged in ("lengths", "places"):
            return round(kept + planned * max(0.0, 1 - self.documents / documents))
        return round(kept / self.documents * documents)

    # ---- speeds --------------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Since work began."""
        return max(self._clock() - self.begin, 1e-9)

    @property
    def tokens_per_second(self) -> float:
        """Of the last minute."""
        at, tokens, _ = self._samples[0]
        return max(0, self.tokens - tokens) / max(self._clock() - at, 1e-9)

    @property
    def bytes_per_second(self) -> float:
        """Of the last minute, those of tries that failed included."""
        at, _, shipped = self._samples[0]
        return max(0, self._shipped - shipped) / max(self._clock() - at, 1e-9)

    @property
    def forward_share(self) -> float:
        """Forward-busy time over the time that workers had, in this life; at most 1."""
        had = self._worker_seconds + self.workers * (self._clock() - self._since)
        return min(1.0, self._forward_seconds / max(had, 1e-9))

    @property
    def share(self) -> float | None:
        """Tokens done of those expected, at most 1."""
        expected = self.expected_tokens
        return None if not expected else min(1.0, self.tokens / expected)

    @property
    def seconds_left(self) -> float | None:
        """At the speed of the last minute; None where nothing moves, or nobody knows how much there is."""
        expected, speed = self.expected_tokens, self.tokens_per_second
        if expected is None or not speed:
            return None
        return max(0, expected - self.tokens) / speed

    # ---- in words ------------------------------------------------------------------------------------------------

    @property
    def counts_text(self) -> str:
        """`documents 128 of 427 (2 skipped)  tokens 68,283 of about 160,000  rows ...  shards 4 of 9`."""
        skipped = f" ({self.skipped:,} skipped)" if self.skipped else ""
        parts = [
            f"documents {_of(self.documents, self.expected_documents)}{skipped}",
            f"tokens {_of(self.tokens, self.expected_tokens, 'about ')}",
            f"rows {self.rows:,}",
            f"shards {_of(self.shards, self.expected_shards)}",
        ]
        if self.retries:
            parts.append(f"{self.retries:,} tried again")
        if self.failed:
            parts.append(f"{self.failed:,} failed")
        return "  ".join(parts)

    @property
    def speed_text(self) -> str:
        """`12,345 tokens/s  45 MB/s`."""
        return f"{self.tokens_per_second:,.0f} tokens/s  {self.bytes_per_second / 1e6:,.0f} MB/s"

    @property
    def left_text(self) -> str:
        """`1:02:03 left`; empty where nobody knows."""
        return "" if self.seconds_left is None else f"{clock_text(self.seconds_left)} left"


def clock_text(seconds: float) -> str:
    """`2:03`, `1:02:03`, `3 d 1:02:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if not hours:
        return f"{minute}:{second:02d}"
    return f"{days} d " * bool(days) + f"{hour}:{minute:02d}:{second:02d}"


def _of(done: int, expected: int | None, about: str = "") -> str:
    return f"{done:,}" if expected is None else f"{done:,} of {about if done != expected else ''}{expected:,}"


def _furthest(tries: dict[str, Amount]) -> Amount:
    return max(tries.values(), key=lambda amount: amount.tokens, default=NOTHING)
