"""The coordinator's desk: what stands in the ledger is what was told, whatever comes in between."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harvest.errors import WorkError
from harvest.interrupt import undivided
from harvest.records import Assignment, ShardRecord
from harvest.runtime.intake import Intake, Report
from harvest.runtime.progress import Silent
from harvest.store.ledger import Ledger
from harvest.store.opening import open_files
from tests.store.test_store_ledger import shard_record

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(params=NUMBERS)
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """Sent by a test; answered as a command answers it."""
    before = {one: signal.signal(one, signal.default_int_handler) for one in NUMBERS}
    yield request.param
    found = {one: signal.getsignal(one) for one in NUMBERS}
    for one, answer in before.items():
        signal.signal(one, answer)
    assert found == dict.fromkeys(NUMBERS, signal.default_int_handler), "what answers interrupts is put back"


def nothing(shard: str) -> None:
    """Happens most of the time."""


class Schedule:
    """Wants everything, and notes what it is told."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.running: list[str] = []
        self.failures: list[Any] = []

    def wants(self, assignment: Assignment) -> bool:
        return True

    def committed(self, record: ShardRecord, now: float) -> None:
        self.done.append(record.shard.key)


class Lease:
    def check(self) -> None: ...
    def heartbeat(self, running: Any, failed: Any) -> None: ...


class Heard(Silent):
    def __init__(self, also: Callable[[str], None] = nothing) -> None:
        self.shards: list[str] = []
        self._also = also

    def committed(self, record: ShardRecord) -> None:
        self._also(record.shard.key)
        self.shards.append(record.shard.key)


class Slow(Ledger):
    """Something happens when a record stands, and may keep the next one from standing."""

    def __init__(self, files: Any, after: Callable[[str], None]) -> None:
        super().__init__(files)
        self._after = after

    def commit(self, record: ShardRecord) -> bool:
        made = super().commit(record)
        self._after(record.shard.key)
        return made


def reports(count: int) -> list[Report]:
    records = [shard_record(index) for index in range(count)]
    return [
        Report(assignment=Assignment(shard=record.shard, documents=None, tokens=None, cursor=None), record=record)
        for record in records
    ]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("when", ["the record stands", "it is being told"])
def test_an_interrupt_waits_until_what_is_committed_is_told(
    tmp_path: Path, number: signal.Signals, when: str, count: int
) -> None:
    sent: list[str] = []

    def interrupt(shard: str) -> None:
        if not sent:
            sent.append(shard)
            os.kill(os.getpid(), number)

    early = when == "the record stands"
    ledger = Slow(open_files(str(tmp_path)), interrupt if early else nothing)
    heard, schedule = Heard(nothing if early else interrupt), Schedule()
    with pytest.raises(KeyboardInterrupt):
        Intake(ledger, Lease(), schedule, heard).take(reports(count))  # type: ignore[arg-type]
    assert len(sent) == 1
    assert sorted(heard.shards) == sorted(schedule.done) == sorted(ledger.records())
    assert len(heard.shards) == count


def test_a_second_interrupt_is_answered_at_once_and_the_first_one_is_not_answered_again(number: signal.Signals) -> None:
    answered: list[int] = []

    def answer(number: int, frame: Any) -> None:
        answered.append(number)
        raise KeyboardInterrupt

    signal.signal(number, answer)
    reached = []

    def work() -> None:
        with undivided():
            os.kill(os.getpid(), number)
            reached.append("after the first")
            os.kill(os.getpid(), number)
            reached.append("after the second")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert (reached, answered) == (["after the first"], [number])
    assert signal.getsignal(number) is answer
    signal.signal(number, signal.default_int_handler)


def test_an_interrupt_does_not_hide_what_failed(number: signal.Signals) -> None:
    def work() -> None:
        with undivided():
            os.kill(os.getpid(), number)
            raise ValueError("the work")

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert isinstance(caught.value.__context__, ValueError)


def test_what_nobody_answers_and_threads_that_hear_of_no_interrupt_are_left_alone() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with undivided():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "an end without Python's doing stays one"
        found = []
        interrupts = signal.getsignal(signal.SIGINT)

        def aside() -> None:
            with undivided():
                found.append(signal.getsignal(signal.SIGINT))

        thread = threading.Thread(target=aside)
        thread.start()
        thread.join()
        assert found == [interrupts]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_of_shards_of_which_one_cannot_be_committed_the_others_are_told_and_that_one_is_named(tmp_path: Path) -> None:
    def refuse(shard: str) -> None:
        if shard.endswith("1"):
            raise OSError(errno.EIO, "Input/output error")

    given = reports(3)
    ledger = Ledger(open_files(str(tmp_path)))
    create = ledger.files.create
    ledger.files.create = lambda path, data: (refuse(path.removesuffix(".json")), create(path, data))[1]  # type: ignore[method-assign]
    heard, schedule = Heard(), Schedule()
    with pytest.raises(WorkError, match=r"^shard f00000-s000001: .*Input/output error"):
        Intake(ledger, Lease(), schedule, heard).take(given)  # type: ignore[arg-type]
    assert heard.shards == schedule.done == list(ledger.records()) == ["f00000-s000000", "f00000-s000002"]
