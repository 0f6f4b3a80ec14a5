"""`harvest status --watch`: follows what another process commits, reads only what is new, and knows when to stop."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eventcase import events_of, of
from s3server import s3_server
from terminalcase import in_terminal, screen
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.__main__ import _status
from harvest.errors import RequestError, WorkError
from harvest.runtime import status as status_module
from harvest.runtime.status import Follower, status_of
from harvest.runtime.watch import Pulse, watch
from harvest.store.lease import Holder, read_holder, this_machine
from harvest.store.local import LocalFiles
from harvest.store.opening import open_files

TEXTS = [f"text {i}" if i % 7 else "" for i in range(40)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten shards."""
    path = tmp_path_factory.mktemp("finished") / "run"
    job = {"run": {"path": str(path), "threads": 1}, "store": {"shard_documents": 4}, "data": {"on_bad": "skip"}}
    harvest.run(job, model=tiny_llama(vocab=300), tokenizer=byte_tokenizer(), data=[{"text": text} for text in TEXTS])
    return path


class Replay:
    """The same run as it was at any earlier moment, by hand of a coordinator that is this process."""

    def __init__(self, finished: Path, path: Path) -> None:
        self.finished, self.path = finished, path
        shutil.copytree(finished, path)
        for record in (path / "ledger").iterdir():
            record.unlink()
        (path / "complete.json").unlink()
        self.lead("0000000a")

    @property
    def keys(self) -> list[str]:
        return sorted(record.stem for record in (self.finished / "ledger").iterdir())

    def commit(self, key: str) -> None:
        shutil.copy(self.finished / f"ledger/{key}.json", self.path / f"ledger/{key}.json")

    def take_back(self, key: str) -> None:
        (self.path / f"ledger/{key}.json").unlink()

    def complete(self) -> None:
        for key in self.keys:
            self.commit(key)
        shutil.copy(self.finished / "complete.json", self.path / "complete.json")

    def lead(self, life: str, **changes: Any) -> None:
        held = json.loads((self.finished / "coordinator.json").read_text())
        own = {"life": life, "released": False, "heartbeat": time.time(), **changes}
        (self.path / "coordinator.json").write_text(json.dumps({**held, **own}))


@pytest.fixture
def replay(finished: Path, tmp_path: Path) -> Replay:
    return Replay(finished, tmp_path / "run")


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """But for sums of seconds, which are added up in another order, and the age of the heartbeat."""
    for told in (found, expected):
        told["stages"] = None if told["stages"] is None else round(told["stages"].worker_seconds, 6)
        told["worker"] = told["worker"] and {**told["worker"], "seconds_since_heartbeat": 0, "doing_seconds": 0}
    assert found == expected


@pytest.mark.parametrize("seed", range(8))
def test_after_any_history_a_look_tells_what_a_fresh_reader_tells(seed: int, replay: Replay) -> None:
    """Shards committed, taken back and committed anew, coordinators that follow one another, the end."""
    dice, follower, life = random.Random(seed), Follower(str(replay.path)), 10
    there: set[str] = set()
    for _ in range(25):
        what = dice.choice(["commit", "commit", "commit", "take back", "take over", "look"])
        if what == "commit":
            there.add(key := dice.choice(replay.keys))
            replay.commit(key)
        elif what == "take back" and there:
            there.remove(key := dice.choice(sorted(there)))
            replay.take_back(key)
        elif what == "take over":
            life += 1
            replay.lead(f"{life:08x}", running=[dice.choice(replay.keys)])
        else:
            told = follower.look()
            assert follower.tally.rows == told["rows"]
            assert follower.tally.shards == told["committed"] == len(there)
            same(told, status_of(str(replay.path)))
    replay.complete()
    same(follower.look(), status_of(str(replay.path)))


