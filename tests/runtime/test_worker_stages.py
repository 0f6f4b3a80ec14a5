"""The report of the stages where several workers took part: sums of what each has spent."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import test_worker

import harvest
from harvest.records import ShardRecord
from harvest.runtime import worker
from harvest.stages import ORDER, stages_of

crew_of = test_worker.crew_of


def test_the_workers_seconds_add_up_and_each_of_them_tells_of_its_start(
    job: Path, tmp_path: Path, crew_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    metered: Counter[str] = Counter()

    class Meter(worker.NoMeter):
        def record(self, name: str, value: float, **labels: str) -> None:
            if name == "harvest_stage_seconds_total":
                metered[labels["stage"]] += value

    tried: list[ShardRecord] = []
    finished = worker.Worker._finished

    def noted(self: worker.Worker, report: worker.Report, *, called_off: bool) -> None:
        if report.record is not None:
            tried.append(report.record)
        finished(self, report, called_off=called_off)

    monkeypatch.setattr(worker.Worker, "_finished", noted)
    monkeypatch.setattr(worker, "NoMeter", Meter)
    crew_of(2)
    test_worker.run(job, tmp_path / "run")
    records = harvest.open(str(tmp_path / "run")).shards
    report = stages_of(records)
    assert report is not None
    assert report.starts == sum("start" in record.seconds for record in records) == 2
    assert report.load > 0
    assert report.start > report.load
    assert report.worker_seconds == pytest.approx(sum(record.seconds["worker"] for record in records))
    for stage in ORDER:
        total = sum(record.seconds.get(stage, 0.0) for record in records)
        assert report.stages[stage].busy == pytest.approx(total) if total else stage not in report.stages
        # the last shard may be tried by both, and the later of the two tries has no record in the ledger
        spent = sum(record.seconds.get(stage, 0.0) for record in tried)
        assert metered[stage] == pytest.approx(spent), "a scrape shows busy seconds alone, and those of every try"
    assert {record.attempt for record in records} <= {record.attempt for record in tried}
    assert set(metered) <= set(ORDER)
