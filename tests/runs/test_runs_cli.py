"""The commands as people use them: exit statuses, one line for every wrong request, nothing written by any of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commandcase import furnished, job_file, jsonl
from plainrun import read_plain, snapshot

import harvest
from harvest.__main__ import _status

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and texts, which no test changes."""
    return furnished(tmp_path_factory.mktemp("place"), [{"text": f"text {i}", "url": "u"} for i in range(10)])


@pytest.fixture
def job(place: Path, tmp_path: Path) -> Path:
    """A job file beside which nothing else lies."""
    return job_file(tmp_path / "job.toml", place, tmp_path / "run", shard_documents=4)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`harvest ...` in this process: (exit status, stdout, stderr)."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the test's own handlers stay

    def call(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        status = _status([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def refuses(command: Command, folder: Path, *arguments: Any, names: tuple[str, ...]) -> str:
    """The command ends with 2, one line on stderr that holds `names`, and nothing changed in the folder."""
    before = snapshot(folder)
    status, out, err = command(*arguments)
    assert (status, out) == (2, ""), (status, out, err)
    assert err.startswith("harvest: ")
    assert err.count("\n") == 1
    assert len(err) < 600
    assert "Traceback" not in err
    assert "hunter2" not in err
    for name in names:
        assert name in err, (name, err)
    assert snapshot(folder) == before
    return err


# ---- what works ------------------------------------------------------------------------------------------------------


def test_plan_run_status_and_verify_of_one_job(command: Command, job: Path, tmp_path: Path) -> None:
    status, out, _ = command("plan", job)
    assert status == 0
    assert "10" in out
    assert not (tmp_path / "run").exists()
    assert command("run", job)[0] == 0
    plain = read_plain(tmp_path / "run")
    assert (plain.complete, len(plain.records), len(plain.documents)) == (True, 3, 10)
    assert command("status", tmp_path / "run")[0] == 0
    assert command("verify", tmp_path / "run")[0] == 0


def test_json_of_every_command_parses_and_tells_the_same_as_the_disk(
    command: Command, job: Path, place: Path, tmp_path: Path
) -> None:
    planned = json.loads(command("plan", job, "--json")[1])
    assert (planned["documents"], planned["shards"]) == (10, 3)
    ran = json.loads(command("run", job, "--json")[1].splitlines()[-1])
    plain = read_plain(tmp_path / "run")
    rows = len(plain.rows["residual.0"])
    assert (ran["rows"], ran["documents"], ran["shards"]) == (rows, 10, 3)
    assert planned["tokens"] == rows, "exact: all documents are among the first 256"
    stands = json.loads(command("status", tmp_path / "run", "--json")[1])
    assert (stands["state"], stands["rows"], stands["missing"]) == ("complete", rows, 0)
    assert json.loads(command("verify", tmp_path / "run", "--json")[1])["damaged"] is False
    found = json.loads(command("sites", place / "model", "--json")[1])
    assert found["layers"] == 3
    assert found["sites"]["residual"]["width"] == 16


def test_a_finished_run_run_again_changes_no_file(command: Command, job: Path, tmp_path: Path) -> None:
    assert command("run", job)[0] == 0
    before = snapshot(tmp_path / "run")
    for again in (("run", job), ("plan", job), ("status", tmp_path / "run"), ("verify", tmp_path / "run")):
        assert command(*again)[0] == 0
    assert snapshot(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("capture.layers=[0]", ["residual.0"]),
        ("capture.layers=all", ["residual.0", "residual.1", "residual.2"]),
        ('capture.sites=["mlp", "residual.1"]', ["mlp.0", "mlp.1", "mlp.2", "residual.1"]),
    ],
)
def test_set_takes_toml_and_plain_text(
    setting: str, names: list[str], command: Command, job: Path, tmp_path: Path
) -> None:
    status, _, err = command("run", job, "--set", setting, "--set", "data.limit = 1")
    assert status == 0, err
    plain = read_plain(tmp_path / "run")
    assert sorted(plain.rows) == sorted(names)
    assert len(plain.documents) == 1


def test_damage_ends_verify_with_1_and_names_the_object(command: Command, job: Path, tmp_path: Path) -> None:
    command("run", job)
    target = next((tmp_path / "run/shards").glob("f00000-s000001.*")) / "residual.1/c.0.0"
    content = bytearray(target.read_bytes())
    content[5] ^= 1
    target.write_bytes(content)
    status, _, err = command("verify", tmp_path / "run")
    assert status == 1
    assert "f00000-s000001" in err.splitlines()[-1]


def test_work_that_fails_ends_with_1_and_names_the_document(command: Command, job: Path, tmp_path: Path) -> None:
    jsonl(tmp_path / "bad.jsonl", [{"text": "a"}, {"text": None}])
    status, _, err = command("run", job, "--set", f"data.path={tmp_path}/bad.jsonl")
    assert status == 1
    assert "document 1 (bad.jsonl, row 1, column 'text'): null" in err.splitlines()[-1]


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["plan", "run"])
@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (["capture.layers=[99]"], ("capture.layers", "99", "0 to 2")),
        (["capture.layers=[-4]"], ("capture.layers", "-4")),
        (["capture.layers=[]"], ("capture.layers",)),
        (['capture.sites=["residul"]'], ("residul", "residual")),
        (['capture.sites=["router"]'], ("router", "residual")),
        (['capture.sites=["residual.7"]'], ("capture.sites = 'residual.7'", "0 to 2")),
        (["model.dtype=float8"], ("model.dtype", "float8", "bfloat16")),
        (["model.device=warp"], ("model.device", "warp")),
        (["model.name=/nowhere/model"], ("model.name", "/nowhere/model")),
        (["store.dtype=float8"], ("store.dtype", "float8")),
        (["store.chunk_mb=0"], ("store.chunk_mb", "0")),
        (["tokens.context=0"], ("tokens.context", "0")),
        (["tokens.context=65"], ("tokens.context", "65", "64")),
        (["tokens.context=-3"], ("tokens.context", "-3")),
        (["tokens.batch=0"], ("tokens.batch", "0")),
        (["tokens.bos=maybe"], ("tokens.bos", "maybe", "window")),
        (["data.path=/nowhere/texts.jsonl"], ("data.path", "/nowhere/texts.jsonl")),
        (["data.text=body"], ("data.text = 'body'", "texts.jsonl has no such column", "text, url")),
        (['data.keep=["label"]'], ("data.keep = 'label'", "text, url")),
        (["data.spans=txt"], ("data.spans = 'txt'", "did you mean 'text'?")),
        (
            ['directions=[{name="a",column="url",positive=["u"],negative="rest",pair="column:pid"}]'],
            ("directions.0.pair = 'column:pid'", "no such column"),
        ),
        (["data.messages=text"], ("data.messages", "chat")),
        (["data.limit=0"], ("data.limit", "0")),
        (["data.sample=1.5"], ("data.sample", "1.5")),
        (["data.ids=text", "data.text=text"], ("text", "ids")),
        (["data.txet=text"], ("data.txet", "did you mean text")),
        (["dota.path=x"], ("dota", "data")),
        (["run.path=''"], ("run.path",)),
        (["model.attention=frob"], ("model.attention = 'frob'", "'auto', 'eager' and 'sdpa' need nothing more")),
        (["tokens.tokenizer=tests"], ("tokens.tokenizer = 'tests': no tokenizer", "tokenizer.json")),
        (["data.path=frob://x/y"], ("data.path = 'frob://x/y': unknown kind of store 'frob'",)),
        (["run.path=/proc/run"], ("run.path = '/proc/run'", "cannot be written", "choose another folder")),
        (["run.attempts=0"], ("run.attempts", "0")),
        (["run.storage.secret_access_key=hunter2"], ("run.storage.secret_access_key", "environment")),
        (["run.storage.endpoint_url=http://x"], ("run.storage.endpoint_url",)),
        (["run.workers=2", "run.executor=inline"], ("run.workers = 2", "'auto' and 'ray'")),
        (["run.path='memory://run'", "run.workers=2"], ("memory://run", "inline")),
        (["tokens.batching=stacked"], ("tokens.batching", "stacked", "packed")),
        (['capture.pool=["median"]'], ("capture.pool", "median", "mean")),
        (["statistics.covariance=true"], ("statistics.covariance = true", "a tenth", "instead of 4")),
        (["model.adapter=/nowhere"], ("model.adapter", "/nowhere")),
        (["store.memory_gb=0.001"], ("store.memory_gb", "0.001")),
        (["capture.store=false", "statistics.moments=false"], ("capture.store",)),
        (["capture.layers"], ("--set", "key.sub=value")),
    ],
    ids=str,
)
def test_a_wrong_setting_is_one_line_before_the_model_loads(
    what: str,
    settings: list[str],
    names: tuple[str, ...],
    command: Command,
    job: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from harvest.model import load

    monkeypatch.setattr(load, "load_model", lambda *_: pytest.fail("the model was loaded"))
    overrides = [part for setting in settings for part in ("--set", setting)]
    refuses(command, tmp_path, what, job, *overrides, names=names)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (None, ("job.toml", "no such file")),
        ("[model\n", ("job.toml", "TOML")),
        ("\xff\xfe", ("job.toml",)),
        ("", ("model", "missing")),
        ('[model]\nname = "x"\n[data]\npath = "y"\n', ("run", "missing")),
        ('[model]\nname = 3\n[data]\npath = "y"\n[run]\npath = "r"\n', ("model.name", "3")),
    ],
    ids=["missing", "torn", "binary", "empty", "without run", "number"],
)
def test_a_job_file_that_is_none_is_refused(
    text: str | None, names: tuple[str, ...], command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "job.toml"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    refuses(command, tmp_path, "run", path, names=names)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--set", "data.limit", "5"], "--set data.limit=5"),
        (["--set", "data.limit", "=", "5"], "--set data.limit=VALUE"),
        (["--set", "run.path=x", "--set", "data.limit", "5"], "--set data.limit=5"),
    ],
)
def test_a_setting_that_is_split_in_two_words_is_told_to_be_one(
    arguments: list[str], told: str, command: Command, job: Path, tmp_path: Path
) -> None:
    for what in ("plan", "run"):
        refuses(command, tmp_path, what, job, *arguments, names=("--set data.limit: ", "in one word", told))


