"""Real workers in threads of this process: the bits of one worker, whoever is late, lost, or back from the dead."""

from __future__ import annotations

import gzip
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plainrun import PlainRun, attempts_without_record, first_difference, read_plain

import harvest
from harvest.config import load_job
from harvest.pipeline import Pipeline
from harvest.plan import make_plan
from harvest.records import Assignment
from harvest.runtime import coordinate, lead
from harvest.runtime.intake import Intake
from harvest.runtime.lead import Gone, Lead
from harvest.runtime.progress import Silent
from harvest.runtime.schedule import Schedule
from harvest.runtime.status import status_of
from harvest.runtime.worker import Order, Reply, Worker, hire
from harvest.store.files import Files
from harvest.store.lease import Lease
from harvest.store.ledger import _SHARD, Ledger, encode_record
from harvest.store.opening import open_files

sys.path.insert(0, str(Path(__file__).parents[2] / "jobs"))


class Threads:
    """A crew in this process; each conversation is a thread of its own, as with actors."""

    needs = "a thread"

    def __init__(self, plan: Any, workers: int, life: str) -> None:
        self.workers: Sequence[str] = [f"worker-{i}" for i in range(workers)]
        self.plan, self.life = plan, life
        self.actors = {name: self.hire(name) for name in self.workers}
        self.replies: list[tuple[str, Worker, Reply]] = []
        self.there = threading.Condition()
        self.deaf: set[Worker] = set()
        """Workers that nobody hears any more, though they work on."""
        self.unheard: list[Reply] = []
        """Their replies to what they were asked before."""
        self.gone: list[tuple[str, Gone]] = []

    def hire(self, name: str) -> Worker:
        return Worker(hire(self.plan, name, self.life))

    def send(self, name: str, order: Order) -> None:
        actor = self.actors[name]

        def talk() -> None:
            reply = actor.exchange(order)
            with self.there:
                if actor in self.deaf:
                    self.unheard.append(reply)
                    return
                self.replies.append((name, actor, reply))
                self.there.notify_all()

        threading.Thread(target=talk, daemon=True).start()

    def wait(self, seconds: float) -> list[tuple[str, Reply | Gone]]:
        with self.there:
            self.there.wait_for(lambda: bool(self.replies or self.gone), timeout=seconds)
            replies, self.replies = self.replies, []
            gone, self.gone = self.gone, []
        heard = [(name, reply) for name, actor, reply in replies if actor not in self.deaf]
        return [*gone, *heard]

    def lose(self, name: str) -> Worker:
        """The coordinator takes a worker for dead that is alive and writes on; another process takes its name."""
        lost = self.actors[name]
        self.deaf.add(lost)
        self.actors[name] = self.hire(name)
        with self.there:
            self.gone.append((name, Gone(reason="its node does not answer", blame=False)))
            self.there.notify_all()
        return lost

    def restart(self, name: str) -> None:
        self.deaf.add(self.actors[name])
        self.actors[name] = self.hire(name)

    def dismiss(self, name: str) -> None:
        self.deaf.add(self.actors[name])

    def newcomers(self) -> Sequence[str]:
        return []

    def leaving(self) -> frozenset[str]:
        return frozenset()


class Watcher(Silent):
    """Does something when the n-th shard is committed."""

    def __init__(self, at: int = 0, then: Callable[[], None] = lambda: None) -> None:
        self.commits, self.at, self.then = 0, at, then
        self.lost: list[str] = []
        self.loaded_after = 0.0

    def committed(self, record: Any) -> None:
        self.commits += 1
        if self.commits == self.at:
            self.then()

    def left(self, worker: str, why: str, workers: int) -> None:
        self.lost.append(why)


@pytest.fixture
def crew_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Threads]]:
    """Makes `harvest.run` work with threads instead of Ray's actors."""
    made: list[Threads] = []

    def install(workers: int, make: type[Threads] = Threads, **changes: Any) -> list[Threads]:
        for name, value in changes.items():
            monkeypatch.setattr(lead, name, value)

        def work(self: Any, schedule: Schedule, model: Any) -> None:
            crew = make(self.plan, workers, self.lease.life)
            made.append(crew)
            Lead(
                crew,
                schedule=schedule,
                intake=Intake(Ledger(self.files), self.lease, schedule, self.observer),
                lease=self.lease,
                observer=self.observer,
                begin=self.begin,
            ).run()

        monkeypatch.setattr(coordinate._Coordinator, "_work", work)
        monkeypatch.setattr(
            coordinate._Coordinator, "__init__", _with_workers(coordinate._Coordinator.__init__, workers)
        )
        return made

    return install