def test_a_look_reads_the_new_records_alone_and_another_life_is_read_anew(
    replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that another life harvested again has a record of the same name."""
    read: list[str] = []

    class Counting(LocalFiles):
        def read(self, path: str) -> bytes:
            read.append(path)
            return super().read(path)

    monkeypatch.setattr(status_module, "open_files", lambda path, **_: Counting(path))
    keys = replay.keys
    for key in keys[:6]:
        replay.commit(key)
    follower = Follower(str(replay.path))
    follower.look()

    def records(new: list[str], life: str | None = None) -> list[str]:
        read.clear()
        for key in new:
            replay.commit(key)
        if life is not None:
            replay.lead(life)
        follower.look()
        return sorted(path for path in read if path.startswith("ledger/"))

    assert records([]) == []
    assert read == ["complete.json", "coordinator.json"]
    assert records(keys[6:8]) == [f"ledger/{key}.json" for key in keys[6:8]]
    assert records([], "0000000b") == [f"ledger/{key}.json" for key in keys[:8]]


def test_a_watch_ends_at_a_complete_run_and_the_last_look_is_of_all_of_it(replay: Replay, finished: Path) -> None:
    seen: list[dict[str, Any]] = []

    def look(status: dict[str, Any], _: Any) -> None:
        seen.append(status)
        replay.commit(replay.keys[len(seen) - 1])
        if len(seen) == 5:
            replay.complete()

    last = watch(str(replay.path), 0.1, look)
    assert [status["committed"] for status in seen] == [0, 1, 2, 3, 4, 10]
    assert [status["state"] for status in seen] == ["running"] * 5 + ["complete"]
    assert (last["rows"], last["skipped"]) == (len(harvest.open(str(finished))), {"empty": 6})


@pytest.mark.parametrize(
    ("holder", "why"),
    [
        ({"released": True}, "has stopped"),
        ({"started": 1}, "is not running any more"),
        ({"released": True, "failed": {"f00000-s000001": "shard f00000-s000001: no"}}, "shard f00000-s000001: no"),
        (None, "it has no coordinator"),
    ],
    ids=["stopped", "killed", "failed", "none"],
)
def test_a_run_that_nobody_works_on_is_one_line_and_status_1(
    holder: dict[str, Any] | None, why: str, replay: Replay, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    replay.commit(replay.keys[0])
    if holder is None:
        (replay.path / "coordinator.json").unlink()
    else:
        replay.lead("0000000b", **holder)
    assert _status(["status", str(replay.path), "--watch"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0].startswith("harvest: unfinished")
    last = err.splitlines()[-1]
    assert last.startswith(f"harvest: {replay.path}: nobody is at work on it: ")
    assert why in last
    assert "; 1 shard committed" in last
    assert last.endswith("harvest run JOB resumes it")
    assert _status(["status", str(replay.path), "--watch", "--json"]) == 1
    out, err = capsys.readouterr()
    events = events_of(out)
    assert [event["event"] for event in events] == ["status", "watch_ended"]
    assert err == f"harvest: {events[-1]['error']}\n"


def test_what_cannot_be_watched_is_refused(replay: Replay, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError, match="is not a run"):
        watch(str(tmp_path / "absent"), None, lambda *_: None)
    for every in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(RequestError, match="--every"):
            watch(str(replay.path), every, lambda *_: None)
    assert _status(["status", str(replay.path), "--every", "3"]) == 2
    assert "--watch" in capsys.readouterr().err
    assert _status(["status", str(tmp_path / "absent"), "--watch", "--json"]) == 2
    (event,) = events_of(capsys.readouterr().out)
    assert (event["event"], event["status"]) == ("watch_ended", 2)


def test_a_coordinator_elsewhere_is_dead_when_its_heartbeat_stands_still_by_our_clock(replay: Replay) -> None:
    """Its own clock may be an hour off, and its process is on another machine."""
    found = read_holder(open_files(str(replay.path)))
    assert found is not None
    now = [0.0]
    for skew in (0.0, 3600.0, -3600.0):
        pulse = Pulse(lambda: now[0])

        def at(seconds: float, beat: float, pulse: Pulse = pulse, skew: float = skew) -> str | None:
            now[0] += seconds
            there = replace(found, machine="another", heartbeat=time.time() + skew + beat)
            return pulse.gone(there)

        told = [at(5, -1000.0 + 5 * look) for look in range(50)]
        assert told == [None] * 50, "it beats"
    silent: Holder = replace(found, machine="another", heartbeat=time.time())
    pulse = Pulse(lambda: now[0])
    assert pulse.gone(silent) is None
    now[0] += 59
    assert pulse.gone(silent) is None
    now[0] += 2
    assert "has given no sign of life for 61 s" in (pulse.gone(silent) or "")
    long_ago = replace(silent, heartbeat=time.time() - 7200)
    pulse = Pulse(lambda: now[0])
    assert pulse.gone(long_ago) is None
    now[0] += 11
    assert "for 7200 s" in (pulse.gone(long_ago) or ""), "as one who would take it over waits"


def test_status_as_json_is_one_line_of_the_schema(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(["status", str(finished), "--json"]) == 0
    out = capsys.readouterr().out
    (line,) = out.splitlines()
    (event,) = events_of(out + json.dumps(ended()) + "\n")[:-1]
    assert json.loads(line) == event
    assert (event["state"], event["rows"], event["missing"]) == ("complete", len(harvest.open(str(finished))), 0)


def ended() -> dict[str, Any]:
    return {"event": "watch_ended", "version": 1, "time": "", "run": "", "status": 0, "error": None}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], str]]:
    """Puts a run on a server that speaks S3, which the environment leads to."""
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)

        def put(folder: Path) -> str:
            files = open_files(url := f"s3://{server.bucket}/run", server.storage)
            for path in sorted(folder.rglob("*")):
                if path.is_file() and "shards" not in path.parts:
                    files.replace(str(path.relative_to(folder)), path.read_bytes())
            return url

        yield put


def test_a_run_in_a_bucket_is_followed_too(replay: Replay, bucket: Callable[[Path], str]) -> None:
    seen: list[int] = []

    def look(status: dict[str, Any], _: Any) -> None:
        seen.append(status["committed"])
        replay.commit(replay.keys[len(seen) - 1])
        if len(seen) == 3:
            replay.complete()
        bucket(replay.path)

    assert watch(bucket(replay.path), 0.1, look)["state"] == "complete"
    assert seen == [0, 1, 2, 10]


# ---- real processes --------------------------------------------------------------------------------------------------


def test_a_watch_of_another_process_shows_it_to_its_end(tmp_path: Path) -> None:
    tiny_llama(vocab=300).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(120)))
    job = tmp_path / "job.toml"
    job.write_text(
        f'[model]\nname = "{tmp_path}/model"\n[data]\npath = "{tmp_path}/texts.jsonl"\n'
        f'[store]\nshard_documents = 4\n[run]\npath = "{tmp_path}/run"\nthreads = 1\n'
    )
    python = [sys.executable, "-m", "harvest"]
    life = subprocess.Popen([*python, "run", str(job)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while life.poll() is None and not (tmp_path / "run/run.json").exists():
            time.sleep(0.02)
        watching = [*python, "status", str(tmp_path / "run"), "--watch", "--every", "0.1", "--json"]
        found = subprocess.run(watching, capture_output=True, text=True, timeout=200, check=False)
        assert (found.returncode, found.stderr) == (0, "")
    finally:
        life.communicate(timeout=200)
    events = events_of(found.stdout)
    told = of(events, "status")
    assert len(told) + 1 == len(events)
    assert [event["rows"] for event in told] == sorted(event["rows"] for event in told)
    assert (told[-1]["state"], told[-1]["rows"]) == ("complete", len(harvest.open(str(tmp_path / "run"))))
    assert events[-1] == {**events[-1], "event": "watch_ended", "status": 0, "error": None}


def test_ctrl_c_leaves_a_terminal_as_it_was(replay: Replay) -> None:
    replay.commit(replay.keys[0])
    own = {"pid": os.getpid(), "machine": this_machine(), "started": _started()}
    replay.lead("0000000b", running=replay.keys[1:3], **own)
    command = [sys.executable, "-m", "harvest", "status", str(replay.path), "--watch", "--every", "0.2"]
    found = in_terminal(command, until="under way", keys=b"\x03", columns=72)
    assert found.status == 130
    assert found.out == b""
    assert found.shown.endswith(f"harvest: {replay.path} is not watched any more; the run goes on\r\n".encode())
    assert found.shown.rfind(b"\x1b[?25h") > found.shown.rfind(b"\x1b[?25l") >= 0, "the cursor is there again"
    assert b"Traceback" not in found.shown
    drawn = screen(found.shown[: found.shown.rfind(b"\x1b[?25h")], columns=72)
    assert any("running, 2 shards under way" in line for line in drawn)
    assert any("documents 4 of 40" in line for line in drawn)


def _started() -> int:
    from harvest.store.lease import process_start

    found = process_start(os.getpid())
    assert found is not None
    return found


def test_a_dead_run_raises_workerror_for_python_callers_too(replay: Replay) -> None:
    replay.lead("0000000b", released=True)
    with pytest.raises(WorkError, match="nobody is at work on it"):
        watch(str(replay.path), None, lambda *_: None)
