"""The schedule as a law: whatever fails, in whatever order, every shard is committed once or given up by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from harvest.records import Assignment, Shard, ShardRecord, SourceFile
from harvest.runtime.schedule import ReadFacts, Schedule


def files(*rows: int | None) -> list[SourceFile]:
    return [
        SourceFile(number=i, name=f"{i}", path="", format="jsonl", rows=n, fingerprint="") for i, n in enumerate(rows)
    ]


def record(shard: Shard, facts: ReadFacts) -> ShardRecord:
    blank: dict[str, Any] = {field.name: {} for field in dataclasses.fields(ShardRecord)}
    return ShardRecord(
        **blank
        | {
            "format": 1,
            "shard": shard,
            "attempt": f"{shard.key}.00000000-1",
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


def drive(world: World, schedule: Schedule, verdicts: list[str]) -> dict[str, ShardRecord]:
    """Runs a schedule to its end, one shard at a time; `verdicts` says how each try ends (ok when used up)."""
    ledger: dict[str, ShardRecord] = {}
    steps = 0
    while not schedule.finished:
        steps += 1
        assert steps < 10_000, "the schedule never ends"
        assignment = schedule.next()
        if assignment is None:
            continue
        verdict = verdicts.pop(0) if verdicts else "ok"
        if verdict == "unread":
            schedule.failed(assignment.shard.key, "unread", permanent=False)
            continue
        facts = world.facts(assignment)
        schedule.read(assignment.shard.key, facts)
        if verdict == "fail":
            schedule.failed(assignment.shard.key, "fail", permanent=False)
        else:
            assert assignment.shard.key not in ledger, "committed twice"
            ledger[assignment.shard.key] = record(assignment.shard, facts)
            schedule.committed(ledger[assignment.shard.key])
    return ledger


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


@given(worlds, st.lists(st.sampled_from(["ok", "fail", "unread"]), max_size=30))
@settings(max_examples=400, deadline=None)
def test_every_row_is_committed_once_whatever_fails_on_the_way(world: World, verdicts: list[str]) -> None:
    schedule = world.schedule(attempts=100)
    assert rows_of(drive(world, schedule, verdicts)) == world.expected()
    assert schedule.failures == []


@given(worlds, st.integers(0, 30), st.data())
@settings(max_examples=300, deadline=None)
def test_a_life_that_ends_anywhere_is_finished_by_the_next(world: World, steps: int, data: st.DataObject) -> None:
    first = drive(world, world.schedule(), [])
    survivors = {key: first[key] for key in list(first)[:steps]}
    again = drive(world, world.schedule(committed=survivors), [])
    assert not set(again) & set(survivors)
    assert rows_of(survivors | again) == world.expected()


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 40), st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_a_grown_limit_harvests_the_rest_and_nothing_twice(length: int, size: int, limit: int, more: int) -> None:
    before = World([length], [True], size, limit=limit)
    ledger = drive(before, before.schedule(), [])
    kept = {key: record for key, record in ledger.items() if not record.cut}
    after = World([length], [True], size, limit=limit + more)
    assert rows_of(kept | drive(after, after.schedule(committed=kept), [])) == after.expected()


def test_a_poison_shard_is_given_up_after_its_attempts_while_the_rest_goes_on() -> None:
    world = World([30], [True], 10)
    schedule = world.schedule(attempts=2)
    done = []
    while not schedule.finished:
        assignment = schedule.next()
        if assignment is None:
            continue
        key = assignment.shard.key
        if assignment.shard.index == 1:
            schedule.failed(key, "poison", permanent=False)
        else:
            schedule.committed(record(assignment.shard, world.facts(assignment)))
            done.append(key)
    assert done == ["f00000-s000000", "f00000-s000002"]
    assert [(f.shard.index, f.attempts, f.error) for f in schedule.failures] == [(1, 2, "poison")]


def test_an_error_that_would_repeat_itself_is_not_tried_again() -> None:
    schedule = World([10], [True], 10).schedule(attempts=5)
    assignment = schedule.next()
    assert assignment is not None
    assert schedule.failed(assignment.shard.key, "bad document", permanent=True) is False
    assert schedule.next() is None
    assert schedule.finished
    assert schedule.failures[0].attempts == 1


def test_a_slice_of_unknown_length_waits_for_its_forerunner_and_goes_on_at_its_cursor() -> None:
    world = World([15], [False], 10)
    schedule = world.schedule()
    first = schedule.next()
    assert first is not None
    assert schedule.next() is None
    assert not schedule.finished
    schedule.read(first.shard.key, world.facts(first))
    second = schedule.next()
    assert second is not None
    assert (second.shard.start, second.cursor) == (10, {"row": 10})


def test_after_stop_nothing_is_handed_out_and_what_runs_may_still_report() -> None:
    world = World([30], [True], 10)
    schedule = world.schedule()
    running = schedule.next()
    assert running is not None
    schedule.stop()
    assert schedule.next() is None
    assert not schedule.finished
    schedule.committed(record(running.shard, world.facts(running)))
    assert schedule.finished