def _with_workers(original: Any, workers: int) -> Any:
    def init(self: Any, plan: Any, files: Any, lease: Any, observer: Any, begin: float, given: Any) -> None:
        original(self, plan, files, lease, observer, begin, workers)

    return init


def run(job: Path, path: Path, observer: Silent | None = None, *overrides: str) -> PlainRun:
    coordinate.run(load_job(job, [f"run.path={path}", *overrides]), observer=observer)
    return read_plain(path)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_gives_the_bits_of_one(
    workers: int, job: Path, clean: PlainRun, tmp_path: Path, crew_of: Any
) -> None:
    crew_of(workers)
    found = run(job, tmp_path / "run")
    assert first_difference(clean, found) is None
    assert attempts_without_record(tmp_path / "run") == []


def test_a_worker_taken_for_dead_that_writes_on_harms_nothing(
    job: Path, clean: PlainRun, tmp_path: Path, crew_of: Any
) -> None:
    made = crew_of(2)
    zombies: list[Worker] = []
    observer = Watcher(at=5, then=lambda: zombies.append(made[0].lose("worker-0")))
    found = run(job, tmp_path / "run", observer)
    assert len(zombies) == 1
    assert first_difference(clean, found) is None
    # It worked on, so it has something to tell: in answer to this, or to what was asked when it was taken for dead.
    replies, deadline = made[0].unheard, time.monotonic() + 40
    while not any(reply.reports or "is over" in reply.error for reply in replies) and time.monotonic() < deadline:
        replies.append(zombies[0].exchange(Order(wait_seconds=1)))
    assert any(reply.reports or "is over" in reply.error for reply in replies)
    assert first_difference(clean, read_plain(tmp_path / "run")) is None


class Late(Worker):
    """Stops before the forward of one shard until it is let go."""

    shard = "f00000-s000005"
    gate = threading.Event()
    entered: list[Worker] = []  # noqa: RUF012

    def _wanted(self, assignment: Assignment) -> bool:
        if assignment.shard.key == self.shard and not self.entered:
            self.entered.append(self)
            self.gate.wait(60)
        return super()._wanted(assignment)


