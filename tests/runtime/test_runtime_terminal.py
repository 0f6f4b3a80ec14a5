"""What a person sees of a run: a bar that fits its terminal, and in a log plain lines, one for each event."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commandcase import furnished, job_file
from plainrun import read_plain
from terminalcase import in_terminal, screen

import harvest
from harvest.outcome import Progress
from harvest.runtime import coordinate, terminal
from harvest.runtime.progress import Lines
from harvest.runtime.tally import Tally
from harvest.runtime.terminal import Bar, Log, Terminal, person
from harvest.store.ledger import Ledger
from harvest.store.opening import open_files

TEXTS = [f"text {i}" if i % 7 else "" for i in range(40)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnished(tmp_path_factory.mktemp("place"), [{"text": text} for text in TEXTS])


@pytest.fixture
def job(place: Path, tmp_path: Path) -> Path:
    return job_file(tmp_path / "job.toml", place, tmp_path / "run", shard_documents=4, on_bad="skip")


def logged(job: Path, *overrides: str) -> list[str]:
    """The lines of a run's log."""
    stream = io.StringIO()
    coordinate.run(job, overrides=overrides, observer=Log(stream))
    return stream.getvalue().splitlines()


def test_a_log_says_how_a_run_begins_goes_on_and_ends(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = logged(job, "data.limit=8")
    assert re.fullmatch(r"harvest: \S+/run begins: 3 names  documents 0 of 8  tokens 0 of .*  shards 0 of 2", first[0])
    assert first[1] == "harvest: loading the model"
    loaded = re.fullmatch(r"harvest: model loaded in ([\d.]+) s, ([\d.]+) s after the command began", first[2])
    forward = re.fullmatch(r"harvest: first forward ([\d.]+) s after the command began", first[3])
    assert loaded is not None
    assert forward is not None
    assert float(loaded[1]) <= float(loaded[2]) <= float(forward[1])
    assert re.fullmatch(r"harvest: complete after \d+:\d\d: documents 8 of 8 \(2 skipped\)  .*shards 2 of 2", first[4])
    assert len(first) == 5, "nothing in between that is due"
    monkeypatch.setattr(terminal, "LOG_SECONDS", 0.0)
    second = logged(job)
    assert "going on after 1 shard committed earlier: 3 names  documents 4 of 40 (1 skipped)" in second[0]
    shares = [int(found[1]) for line in second if (found := re.match(r"harvest: (\d+) % done  ", line))]
    assert len(shares) >= 9
    assert shares == sorted(shares)
    assert shares[-1] == 100
    rows = len(read_plain(job.parent / "run").rows["residual.0"])
    assert f"tokens {rows:,} of {rows:,}  rows {rows:,}  shards 10 of 10" in second[-1]


def test_what_goes_wrong_is_a_line_each_without_control_codes(tmp_path: Path) -> None:
    stream = io.StringIO()
    log: Any = Log(stream)
    log.joined("worker-0", "a, pid 3", 1)
    log.left("worker-0", "a, pid 3: its process died", 0)
    log.retried("f0-s0", "shard f0-s0: bad \x1b[31mname\x07\nTraceback")
    log.gave_up("f0-s1", "shard f0-s1: disk full")
    log.gave_up("f0-s0", "shard f0-s0: no\ttext \u202e.")
    log.warned("report.html is not written")
    log.stopped(KeyboardInterrupt())
    assert [line.partition(": documents")[0] for line in stream.getvalue().splitlines()] == [
        "harvest: worker-0 (a, pid 3) is ready, 1 are",
        "harvest: lost worker-0: a, pid 3: its process died; 0 are left",
        r"harvest: trying again: shard f0-s0: bad \x1b[31mname\x07 Traceback",
        "harvest: gave up on shard f0-s1; the end says why",
        r"harvest: gave up: shard f0-s0: no\ttext \u202e.",
        "harvest: warning: report.html is not written",
        "harvest: gave up: shard f0-s1: disk full",
        "harvest: stopped after 0:00; kept",
    ]


def test_a_log_that_nobody_reads_any_more_does_not_end_the_run() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        lines = Lines(stream)
        for _ in range(3):
            lines.say("harvest: working")


def test_a_screen_is_a_terminal_that_can_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(person(io.StringIO()), Log)
    for term, kind in [("xterm", Terminal), ("dumb", Log), ("", Terminal)]:
        monkeypatch.setenv("TERM", term)
        assert isinstance(person(Tty()), kind)


@pytest.mark.parametrize("columns", [44, 110])
def test_the_bar_of_a_crew_counts_once_and_fits_the_terminal(
    columns: int, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers at one shard, one of which dies; messages that are wider than the terminal."""

    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    coordinate.run(job)
    files = open_files(str(job.parent / "run"))
    records = [replace(record, documents=1000) for record in Ledger(files).records().values()]
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Tty()
    shown: Any = Terminal(stream)
    estimate = SimpleNamespace(documents=10_000, tokens=123_456, rows=123_456, shards=10, judged="first")
    shown.started(SimpleNamespace(estimate=estimate), records[:3])
    shown.loaded(1.0, 0.5)
    shown.joined("worker-0", "here, pid 1", 1)
    shown.joined("worker-1", "here, pid 2", 2)
    one = {"shard": records[3].shard.key, "rows": 10, "bytes": 10, "forward_seconds": 0.1}
    for attempt in ("a", "a", "b"):
        shown.advanced(Progress(attempt=attempt, tokens=10, **one))
    shown.left("worker-1", "here, pid 2: its process died [bold]", 1)
    shown.retried(records[3].shard.key, f"shard {records[3].shard.key}: [red]{'x' * 30}")
    bar = shown._bar
    bar.refresh()
    done = sum(record.tokens for record in records[:3]) + 20
    assert bar.tally.tokens == done
    shown.stopped(KeyboardInterrupt())
    text = stream.getvalue().encode()
    lines = screen(text, columns=200)
    assert "lost worker-1: here, pid 2: its process died [bold]" in lines
    assert any("[red]xxxx" in line for line in lines), "text of others is no markup"
    at = next(i for i, line in enumerate(lines) if "stopped, kept is " in line)
    drawn = lines[at : at + 3]
    assert all(len(line) <= columns for line in drawn)
    assert drawn[1].startswith("  documents 3,000 of 10,000 (")
    assert ("…" in drawn[1]) == (columns == 44)
    if columns == 110:
        assert f"tokens {done - 20:,} of about" in drawn[1], "what was under way is lost"
        assert "tokens/s" in drawn[2]
        assert "% of the bare forward" in drawn[2]


def test_a_run_on_a_terminal_draws_there_and_prints_its_result_elsewhere(job: Path, tmp_path: Path) -> None:
    found = in_terminal([sys.executable, "-m", "harvest", "run", str(job)], columns=90)
    assert found.status == 0
    assert found.out.startswith(b"run         ")
    assert b"\x1b" not in found.out
    drawn = screen(found.shown, columns=90)
    assert any(line.split()[0] == "complete" and "100%" in line for line in drawn if line.strip())
    rows = len(read_plain(tmp_path / "run").rows["residual.0"])
    assert any(f"documents 40 of 40 (6 skipped)  tokens {rows:,} of {rows:,}" in line for line in drawn)
    assert found.shown.rfind(b"\x1b[?25h") > found.shown.rfind(b"\x1b[?25l") >= 0
    assert b"Traceback" not in found.shown


def test_a_log_of_a_process_is_plain_and_ends_with_what_went_wrong(job: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    settings = ["--set", f"data.path={tmp_path}/bad.jsonl", "--set", "data.on_bad=fail"]
    command = [sys.executable, "-m", "harvest", "run", str(job), *settings]
    found = subprocess.run(command, capture_output=True, timeout=120, check=False)
    lines = found.stderr.decode().splitlines()
    assert (found.returncode, found.stdout) == (1, b"")
    assert all(line.startswith("harvest: ") and line.isprintable() for line in lines)
    assert [line.split()[1] for line in lines[:3]] == [f"{tmp_path}/run", "loading", "model"]
    assert lines[-3].startswith("harvest: gave up on shard f00000-s000000; the end says why")
    assert lines[-2].startswith("harvest: stopped after ")
    assert sum("null" in line for line in lines) == 1, "what went wrong is said once"
    assert "document 1 (bad.jsonl, row 1" in lines[-1]
    assert not harvest.open(tmp_path / "run").complete


def test_the_bar_tells_the_speed_of_the_tally_that_it_shows_now() -> None:
    """A watch looks at a run anew, and hands the bar what it comes to."""
    bar = Bar(io.StringIO(), Tally())
    moving = SimpleNamespace(speed_text="7 tokens/s")
    bar.tally = moving  # type: ignore[assignment]
    assert bar.speed() == "7 tokens/s"
