"""The report of the stages where several workers took part: sums of what each has spent."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import test_worker

import harvest
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
        assert metered[stage] == pytest.approx(total), "a scrape shows busy seconds alone"
    assert set(metered) <= set(ORDER)