def test_a_folder_that_is_not_for_this_run_is_refused_untouched(command: Command, job: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    refuses(command, tmp_path, "run", job, names=("run.path", "not a folder"))
    (tmp_path / "run").unlink()
    (tmp_path / "run/sub").mkdir(parents=True)
    (tmp_path / "run/sub/thesis.tex").write_text("mine")
    refuses(command, tmp_path, "run", job, names=("run.path", "thesis.tex"))
    refuses(command, tmp_path, "run", job, "--set", "run.overwrite=true", names=("run.path", "thesis.tex"))
    other = tmp_path / "other"
    assert command("run", job, "--set", f"run.path={other}")[0] == 0
    refuses(command, tmp_path, "run", job, "--set", f"run.path={other}", "--set", "data.seed=1", names=("data.seed",))


def test_a_run_inside_its_own_data_is_refused(command: Command, job: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    jsonl(tmp_path / "data/a.jsonl", [{"text": "a"}])
    for path in (f"{tmp_path}/data", f"{tmp_path}/data/", f"{tmp_path}/data/**/*.jsonl"):
        where = ("--set", f"data.path={path}", "--set", f"run.path={tmp_path}/data/runs/a")
        refuses(command, tmp_path, "run", job, *where, names=("run.path", "lies inside data.path"))
    beside = ("--set", f"data.path={tmp_path}/data", "--set", f"run.path={tmp_path}/data2")
    assert command("run", job, *beside)[0] == 0
    glob = ("--set", f"data.path={tmp_path}/data/*.jsonl", "--set", f"run.path={tmp_path}/data/run")
    assert [command("run", job, *glob)[0] for _ in range(2)] == [0, 0]


def test_a_path_too_long_for_the_disk_is_refused(command: Command, job: Path, tmp_path: Path) -> None:
    refuses(command, tmp_path, "run", job, "--set", f"run.path={tmp_path}/{'x' * 5000}", names=("run.path", "too long"))
    refuses(command, tmp_path, "status", f"{tmp_path}/{'x' * 5000}", names=("path", "too long"))


def test_a_command_whose_outputs_are_closed_does_its_work(job: Path, tmp_path: Path) -> None:
    line = f"exec {sys.executable} -m harvest run {job} >&- 2>&-"
    assert subprocess.run(["/bin/sh", "-c", line], timeout=120, check=False).returncode == 0
    assert read_plain(tmp_path / "run").complete


def test_a_run_that_another_process_works_on_is_refused(command: Command, job: Path, tmp_path: Path) -> None:
    command("run", job, "--set", "data.limit=4")
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        from harvest.store import lease

        held = json.loads((tmp_path / "run/coordinator.json").read_text())
        started = lease.process_start(sleeper.pid)
        held.update(pid=sleeper.pid, started=started, released=False, heartbeat=time.time(), life="00c0ffee")
        (tmp_path / "run/coordinator.json").write_text(json.dumps(held))
        refuses(command, tmp_path, "run", job, "--set", "data.limit=8", names=(str(sleeper.pid), held["host"]))
    finally:
        sleeper.kill()
        sleeper.wait()
    assert command("run", job, "--set", "data.limit=8")[0] == 0, "its process is gone: no need to wait a minute"


def test_a_disk_too_small_for_the_plan_is_refused(
    command: Command, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harvest.store.local import LocalFiles

    monkeypatch.setattr(LocalFiles, "free_bytes", lambda self: 1000)
    refuses(command, tmp_path, "run", job, names=("run.path", "free"))


@pytest.mark.parametrize("what", ["status", "verify", "directions"])
def test_a_folder_that_holds_no_run_is_refused_by_the_readers(what: str, command: Command, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    refuses(command, tmp_path, what, tmp_path, names=("not a run",))
    refuses(command, tmp_path, what, tmp_path / "absent", names=("not a run",))
    refuses(command, tmp_path, what, tmp_path / "notes.txt", names=("notes.txt",))


@pytest.mark.parametrize(
    "arguments",
    [
        ("directions", "x", "x is not a run (no run.json); allowed is the run.path of a job that has begun"),
        ("report", "x", "x is not a run"),
        ("status", "pyproject.toml", "path = 'pyproject.toml': it is a file, not a folder"),
        ("export", "npy", "x", "y", "x is not a run"),
        ("verify", "x", "--repair", "x is not a run"),
        ("sites", "/nowhere/model", "model.name = '/nowhere/model': neither a folder"),
        ("frobnicate", "no such command 'frobnicate'; harvest --help lists what is allowed"),
        ("run", "missing argument 'JOB'; harvest run --help lists what is allowed"),
        ("run", "job.toml", "--frobnicate", "no such option: --frobnicate; harvest run --help"),
        (
            "plan",
            "job.toml",
            "--workers",
            "x",
            "invalid value for '--workers': allowed are whole numbers; harvest plan",
        ),
        ("plan", "jobs/dem.toml", "job file jobs/dem.toml: no such file; did you mean jobs/demo.toml?"),
    ],
    ids=str,
)
def test_commands_that_cannot_be_are_one_line(
    arguments: tuple[str, ...], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    *words, told = arguments
    refuses(command, tmp_path, *words, names=(told,))


def test_a_path_that_is_nearly_there_is_told_the_nearest(
    command: Command, job: Path, tmp_path: Path, place: Path
) -> None:
    for setting, near, meant in (("data.path", "text.jsonl", "texts.jsonl"), ("model.name", "modle", "model")):
        wrong = ("--set", f"{setting}={place}/{near}")
        refuses(command, tmp_path, "plan", job, *wrong, names=(f"{setting} = ", f"did you mean {place}/{meant}?"))


def test_an_export_to_where_nothing_can_be_written_is_refused(command: Command, job: Path, tmp_path: Path) -> None:
    assert command("run", job)[0] == 0
    refuses(command, tmp_path, "export", "npy", tmp_path / "run", "/proc/x", names=("out = '/proc/x': cannot be writ",))


def test_an_option_that_the_model_does_not_take_is_named(command: Command, job: Path, tmp_path: Path) -> None:
    status, _, err = command("run", job, "--set", "model.options.frob=3")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("harvest: model.options.frob: no such option; this model takes ")
    assert not (tmp_path / "run").exists()


# ---- real processes ----------------------------------------------------------------------------------------------


def process(*arguments: Any, **more: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "harvest", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **more,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_with_130_and_the_same_command_resumes(
    number: signal.Signals, command: Command, job: Path, tmp_path: Path
) -> None:
    jsonl(tmp_path / "long.jsonl", [{"text": f"text {i}"} for i in range(200)])
    arguments = ("run", job, "--set", f"data.path={tmp_path}/long.jsonl")
    life = process(*arguments)
    while life.poll() is None and len(list((tmp_path / "run/ledger").glob("f*.json"))) < 2:
        time.sleep(0.01)
    life.send_signal(number)
    out, err = life.communicate(timeout=60)
    assert (life.returncode, out) == (130, ""), err
    again = shlex.join(["harvest", *map(str, arguments)])
    assert err.splitlines()[-1] == f"harvest: interrupted; the same command resumes: {again}"
    assert "Traceback" not in err
    half = read_plain(tmp_path / "run")
    assert 2 <= len(half.records) < 50
    heard, kept = err.splitlines()[-3:-1]
    assert heard.startswith("harvest: stopping: committed shards are kept, those in work are dropped; ")
    assert re.match(r"harvest: stopped after \d+:\d\d; kept: ", kept)
    rows = len(half.rows["residual.0"])
    assert f"  rows {rows:,}  shards {len(half.records)} of " in kept, "what is lost is not counted"
    lease = json.loads((tmp_path / "run/coordinator.json").read_text())
    assert lease["released"], "nobody has to wait for this life"
    assert harvest.open(tmp_path / "run").complete is False
    assert command(*arguments)[0] == 0
    whole = read_plain(tmp_path / "run")
    assert [row["document"] for row in whole.documents] == list(range(200))
    assert {key: whole.records[key] for key in half.records} == half.records, "what was committed stays as it was"


def test_of_two_processes_that_start_together_one_works_and_the_other_hears_of_it(job: Path, tmp_path: Path) -> None:
    jsonl(tmp_path / "long.jsonl", [{"text": f"text {i}"} for i in range(200)])
    lives = [process("run", job, "--set", f"data.path={tmp_path}/long.jsonl") for _ in range(2)]
    ends = [(life, *life.communicate(timeout=120)) for life in lives]
    assert [row["document"] for row in read_plain(tmp_path / "run").documents] == list(range(200))
    statuses = sorted(life.returncode for life in lives)
    assert statuses in ([0, 2], [0, 0]), "0 twice where one was done before the other looked"
    for life, out, err in ends:
        assert "\x1b" not in out + err, "plain where nobody watches"
        if life.returncode == 0:
            assert "rows" in out
        else:
            (other,) = {each.pid for each in lives} - {life.pid}
            assert (out, err.count("\n")) == ("", 1)
            assert f"pid {other} on " in err


def test_the_bare_command_prints_its_help_and_one_line(command: Command) -> None:
    status, out, err = command()
    assert status == 2
    assert "verify" in out + err
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "harvest: no command is given; harvest --help lists what is allowed"


def test_a_result_that_cannot_be_written_is_one_line_and_no_failed_run(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for words, status in ((["run", str(job)], 0), (["plan", str(job)], 1)):
        with open("/dev/full", "w") as full, monkeypatch.context() as there:
            there.setattr(sys, "stdout", full)
            assert _status(words) == status
            with contextlib.suppress(OSError):
                full.close()
        err = capsys.readouterr().err
        assert "what there is to say cannot be written: No space left on device" in err.splitlines()[-1]
        assert "Traceback" not in err