def test_a_late_shard_is_done_by_another_and_its_first_worker_is_called_off(
    job: Path, clean: PlainRun, tmp_path: Path, crew_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harvest.runtime.schedule.LATE_SECONDS", 0.5)
    monkeypatch.setattr("harvest.runtime.schedule.LATE_FACTOR", 1.0)
    Late.gate.clear()
    Late.entered.clear()

    class LateThreads(Threads):
        def hire(self, name: str) -> Worker:
            return Late(hire(self.plan, name, self.life))

    crew_of(2, LateThreads)
    found = run(job, tmp_path / "run")
    assert len(Late.entered) == 1
    assert first_difference(clean, found) is None
    (slow,) = Late.entered
    Late.gate.set()
    reply = slow.exchange(Order(wait_seconds=5))
    assert all(report.assignment.shard.key != Late.shard for report in reply.reports), "a called-off try reported"
    assert attempts_without_record(tmp_path / "run") == []


def test_a_worker_that_sees_other_weights_is_not_let_near_the_run(job: Path, tmp_path: Path, crew_of: Any) -> None:
    class Elsewhere(Threads):
        def hire(self, name: str) -> Worker:
            lock = {**self.plan.lock(), "fingerprint.model": "other weights"}
            return Worker(replace(hire(self.plan, name, self.life), lock=lock))

    crew_of(2, Elsewhere)
    with pytest.raises(harvest.errors.WorkError, match=r"no worker is left.* see the same: content of the model"):
        run(job, tmp_path / "run")


def test_files_of_unequal_length_keep_a_crew_busy_to_the_end(job: Path, tmp_path: Path, crew_of: Any) -> None:
    """E60: 1, 10 and 100 documents, plain and of unknown length, and three workers."""
    for suffix in ("", ".gz"):
        folder = tmp_path / f"data{suffix}"
        folder.mkdir()
        for number, count in enumerate((1, 10, 100)):
            text = "".join(json.dumps({"text": f"document {number} {i}"}) + "\n" for i in range(count)).encode()
            (folder / f"{number}.jsonl{suffix}").write_bytes(gzip.compress(text) if suffix else text)
        crew_of(3)
        found = run(job, tmp_path / f"run{suffix}", None, f"data.path='{folder}/*.jsonl{suffix}'")
        assert found.complete
        ids = [row["document"] for row in found.documents]
        assert ids == [number * 2**40 + i for number, count in enumerate((1, 10, 100)) for i in range(count)]


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("stream", [False, True], ids=["lines", "a stream of `datasets`"])
def test_a_source_that_is_read_front_to_back_is_read_once_by_all_workers_together(
    stream: bool, workers: int, job: Path, tmp_path: Path, crew_of: Any
) -> None:
    """E59: what has no rule by which it can be split is one worker's at a time, who hands on where it stopped."""
    texts = [{"text": f"Text number {n}"} for n in range(10)]
    data = tmp_path / "data"
    data.mkdir()
    if stream:  # semicolons: only `datasets` knows of them
        (data / "texts.csv").write_text("text;n\n" + "".join(f"{text['text']};0\n" for text in texts))
        (data / "README.md").write_text('---\nconfigs:\n- config_name: own\n  data_files: "*.csv"\n  sep: ";"\n---\n')
    else:
        with gzip.open(data / "texts.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(text) + "\n" for text in texts)
    crew_of(workers)
    told = [f"data.path={data}", "store.shard_documents=3", *(["data.name=own"] if stream else [])]
    found = run(job, tmp_path / "run", None, *told)
    assert [row["document"] for row in found.documents] == list(range(10))


def test_a_worker_that_never_comes_is_not_waited_for_and_any_number_resumes(
    job: Path, clean: PlainRun, tmp_path: Path, crew_of: Any
) -> None:
    """E61: four are asked for, three come; then two."""

    class Absent(Threads):
        def send(self, name: str, order: Order) -> None:
            if name != "worker-3":
                super().send(name, order)

    class EnoughError(Exception):
        pass

    def stop() -> None:
        raise EnoughError

    crew_of(4, Absent)
    with pytest.raises(EnoughError):
        run(job, tmp_path / "run", Watcher(7, stop))
    status = status_of(str(tmp_path / "run"))
    assert (status["state"], status["committed"] + status["missing"]) == ("unfinished", len(clean.records))
    crew_of(2)
    assert first_difference(clean, run(job, tmp_path / "run")) is None


def test_an_earlier_run_goes_once_whatever_the_number_of_workers(
    job: Path, clean: PlainRun, tmp_path: Path, crew_of: Any
) -> None:
    """E48: no worker clears what another has written."""
    crew_of(2)
    run(job, tmp_path / "run", None, "data.limit=50")
    crew_of(4)
    assert first_difference(clean, run(job, tmp_path / "run", None, "run.overwrite=true")) is None


def test_an_error_in_a_forward_is_tried_again_and_counted(
    job: Path, clean: PlainRun, tmp_path: Path, crew_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E65: an exception is no death of a process, and retried all the same."""
    forward, failing, retries = Pipeline.forward, {"f00000-s000002", "f00000-s000005"}, []

    def flaky(self: Pipeline, window: Any, capture: Any, rows: Any, work: Any) -> None:
        if work.shard.key in failing:
            failing.remove(work.shard.key)
            raise RuntimeError("the card fell off the bus")
        forward(self, window, capture, rows, work)

    class Counting(Silent):
        def retried(self, shard: str, error: str) -> None:
            retries.append((shard, error))

    monkeypatch.setattr(Pipeline, "forward", flaky)
    crew_of(2)
    assert first_difference(clean, run(job, tmp_path / "run", Counting())) is None
    error = "RuntimeError: the card fell off the bus"
    assert sorted(retries) == [(key, f"shard {key}: {error}") for key in ("f00000-s000002", "f00000-s000005")]


def test_a_pipeline_that_breaks_off_ends_its_worker_though_no_other_shard_comes(
    job: Path, clean: PlainRun, tmp_path: Path, crew_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is no shard's: the thread that reads ahead waits for shards, and must not be waited for."""
    begin, broken = Pipeline.begin, []

    def breaks_at_the_last(self: Pipeline, assignment: Assignment, text: Any) -> Any:
        if assignment.shard.index == len(clean.records) - 1 and not broken:
            time.sleep(0.5)  # until the reader has looked for more
            broken.append(assignment)
            raise TypeError("not of this world")
        return begin(self, assignment, text)

    monkeypatch.setattr(Pipeline, "begin", breaks_at_the_last)
    watcher = Watcher()
    crew_of(1)
    started = time.monotonic()
    found = run(job, tmp_path / "run", watcher)
    assert time.monotonic() - started < lead.SILENT_SECONDS
    assert len(watcher.lost) == 1
    assert "TypeError: not of this world" in watcher.lost[0]
    assert first_difference(clean, found) is None


@pytest.mark.parametrize("change", ["other texts", "gone"])
def test_data_that_change_or_go_while_a_crew_reads_them_stop_the_run_and_nothing_false_is_committed(
    change: str, job: Path, clean: PlainRun, tmp_path: Path, crew_of: Any
) -> None:
    texts = (job.parent / "texts.jsonl").read_text()
    data = tmp_path / "texts.jsonl"
    data.write_text(texts)

    failures: list[str] = []

    class Changing(Watcher):
        def retried(self, shard: str, error: str) -> None:
            failures.append(error)

        gave_up = retried

    then = data.unlink if change == "gone" else lambda: data.write_text(texts.replace("a", "z")) and None
    crew_of(3)
    with pytest.raises(harvest.errors.WorkError, match=r"data file texts.jsonl: it (is gone|was written to) since"):
        run(job, tmp_path / "run", Changing(3, then), f"data.path={data}")
    found = read_plain(tmp_path / "run")
    assert not found.complete
    assert 3 <= len(found.records) < len(clean.records)
    assert len(failures) <= 3 * coordinate.SHARDS_PER_WORKER, "it stops; it does not fail shard by shard"
    for key in found.records:
        assert found.objects[f"{key}/tokens.parquet"] == clean.objects[f"{key}/tokens.parquet"]


def test_a_worker_whose_folder_is_not_the_shared_one_says_so(job: Path, tmp_path: Path) -> None:
    plan = make_plan(load_job(job, [f"run.path={tmp_path}/elsewhere"]))
    lonely = Worker(hire(plan, "worker-0", "0" * 8))
    reply = lonely.exchange(Order(wait_seconds=0))
    deadline = time.monotonic() + 30
    while reply.stage != "ended" and time.monotonic() < deadline:
        reply = lonely.exchange(Order(wait_seconds=1))
    assert "run.path must be a folder that all workers share, or a URL" in reply.error


def test_a_record_that_a_frozen_coordinator_left_behind_makes_way(job: Path, clean: PlainRun, tmp_path: Path) -> None:
    """It was stopped between its last look at the lease and its commit; its attempt has been removed meanwhile."""
    path = tmp_path / "run"
    zombie: list[bytes] = []

    class Frozen(Silent):
        def committed(self, record: Any) -> None:
            files: Files = open_files(str(path))
            if record.shard.index == 3:
                text = files.read("ledger/f00000-s000003.json")
                zombie.append(text)
                later = replace(
                    record,
                    shard=replace(record.shard, index=9, start=72, stop=80),
                    attempt="f00000-s000009.ffffffff-1",
                )
                assert files.create("ledger/f00000-s000009.json", encode_record(_SHARD, later))

    found = run(job, path, Frozen())
    assert zombie
    assert first_difference(clean, found) is None


def test_stages_are_told_in_their_order(job: Path, tmp_path: Path) -> None:
    plan = make_plan(load_job(job, [f"run.path={tmp_path}/run"]))
    with Lease.acquire(open_files(f"{tmp_path}/run")) as lease:
        one = Worker(hire(plan, "worker-0", lease.life))
        seen = [one.exchange(Order(may_load=False)).stage]
        time.sleep(0.5)
        assert one.exchange(Order(may_load=False)).stage == "waiting", "it loaded without leave"
        deadline = time.monotonic() + 60
        while seen[-1] not in ("ready", "ended") and time.monotonic() < deadline:
            stage = one.exchange(Order(may_load=True, wait_seconds=1)).stage
            if stage != seen[-1]:
                seen.append(stage)
        assert seen in (["waiting", "loading", "ready"], ["waiting", "ready"])


def test_workers_write_to_object_storage_and_read_it_back_whole(
    job: Path, clean: PlainRun, tmp_path: Path, crew_of: Any, bucket: Any
) -> None:
    """Conditional puts keep the coordinators apart, workers write side by side."""
    crew_of(2)
    coordinate.run(load_job(job, bucket.overrides))
    assert first_difference(clean, bucket.fetch(tmp_path)) is None
    assert attempts_without_record(tmp_path) == []
