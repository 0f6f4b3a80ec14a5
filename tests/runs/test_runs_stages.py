"""The report of the stages: every second of a worker is somewhere, the slow stage is named, old records are read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plainrun import first_difference, read_plain, snapshot
from runcase import install, job
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest import show
from harvest.errors import WorkError
from harvest.pipeline import Pipeline
from harvest.records import ShardRecord
from harvest.runtime.status import status_of
from harvest.stages import BESIDE, OWN, Stages, stages_of
from harvest.store.attempt import AttemptWriter
from harvest.store.files import Files
from harvest.store.ledger import Ledger
from harvest.store.opening import open_files
from harvest.text.tokenise import Tokeniser

TEXTS = [f"text number {number}" for number in range(24)]
WAITS = ("read.idle", "forward.idle", "forward.blocked")
START = ("start", "load")


def harvested(path: Path, model: Any = None, **tables: Any) -> Any:
    tables = {"store": {"shard_documents": 4}, **tables}
    model = tiny_llama(vocab=300) if model is None else model
    return harvest.run(job(path, **tables), model=model, tokenizer=byte_tokenizer(), data=TEXTS)


def told(run: Any) -> Stages:
    found = stages_of(run.shards)
    assert found is not None
    return found


def seconds_on_disk(path: Path) -> list[dict[str, float]]:
    """Of the records in dataset order, read as plain JSON."""
    return [json.loads(file.read_text())["seconds"] for file in sorted((path / "ledger").glob("*.json"))]


def slowed(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, seconds: float = 0.03) -> None:
    """A method that takes this much longer, far more than everything else that the tiny model does."""
    original: Callable[..., Any] = getattr(kind, name)

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(seconds)
        return original(*args, **more)

    monkeypatch.setattr(kind, name, slow)


def test_every_second_of_a_worker_is_busy_waiting_or_between_the_stages(tmp_path: Path) -> None:
    run = harvested(tmp_path / "run", capture={"pool": ["mean"]})
    per_shard = seconds_on_disk(tmp_path / "run")
    assert len(per_shard) == 6
    total = {key: sum(one.get(key, 0.0) for one in per_shard) for key in {*OWN, *BESIDE, *WAITS, "worker", *START}}
    assert {key for one in per_shard for key in one} <= set(total)
    assert all(seconds >= 0 for one in per_shard for seconds in one.values())
    own = sum(total[key] for key in (*OWN, "forward.idle", "forward.blocked"))
    assert 0 < own <= total["worker"] + 1e-3
    report = told(run)
    assert report.worker_seconds == pytest.approx(total["worker"])
    assert report.other == pytest.approx(total["worker"] - own, abs=1e-3)
    for stage in ("read", "forward", "copy", "reduce", "pool", "write", "finish", "check"):
        assert report.stages[stage].busy == pytest.approx(total[stage])
        assert report.stages[stage].busy > 0, stage
    assert report.forward_share == pytest.approx(total["forward"] / total["worker"])


def test_a_workers_start_is_told_once_with_its_first_shard(tmp_path: Path) -> None:
    run = harvested(tmp_path / "run")
    starts = [one for one in seconds_on_disk(tmp_path / "run") if "start" in one]
    assert len(starts) == told(run).starts == 1
    assert starts[0]["start"] >= starts[0]["check"] > 0
    assert told(run).start == pytest.approx(starts[0]["start"])


@pytest.mark.parametrize(
    ("kind", "name", "limit", "words"),
    [
        (Tokeniser, "shard", "read", "reading and tokenising limits: the forward waited for it"),
        (Pipeline, "_capture", "forward", "the forward limits: it was busy"),
        (AttemptWriter, "append", "write", "writing limits: the forward waited for it"),
        (AttemptWriter, "close", "write", "writing limits"),
        (Ledger, "commit", "commit", "commit limits"),
    ],
)
def test_the_stage_that_is_slow_is_the_one_that_is_named(
    kind: type, name: str, limit: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed(monkeypatch, kind, name, 0.1)
    report = told(harvested(tmp_path / "run"))
    assert (report.limit, report.why[: len(words)]) == (limit, words), report.text
    assert report.text.endswith(f"limit   {report.why}")


def test_a_coordinator_that_hands_nothing_out_is_named(tmp_path: Path) -> None:
    run = harvested(tmp_path / "run")
    starved = {"worker": 10.0, "forward": 1.0, "read": 0.5, "read.idle": 8.0, "forward.idle": 8.5}
    report = stages_of([replace(run.shards[0], seconds=starved)])
    assert report is not None
    assert report.limit == "coordinator"
    assert "85 % of the time" in report.why
    assert report.stages["read"].before == pytest.approx(8.0)
    assert report.stages["read"].behind == pytest.approx(1.5)


def test_what_a_run_prints_its_status_prints_again_and_programs_read_the_same(tmp_path: Path) -> None:
    run = harvested(tmp_path / "run")
    printed, status = show.run(run), show.status(status_of(str(tmp_path / "run")))
    report = told(run)
    assert printed.text.endswith(report.text)
    assert status.text.endswith(report.text)
    assert printed.data["stages"] == status.data["stages"] == json.loads(json.dumps(report.data()))
    complete = json.loads((tmp_path / "run/complete.json").read_text())
    assert complete["seconds"]["worker"] == pytest.approx(report.worker_seconds)


def test_records_that_tell_of_no_worker_are_read_and_give_no_report(tmp_path: Path) -> None:
    """Runs of before: busy seconds of three stages."""
    run = harvested(tmp_path / "run")
    before = [replace(record, seconds={"forward": 1.0, "reduce": 0.1, "write": 0.2}) for record in run.shards]
    assert stages_of(before) is None
    assert stages_of([]) is None
    status = {**status_of(str(tmp_path / "run")), "stages": None}
    assert show.status(status).text.splitlines()[-1].startswith("forward")
    mixed = stages_of([*before, run.shards[0]])
    assert mixed is not None
    assert mixed.worker_seconds == run.shards[0].seconds["worker"]


def test_a_try_that_failed_counts_as_time_of_the_worker_and_not_of_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = Pipeline._capture, []

    def failing(*args: Any, **more: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            time.sleep(0.2)
            raise OSError(5, "Input/output error (scripted)")
        original(*args, **more)

    monkeypatch.setattr(Pipeline, "_capture", failing)
    run = harvested(tmp_path / "run", tokens={"batch": 20})
    report = told(run)
    forward = sum(record.seconds["forward"] for record in run.shards)
    assert report.stages["forward"].busy == pytest.approx(forward)
    assert forward < report.worker_seconds - 0.2


def test_measuring_changes_no_bit_and_a_finished_run_keeps_its_report(tmp_path: Path) -> None:
    harvested(tmp_path / "one")
    harvested(tmp_path / "two", store={"shard_documents": 4})
    assert first_difference(read_plain(tmp_path / "one"), read_plain(tmp_path / "two")) is None
    before, report = snapshot(tmp_path / "one"), told(harvest.open(str(tmp_path / "one")))
    assert told(harvested(tmp_path / "one")) == report
    assert snapshot(tmp_path / "one") == before


def test_several_lives_add_up_and_each_tells_of_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """A disk that takes three records, and then no more."""

        def __init__(self, files: Files) -> None:
            self.files, self.records = files, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.files, name)

        def create(self, path: str, data: bytes) -> bool:
            self.records += path.startswith("ledger/")
            if self.records > 3:
                raise OSError(28, "No space left on device (scripted)")
            return self.files.create(path, data)

    with monkeypatch.context() as patch:
        install(patch, Full)
        with pytest.raises(WorkError):
            harvested(tmp_path / "run")
    first = stages_of(Ledger(open_files(str(tmp_path / "run"))).records().values())
    report = told(harvested(tmp_path / "run"))
    assert first is not None
    assert (first.starts, report.starts) == (1, 2)
    assert report.worker_seconds > first.worker_seconds
    assert "mean of 2 starts of workers" in report.text, "it was one worker that began twice"
    assert " after a worker began" in report.text
    (other,) = [line for line in report.text.splitlines() if line.startswith("other ")]
    assert other.endswith("  between the stages: batches and shards begun, progress told")


NUMBERS = st.floats(0, 1e6)


@given(parts=st.lists(st.fixed_dictionaries(dict.fromkeys((*OWN, *BESIDE, *WAITS), NUMBERS)), min_size=1, max_size=5))
def test_the_report_of_parts_is_that_of_their_sum(parts: list[dict[str, float]]) -> None:
    def record(seconds: dict[str, float]) -> ShardRecord:
        """Only the seconds are looked at."""
        found: Any = type("Told", (), {"seconds": seconds})()
        return found  # type: ignore[no-any-return]

    whole = [
        {**part, "worker": sum(part[k] for k in (*OWN, "forward.idle", "forward.blocked")) + 1.0} for part in parts
    ]
    summed = {key: sum(part[key] for part in whole) for key in whole[0]}
    one, many = stages_of([record(summed)]), stages_of(map(record, whole))
    assert one is not None
    assert many is not None
    assert many.other == pytest.approx(len(parts), abs=1e-3)
    assert many.limit == one.limit
    for name, stage in one.stages.items():
        assert many.stages[name].busy == pytest.approx(stage.busy)
