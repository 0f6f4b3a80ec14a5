"""The schedule as a law: whatever fails, in whatever order, every shard is committed once or given up by name."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import World, record, rows_of, worlds

from harvest.records import Assignment, ShardRecord
from harvest.runtime.schedule import LATE_SECONDS, Schedule
from harvest.runtime.slices import ReadFacts


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
            schedule.failed(assignment, "unread", permanent=False)
            continue
        facts = world.facts(assignment)
        schedule.read(assignment.shard.key, facts)
        if verdict == "fail":
            schedule.failed(assignment, "fail", permanent=False)
        else:
            assert assignment.shard.key not in ledger, "committed twice"
            ledger[assignment.shard.key] = record(assignment.shard, facts)
            schedule.committed(ledger[assignment.shard.key])
    return ledger


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


def taken(world: World, workers: list[str]) -> list[tuple[str, Assignment]]:
    """Who takes what, where each has one shard under way while it takes the next."""
    schedule, order = world.schedule(), []
    under_way: dict[str, list[Assignment]] = {worker: [] for worker in workers}
    while not schedule.finished:
        for worker, holds in under_way.items():
            if (assignment := schedule.next(worker)) is not None:
                order.append((worker, assignment))
                holds.append(assignment)
                schedule.read(assignment.shard.key, world.facts(assignment))
            if len(holds) > 1 or (holds and assignment is None):
                done = holds.pop(0)
                schedule.committed(record(done.shard, world.facts(done)))
    return order


def test_one_worker_takes_the_shards_of_many_files_in_dataset_order() -> None:
    """It goes on with the file that it reads, whichever it read before."""
    world = World([40] * 4, [True] * 4, 10)
    found = [assignment.shard.key for _, assignment in taken(world, [""])]
    assert found == [f"f{file:05d}-s{at:06d}" for file in range(4) for at in range(4)]


def test_workers_go_on_with_the_files_that_they_read() -> None:
    """A reader that leaves its file has to find its place in another one, at worst from the front."""
    last: dict[str, int] = {}
    moves = 0
    for worker, assignment in taken(World([100] * 12, [True] * 12, 10), ["worker-0", "worker-1", "worker-2"]):
        moves += last.get(worker) != assignment.shard.file
        last[worker] = assignment.shard.file
    assert moves <= 12 + 2, "each file is begun once, and at the end some are shared"


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
            schedule.failed(assignment, "poison", permanent=False)
        else:
            schedule.committed(record(assignment.shard, world.facts(assignment)))
            done.append(key)
    assert done == ["f00000-s000000", "f00000-s000002"]
    assert [(f.shard.index, f.attempts, f.error) for f in schedule.failures] == [(1, 2, "poison")]


def test_an_error_that_would_repeat_itself_is_not_tried_again() -> None:
    schedule = World([10], [True], 10).schedule(attempts=5)
    assignment = schedule.next()
    assert assignment is not None
    assert schedule.failed(assignment, "bad document", permanent=True) is False
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


# ---- several workers ---------------------------------------------------------------------------------------------


class Crew:
    """Simulated workers, each of which works on what it holds in order; `events` decide who moves and how."""

    def __init__(self, world: World, schedule: Schedule, workers: int) -> None:
        self.world, self.schedule = world, schedule
        self.queues: dict[str, list[Assignment]] = {f"w{i}": [] for i in range(workers)}
        self.read: set[tuple[str, int]] = set()
        self.ledger: dict[str, ShardRecord] = {}
        self.numbers: set[int] = set()
        self.now = 0.0

    def step(self, worker: str, event: str) -> None:
        self.now += 1.0
        queue = self.queues[worker]
        for gone in self.schedule.called_off(worker):
            if gone in queue[1:]:  # what has begun may be too late to stop
                queue.remove(gone)
        if event == "die":
            queue.clear()
            self.schedule.lost(worker, "died")
        elif event == "preempted":
            queue.clear()
            self.schedule.lost(worker, "its node is gone", blame=False)
        elif event == "ask":
            assignment = self.schedule.next(worker, self.now)
            if assignment is not None:
                assert assignment.attempt not in self.numbers, "two tries with one number"
                self.numbers.add(assignment.attempt)
                queue.append(assignment)
        elif event == "read":
            for assignment in queue:
                if (assignment.shard.key, assignment.attempt) not in self.read:
                    self.read.add((assignment.shard.key, assignment.attempt))
                    self.schedule.read(assignment.shard.key, self.world.facts(assignment))
                    break
        elif queue:
            assignment = queue.pop(0)
            if event == "fail":
                self.schedule.failed(assignment, "fail", permanent=False)
            else:
                self.report(assignment)

    def report(self, assignment: Assignment) -> None:
        key, facts = assignment.shard.key, self.world.facts(assignment)
        if (key, assignment.attempt) not in self.read:
            self.schedule.read(key, facts)
        if self.schedule.wants(assignment):
            assert key not in self.ledger, "committed twice"
            self.ledger[key] = record(assignment.shard, facts, assignment.attempt)
            self.schedule.committed(self.ledger[key], self.now)

    def finish(self) -> None:
        """Everyone works without a fault until the schedule says that it is over."""
        steps = 0
        while not self.schedule.finished:
            steps += 1
            assert steps < 20_000, "the schedule never ends"
            for worker in self.queues:
                self.step(worker, "ask")
                self.step(worker, "finish" if steps % 2 else "read")


events = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["ask", "ask", "read", "finish", "fail", "die", "preempted"])),
    max_size=120,
)


@given(worlds, st.integers(1, 4), st.sampled_from([1, 2, 3, None]), events)
@settings(max_examples=1500, deadline=None)
def test_every_row_is_committed_once_by_any_crew_whatever_dies_when(
    world: World, workers: int, depth: int | None, history: list[tuple[int, str]]
) -> None:
    schedule = Schedule(
        world.files,
        shard_documents=world.size,
        attempts=1000,
        kept=world.kept,
        depth=depth,
        **world.limits,  # type: ignore[arg-type]
    )
    crew = Crew(world, schedule, workers)
    for worker, event in history:
        crew.step(f"w{worker % workers}", event)
        for held in crew.queues:
            assert depth is None or schedule.held(held) <= depth
    crew.finish()
    assert rows_of(crew.ledger) == world.expected()
    assert schedule.failures == []
    assert schedule.running == []


@given(worlds, st.integers(2, 4), st.integers(1, 3), events)
@settings(max_examples=500, deadline=None)
def test_what_is_given_up_is_named_once_and_everything_else_is_committed(
    world: World, workers: int, attempts: int, history: list[tuple[int, str]]
) -> None:
    schedule = Schedule(
        world.files,
        shard_documents=world.size,
        attempts=attempts,
        kept=world.kept,
        depth=2,
        **world.limits,  # type: ignore[arg-type]
    )
    crew = Crew(world, schedule, workers)
    for worker, event in history:
        crew.step(f"w{worker % workers}", event)
    crew.finish()
    given_up = [failure.shard.key for failure in schedule.failures]
    assert len(set(given_up)) == len(given_up)
    assert not set(given_up) & set(crew.ledger)
    committed = rows_of(crew.ledger)
    assert len(set(committed)) == len(committed)
    if not given_up:
        assert committed == world.expected()


def of(world: World, **options: Any) -> Schedule:
    return Schedule(world.files, shard_documents=world.size, attempts=3, kept=world.kept, **options)


def test_a_shard_that_killed_its_worker_is_tried_alone_and_given_up_after_its_attempts() -> None:
    schedule = of(World([60], [True], 10), depth=2)
    poison, innocent = schedule.next("a"), schedule.next("a")
    assert poison is not None
    assert innocent is not None
    schedule.lost("a", "died")
    for _ in range(2):
        alone = schedule.next("a")
        assert alone is not None
        assert alone.shard == poison.shard
        assert schedule.next("a") is None, "something else was handed out beside a suspect"
        schedule.lost("a", "died")
        again = schedule.next("b")
        if again is not None and again.shard == innocent.shard:
            schedule.committed(record(again.shard, schedule_facts(10), again.attempt))
    assert [(f.shard, f.attempts) for f in schedule.failures] == [(poison.shard, 3)]


def schedule_facts(documents: int) -> ReadFacts:
    return ReadFacts(documents=documents, tokens=documents, ended=False, cut=False, cursor=None)


def test_the_loss_of_a_node_is_no_shards_fault() -> None:
    schedule = of(World([10], [True], 10), depth=2)
    for _ in range(10):
        assert schedule.next("a") is not None
        schedule.lost("a", "its node is gone", blame=False)
    assert schedule.failures == []


def test_a_failed_shard_goes_to_another_worker_where_there_is_one() -> None:
    schedule = of(World([30], [True], 10))
    first, other = schedule.next("a"), schedule.next("b")
    assert first is not None
    assert other is not None
    assert schedule.failed(first, "bad memory", permanent=False)
    third = schedule.next("a")
    assert third is not None
    assert third.shard != first.shard
    again = schedule.next("b")
    assert again is not None
    assert again.shard == first.shard


def test_an_idle_worker_takes_what_waits_behind_another_and_the_other_is_told() -> None:
    schedule = of(World([20], [True], 10), depth=2)
    first, second = schedule.next("a"), schedule.next("a")
    assert first is not None
    assert second is not None
    taken = schedule.next("b")
    assert taken is not None
    assert taken.shard == second.shard
    assert taken.attempt != second.attempt
    assert schedule.called_off("a") == [second]
    assert schedule.called_off("a") == []


def test_a_late_shard_is_tried_a_second_time_and_the_first_report_wins() -> None:
    world = World([30], [True], 10)
    schedule = of(world, depth=1)
    slow, quick = schedule.next("a", 0.0), schedule.next("b", 0.0)
    assert slow is not None
    assert quick is not None
    schedule.committed(record(quick.shard, world.facts(quick), quick.attempt), 10.0)
    third = schedule.next("b", 10.0)
    assert third is not None
    schedule.committed(record(third.shard, world.facts(third), third.attempt), 20.0)
    assert schedule.next("b", LATE_SECONDS - 1) is None
    second = schedule.next("b", LATE_SECONDS + 1)
    assert second is not None
    assert second.shard == slow.shard
    assert schedule.next("c", LATE_SECONDS + 50) is None, "a third try of a late shard"
    schedule.committed(record(second.shard, world.facts(second), second.attempt), 60.0)
    assert not schedule.wants(slow)
    assert schedule.called_off("a") == [slow]
    assert schedule.finished


def test_files_of_unknown_length_are_read_side_by_side_each_by_one_worker() -> None:
    world = World([40, 40], [False, False], 10)
    schedule = of(world, depth=2)
    a, b = schedule.next("a"), schedule.next("b")
    assert a is not None
    assert b is not None
    assert {a.shard.file, b.shard.file} == {0, 1}
    assert schedule.next("a") is None, "a worker left the file that it reads"
    schedule.read(a.shard.key, world.facts(a))
    following = schedule.next("a")
    assert following is not None
    assert (following.shard.file, following.shard.index) == (a.shard.file, 1)


def test_one_file_is_shared_by_row_ranges() -> None:
    schedule = of(World([40], [True], 10), depth=1)
    taken = [schedule.next(worker) for worker in "abcd"]
    assert [one.shard.index for one in taken if one is not None] == [0, 1, 2, 3]
