"""The coordinator's loop over simulated workers that die, hang, freeze, come back: every row once, in bounded time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import World, record, rows_of, worlds

from harvest.errors import LostLeaseError, WorkError
from harvest.records import Assignment, ShardRecord
from harvest.runtime.intake import Intake, Report
from harvest.runtime.lead import BIRTHS, HUNG_SECONDS, SILENT_SECONDS, Gone, Lead
from harvest.runtime.progress import Silent
from harvest.runtime.schedule import Schedule
from harvest.runtime.slices import ReadFacts
from harvest.runtime.worker import Order, Reply

LOAD_SECONDS = 5.0


@dataclass
class Process:
    """One life of a worker: what it holds, what it has to tell, and how it is."""

    world: World
    pid: int
    born: float
    holds: list[Assignment] = field(default_factory=list)
    read: list[tuple[str, ReadFacts]] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    state: str = "well"
    """well, dead, frozen, hung (answers and does nothing), doomed (dies while it loads)."""
    loads_since: float | None = None
    moved: float = 0.0

    def take(self, order: Order, now: float) -> None:
        if order.fresh:
            self.holds.clear()
        self.holds = [one for one in self.holds if one not in order.called_off]
        self.holds += order.assignments
        if order.assignments:
            self.moved = now
        if order.may_load and self.loads_since is None:
            self.loads_since = now

    def work(self, now: float, error: Callable[[Assignment], str]) -> None:
        """One shard from front to back."""
        if self.state != "well" or not self.holds:
            return
        self.moved = now
        assignment = self.holds.pop(0)
        facts = self.world.facts(assignment)
        self.read.append((assignment.shard.key, facts))
        if text := error(assignment):
            self.reports.append(Report(assignment=assignment, error=text))
        else:
            self.reports.append(
                Report(assignment=assignment, record=record(assignment.shard, facts, assignment.attempt))
            )

    def stage(self, now: float) -> str:
        if self.loads_since is None:
            return "waiting"
        return "ready" if now - self.loads_since >= LOAD_SECONDS else "loading"

    def reply(self, now: float, node: str) -> Reply:
        stage = self.stage(now)
        told = Reply(
            host="here",
            pid=self.pid,
            node=node,
            stage=stage,
            read=tuple(self.read),
            reports=tuple(self.reports),
            still_seconds=now - self.moved if self.holds and stage == "ready" else 0.0,
        )
        self.read, self.reports = [], []
        return told


class Simulation:
    """A crew under a clock of its own. `script` is called before each second with the crew and may do harm."""

    needs = "1 CPU"

    def __init__(self, world: World, workers: int, script: Callable[[Simulation], None] = lambda crew: None) -> None:
        self.world, self.script = world, script
        self.workers: Sequence[str] = [f"worker-{i}" for i in range(workers)]
        self.now = 0.0
        self._numbers = itertools.count(1)
        self.processes = {worker: self._birth() for worker in self.workers}
        self.zombies: list[Process] = []
        self.calls: dict[str, Order] = {}
        self.error: Callable[[Assignment], str] = lambda assignment: ""
        self.kills: Callable[[Assignment], bool] = lambda assignment: False
        self.unborn: set[str] = set()
        """Workers whose processes die while they load."""
        self.loading_at_once = 0
        self.room_for: list[str] = []
        self.drained: set[str] = set()
        self.node_of: dict[str, str] = {}

    def newcomers(self) -> Sequence[str]:
        new, self.room_for = self.room_for, []
        self.processes.update({worker: self._birth() for worker in new})
        return new

    def leaving(self) -> frozenset[str]:
        return frozenset(self.drained)

    def _birth(self) -> Process:
        return Process(self.world, next(self._numbers), getattr(self, "now", 0.0))

    def send(self, worker: str, order: Order) -> None:
        assert worker not in self.calls, "two conversations with one worker"
        self.calls[worker] = order
        process = self.processes[worker]
        if process.state in ("well", "hung"):
            process.take(order, self.now)

    def wait(self, seconds: float) -> list[tuple[str, Reply | Gone]]:
        self.now += 1.0
        assert self.now < 50_000, "the run never ends"
        self.script(self)
        loading = sum(process.stage(self.now) == "loading" for process in self.processes.values())
        self.loading_at_once = max(self.loading_at_once, loading)
        found: list[tuple[str, Reply | Gone]] = []
        for worker in list(self.calls):
            process = self.processes[worker]
            if worker in self.unborn and process.stage(self.now) == "loading":
                process.state = "dead"
            if process.stage(self.now) == "ready" and process.holds and self.kills(process.holds[0]):
                process.state = "dead"
            if process.state == "dead":
                del self.calls[worker]
                self.processes[worker] = self._birth()
                found.append((worker, Gone(reason="died")))
            elif process.state != "frozen":
                if process.stage(self.now) == "ready":
                    process.work(self.now, self.error)
                del self.calls[worker]
                found.append((worker, process.reply(self.now, self.node_of.get(worker, "n"))))
        return found

    def restart(self, worker: str) -> None:
        self.zombies.append(self.processes[worker])
        self.calls.pop(worker, None)
        self.processes[worker] = self._birth()

    def dismiss(self, worker: str) -> None:
        self.calls.pop(worker, None)


class FakeLease:
    lost = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def check(self) -> None:
        if self.lost:
            raise LostLeaseError("taken over")

    def heartbeat(self, running: Any = (), failed: Any = None) -> None: ...

    def tell(self, doing: str) -> None:
        self.told.append(doing)


class FakeLedger:
    def __init__(self) -> None:
        self.records: dict[str, ShardRecord] = {}

    def commit_all(self, records: Sequence[ShardRecord]) -> list[bool]:
        for one in records:
            assert one.shard.key not in self.records, "committed twice"
            self.records[one.shard.key] = one
        return [True] * len(records)


class Events(Silent):
    def __init__(self) -> None:
        self.lost: list[str] = []
        self.given_up: list[str] = []
        self.waits: list[str] = []
        self.began: list[str] = []

    def workers_start(self, workers: int) -> None:
        self.began.append(f"{workers} workers start")

    def loading(self) -> None:
        self.began.append("loading")

    def loaded(self, seconds: float, took: float) -> None:
        self.began.append(f"loaded after {seconds >= LOAD_SECONDS}")

    def joined(self, worker: str, where: str, workers: int) -> None:
        self.began.append(f"{workers} ready")

    def left(self, worker: str, why: str, workers: int) -> None:
        self.lost.append(why)

    def waiting(self, text: str) -> None:
        self.waits.append(text)

    def gave_up(self, shard: str, error: str) -> None:
        self.given_up.append(error)


def run(
    world: World, crew: Simulation, attempts: int = 3, lease: Any = None, together: bool = False
) -> tuple[FakeLedger, Schedule, Events]:
    schedule = Schedule(
        world.files,
        shard_documents=world.size,
        attempts=attempts,
        kept=world.kept,
        depth=2,
        **world.limits,  # type: ignore[arg-type]
    )
    lease, ledger, events = lease or FakeLease(), FakeLedger(), Events()
    intake = Intake(ledger, lease, schedule, events)  # type: ignore[arg-type]
    about: dict[str, Any] = {"clock": lambda: crew.now, "begin": 0.0, "together": together}
    Lead(crew, schedule=schedule, intake=intake, lease=lease, observer=events, **about).run()
    return ledger, schedule, events


HARM = ["die", "die", "freeze", "hang", "thaw"]


@given(worlds, st.integers(1, 4), st.lists(st.tuples(st.integers(1, 200), st.integers(0, 3), st.sampled_from(HARM))))
@settings(max_examples=300, deadline=None)
def test_every_row_is_committed_once_whatever_happens_to_whom(
    world: World, workers: int, harm: list[tuple[int, int, str]]
) -> None:
    def script(crew: Simulation) -> None:
        for at, who, what in harm:
            worker = f"worker-{who % workers}"
            if at == int(crew.now):
                process = crew.processes[worker]
                process.state = {"die": "dead", "freeze": "frozen", "hang": "hung", "thaw": "well"}[what]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harvest.runtime.lead.BIRTHS", 1000)
        ledger, schedule, _ = run(world, Simulation(world, workers, script), attempts=1000)
    assert rows_of(ledger.records) == world.expected()
    assert schedule.failures == []


def test_a_worker_that_does_not_answer_loses_its_shards_to_the_others_and_another_process_takes_its_place() -> None:
    world = World([200], [True], 10)

    def script(crew: Simulation) -> None:
        if crew.now == 10:
            crew.processes["worker-0"].state = "frozen"

    crew = Simulation(world, 2, script)
    ledger, _, events = run(world, crew)
    assert rows_of(ledger.records) == world.expected()
    assert crew.now < 2 * SILENT_SECONDS
    assert len(crew.zombies) == len(events.lost) <= 1


def test_a_crew_tells_once_each_how_it_begins_before_its_first_shard() -> None:
    lease, world = FakeLease(), World([60], [True], 10)
    _, _, events = run(world, Simulation(world, 2), lease=lease)
    assert events.began[:4] == ["2 workers start", "loading", "loaded after True", "1 ready"]
    assert events.began.count("loading") == 1
    assert lease.told == ["starting 2 workers", "loading the model", "harvesting"]


def test_together_nobody_begins_before_all_are_ready_and_later_nobody_waits_for_one_that_comes_anew() -> None:
    """The first worker of a node loads alone, so the others are ready later than it."""
    world = World([400], [True], 10)
    alone: list[float] = []
    """When somebody worked while another was not ready."""

    def script(crew: Simulation) -> None:
        if crew.now == 3 * LOAD_SECONDS:
            crew.processes["worker-1"].state = "dead"
        ready = [process.stage(crew.now) == "ready" for process in crew.processes.values()]
        if not all(ready) and any(process.holds for process in crew.processes.values()):
            alone.append(crew.now)

    for together in (False, True):
        alone.clear()
        ledger, _, _ = run(world, Simulation(world, 2, script), together=together)
        assert rows_of(ledger.records) == world.expected()
        assert (min(alone) > 3 * LOAD_SECONDS) == together
    assert len(alone) > 1, "worker-0 worked on while worker-1 loaded again"


def test_the_only_worker_hangs_and_is_replaced() -> None:
    world = World([60], [True], 10)

    def script(crew: Simulation) -> None:
        if crew.now == 8:
            crew.processes["worker-0"].state = "hung"

    crew = Simulation(world, 1, script)
    ledger, _, events = run(world, crew)
    assert rows_of(ledger.records) == world.expected()
    assert "has not moved" in events.lost[0]
    assert HUNG_SECONDS < crew.now < HUNG_SECONDS + 60


def test_a_document_that_kills_every_process_costs_its_shard_alone() -> None:
    world = World([100], [True], 10)
    crew = Simulation(world, 2)
    crew.kills = lambda assignment: assignment.shard.index == 3
    ledger, schedule, events = run(world, crew)
    assert [(f.shard.index, f.attempts) for f in schedule.failures] == [(3, 3)]
    assert "died" in events.given_up[0]
    assert len(ledger.records) == 9


def test_an_error_in_a_shard_is_tried_again_and_then_named() -> None:
    world = World([100], [True], 10)
    crew = Simulation(world, 2)
    crew.error = lambda assignment: "no luck" if assignment.shard.index == 3 else ""
    ledger, schedule, events = run(world, crew)
    assert [(f.shard.index, f.attempts, f.error) for f in schedule.failures] == [(3, 3, "no luck")]
    assert events.given_up == ["no luck"]
    assert len(ledger.records) == 9


def test_a_worker_that_never_gets_ready_is_let_go_and_the_rest_finish() -> None:
    world = World([100], [True], 10)
    crew = Simulation(world, 2)
    crew.unborn = {"worker-0"}
    ledger, _, events = run(world, crew)
    assert rows_of(ledger.records) == world.expected()
    assert len(events.lost) <= BIRTHS


def test_without_any_worker_the_run_fails_and_says_why_the_last_one_went() -> None:
    world = World([100], [True], 10)
    crew = Simulation(world, 2)
    crew.unborn = {"worker-0", "worker-1"}
    with pytest.raises(WorkError, match=r"no worker is left; the last one was worker-[01] .*: died"):
        run(world, crew)


def test_a_takeover_ends_the_loop() -> None:
    world = World([1000], [True], 10)
    lease = FakeLease()

    def script(crew: Simulation) -> None:
        lease.lost = crew.now > 20

    with pytest.raises(LostLeaseError):
        run(world, Simulation(world, 2, script), lease=lease)


def test_one_worker_of_a_node_loads_first_and_a_few_at_a_time_follow() -> None:
    world = World([5000], [True], 10)
    crew = Simulation(world, 12)
    warm: list[int] = []

    def script(now: Simulation) -> None:
        stages = [process.stage(now.now) for process in now.processes.values()]
        if "ready" not in stages:
            warm.append(stages.count("loading"))

    crew.script = script
    run(world, crew)
    assert max(warm) == 1
    assert 1 < crew.loading_at_once <= 4


def test_a_frozen_coordinator_does_not_take_its_workers_for_dead() -> None:
    world = World([400], [True], 10)

    def script(crew: Simulation) -> None:
        if crew.now == 12:
            crew.now += 10 * SILENT_SECONDS  # it was stopped; the replies have been waiting since

    crew = Simulation(world, 2, script)
    ledger, _, events = run(world, crew)
    assert rows_of(ledger.records) == world.expected()
    assert events.lost == []


@pytest.mark.parametrize("full_until", [0, 200])
def test_a_cluster_without_room_for_a_first_worker_is_waited_for_aloud(full_until: int) -> None:
    world = World([40], [True], 10)

    def script(crew: Simulation) -> None:
        for process in crew.processes.values():
            process.state = "frozen" if crew.now < full_until else "well"

    ledger, _, events = run(world, Simulation(world, 2, script))
    assert rows_of(ledger.records) == world.expected()
    assert events.lost == []
    assert events.waits == ["no worker has begun yet; each waits for 1 CPU of the cluster"] * (full_until // 61)


def test_workers_that_join_later_get_their_part() -> None:
    world = World([600], [True], 10)

    def script(crew: Simulation) -> None:
        if crew.now == 10:
            crew.room_for = ["worker-1", "worker-2"]

    crew, alone = Simulation(world, 1, script), Simulation(world, 1)
    assert rows_of(run(world, crew)[0].records) == world.expected()
    run(world, alone)
    assert crew.now < 0.75 * alone.now


def test_a_worker_that_ends_with_an_error_at_every_shard_does_not_go_on_for_ever() -> None:
    world = World([20], [True], 10)

    class Ending(Process):
        def reply(self, now: float, node: str) -> Reply:
            told = super().reply(now, node)
            return replace(told, stage="ended", error="MemoryError", reports=()) if self.holds else told

        def work(self, now: float, error: Callable[[Assignment], str]) -> None: ...

    class Crew(Simulation):
        def _birth(self) -> Process:
            return Ending(self.world, next(self._numbers), getattr(self, "now", 0.0))

    _, schedule, _ = run(world, Crew(world, 1))
    assert sorted((f.shard.index, f.attempts) for f in schedule.failures) == [(0, 3), (1, 3)]


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_node_that_will_be_taken_away_gets_no_new_shards_unless_there_is_no_other(everywhere: bool) -> None:
    world = World([200], [True], 5)
    done: dict[str, list[float]] = {"worker-0": [], "worker-1": []}

    def script(crew: Simulation) -> None:
        if crew.now == 10:
            crew.drained = {"a", "b"} if everywhere else {"a"}
        for worker, process in crew.processes.items():
            if process.holds and process.stage(crew.now) == "ready":
                done[worker].append(crew.now)

    crew = Simulation(world, 2, script)
    crew.node_of = {"worker-0": "a", "worker-1": "b"}
    ledger, _, events = run(world, crew)
    assert rows_of(ledger.records) == world.expected()
    assert events.lost == []
    assert min(done["worker-0"]) < 10
    assert (max(done["worker-0"]) > 20) is everywhere
    assert max(done["worker-1"]) > 20
