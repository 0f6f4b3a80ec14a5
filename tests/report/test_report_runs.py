"""The report as a part of a run: there when it ends, ours to the tools, and never in the run's way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from plainrun import snapshot
from reportcase import DIRECTION, parse, records, run

import harvest
from harvest import show
from harvest.checking.verify import verify_run
from harvest.report import write
from harvest.runtime import coordinate


def test_a_finished_run_has_its_report_and_nothing_calls_it_foreign(tmp_path: Path) -> None:
    run(tmp_path / "run", directions=[DIRECTION])
    assert "complete" in parse(tmp_path / "run/report.html").text
    assert verify_run(tmp_path / "run").findings == ()
    assert f"report      {tmp_path}/run/report.html" in show.run(harvest.open(tmp_path / "run")).text.splitlines()


def test_a_second_run_changes_nothing_and_writes_the_report_where_it_is_missing(tmp_path: Path) -> None:
    rows = records()
    run(tmp_path / "run", rows)
    before = snapshot(tmp_path / "run")
    run(tmp_path / "run", rows)
    assert snapshot(tmp_path / "run") == before
    (tmp_path / "run/report.html").unlink()
    run(tmp_path / "run", rows)
    assert (tmp_path / "run/report.html").exists()
    assert snapshot(tmp_path / "run", without=["report.html"]) == {
        k: v for k, v in before.items() if k != "report.html"
    }


def test_a_grown_run_has_a_report_of_all_of_it(tmp_path: Path) -> None:
    rows = records()
    run(tmp_path / "run", rows, data={"limit": 20})
    first = (tmp_path / "run/report.html").read_text()
    run(tmp_path / "run", rows, data={"limit": 45})
    assert '<b>20</b><span class="soft">documents' in first
    assert '<b>45</b><span class="soft">documents' in (tmp_path / "run/report.html").read_text()


def test_overwriting_a_run_removes_its_report_before_anything_is_harvested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = records()
    run(tmp_path / "run", rows)

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(coordinate, "run_inline", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", rows, run={"overwrite": True})
    assert not (tmp_path / "run/report.html").exists()


def test_a_mended_run_has_a_new_report(tmp_path: Path) -> None:
    from harvest.checking.repair import repair_run

    run(tmp_path / "run")
    (tmp_path / "run/report.html").write_text("old")
    (tmp_path / "run/statistics.parquet").unlink()
    repair_run(tmp_path / "run")
    assert "complete" in parse(tmp_path / "run/report.html").text


def test_matplotlib_says_nothing_where_it_has_no_home(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "MPL"))}
    done = subprocess.run(
        [sys.executable, "-c", "import harvest.report.charts"],
        env={**kept, "HOME": str(tmp_path / "file")},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'matplotlib'"), OSError(28, "No space left")])
def test_a_report_that_fails_is_one_line_and_the_run_is_complete(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> str:
        raise error

    monkeypatch.setattr(write, "page", fail)
    made = run(tmp_path / "run")
    assert made.complete
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"harvest: warning: report.html is not written: {type(error).__name__}: ")
    assert line.endswith(f"; harvest report {made.path} tries again")
    assert not (tmp_path / "run/report.html").exists()
    assert harvest.open(tmp_path / "run").summary() == made.summary()
    assert verify_run(tmp_path / "run").findings == ()
