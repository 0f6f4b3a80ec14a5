"""A real crew of three on Ray loses one: what is told live counts each token once, and ends at what the disk holds."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from eventcase import events_of, kinds, of
from plainrun import PlainRun, first_difference, read_plain
from terminalcase import screen

from harvest import show
from harvest.config import load_job
from harvest.runtime import coordinate, telling
from harvest.runtime.telling import run_told
from harvest.runtime.terminal import Terminal

pytest.importorskip("ray")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Stdout(io.StringIO):
    """Kills the first worker that joined once two shards are committed; a reader of the events could."""

    def __init__(self) -> None:
        super().__init__()
        self.pids: list[int] = []
        self.commits = 0

    def write(self, text: str) -> int:
        event = json.loads(text)
        if event["event"] == "worker_joined":
            found = re.fullmatch(r".*, pid (\d+)", event["where"])
            assert found is not None
            self.pids.append(int(found[1]))
        if event["event"] == "shard_committed":
            self.commits += 1
            if self.commits == 2:
                os.kill(self.pids[0], signal.SIGKILL)
        return super().write(text)


class Both:
    """Passes on what a run tells to several who hear of it."""

    def __init__(self, *observers: Any) -> None:
        self.observers = observers

    def __getattr__(self, name: str) -> Any:
        def tell(*args: Any) -> None:
            for observer in self.observers:
                getattr(observer, name)(*args)

        return tell


def test_a_crew_that_loses_a_worker_is_told_truly_to_people_and_programs(
    job: Path, clean: PlainRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # loopback only
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(telling, "PROGRESS_SECONDS", 0.0)
    out, watched = Stdout(), Screen()
    request = load_job(job, [f"run.path={tmp_path}/run", "run.executor=ray", "run.workers=3"])
    with run_told(out) as told:
        told.begun(request.run.path)
        found = coordinate.run(request, observer=Both(told, Terminal(watched)))  # type: ignore[arg-type]
        told.completed(show.run(found).data)
    plain = read_plain(tmp_path / "run")
    assert first_difference(clean, plain) is None
    events = events_of(out.getvalue())
    counts = kinds(events)
    assert (counts["worker_lost"], counts["shard_committed"]) == (1, len(plain.records))
    (lost,) = of(events, "worker_lost")
    assert f"pid {out.pids[0]}: its process died" in lost["why"]
    joined = of(events, "worker_joined")
    assert len({event["worker"] for event in joined}) >= 1
    assert len({event["where"] for event in joined}) == len(joined) >= 2, "each in a process of its own"
    assert of(events, "self_check")[0]["errors"].keys() == plain.rows.keys()
    progress = of(events, "progress")
    last = events[-1]
    for key in ("tokens", "rows", "documents", "shards"):
        assert [event[key] for event in progress] == sorted(event[key] for event in progress), key
        assert progress[-1][key] == last[key], key
    assert last["rows"] == len(plain.keys)
    assert last["documents"] == len(plain.documents)
    assert {event["workers"] for event in progress} <= {0, 1, 2, 3}
    lines = screen(watched.getvalue().encode(), columns=160)
    assert any(line.startswith(f"lost {lost['worker']}: ") for line in lines)
    assert any(
        f"documents {last['documents']} of 240 ({sum(last['skipped'].values())} skipped)  tokens {last['tokens']:,} of"
        f" {last['tokens']:,}  rows {last['rows']:,}  shards 30 of 30" in line
        for line in lines
    )
