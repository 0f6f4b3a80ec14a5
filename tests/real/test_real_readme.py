"""The README is true: its examples run, its output looks so, its tables list what is there, and it is short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import README, Block, blocks, follow
from realdata import REAL, ROOT

from harvest import show
from harvest.__main__ import _status, app
from harvest.model.architectures import ARCHITECTURES

TEXT = README.read_text(encoding="utf-8")


def real(test: Any) -> Any:
    """Marks what needs the packages."""
    for mark in REAL:
        test = mark(test)
    return test


PYTHON = blocks(README, "python")


@real
@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"line {block.line}")
def test_every_python_example_runs(
    block: Block,
    run: Any,
    model: Any,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    furnish(tmp_path, run, monkeypatch)
    follow(block, {"model": model, "tokenizer": tokenizer}, capsys)


@real
def test_every_command_and_every_job_works(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    furnish(tmp_path, run, monkeypatch)
    for block in blocks(README):
        if block.language != "python":
            follow(block, {}, capsys)


def furnish(folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's folder: the demo's job, and its run."""
    (folder / "runs").mkdir()
    (folder / "runs/demo").symlink_to(Path(run.path).resolve())
    (folder / "jobs").symlink_to(ROOT / "jobs")
    monkeypatch.chdir(folder)


@real
def test_the_output_shown_has_the_lines_that_the_demo_prints(run: Any) -> None:
    shown = re.search(r"<!-- output: demo -->\n```text\n(.*?)```", TEXT, flags=re.DOTALL)
    assert shown
    printed = show.run(run).text
    assert [line.split()[:1] for line in shown[1].splitlines()] == [line.split()[:1] for line in printed.splitlines()]


@real
def test_make_demo_prints_the_table_of_its_direction_at_all_layers(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    commands = re.findall(r"^\t\$\(BIN\)/harvest (.*)$", recipe, flags=re.MULTILINE)
    assert commands == ["run jobs/demo.toml", "directions runs/demo"]
    furnish(tmp_path, run, monkeypatch)
    assert _status(commands[1].split()) == 0
    printed = capsys.readouterr().out
    for mode in ("mean_difference", "whitened"):
        at = re.findall(rf"^  {mode} +(\S+) ", printed, flags=re.MULTILINE)
        assert {name for name in run.names if name.startswith("residual.")} <= {*at}


def test_the_number_of_architectures_is_that_of_the_table_that_the_code_uses() -> None:
    assert re.findall(r"all (\d+) architectures", TEXT) == [str(len(ARCHITECTURES))]


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len(TEXT.encode()) < 25_000


def test_every_command_of_the_table_exists_and_answers() -> None:
    listed = set(re.findall(r"^\| `harvest (\w+) ", TEXT, flags=re.MULTILINE))
    assert listed <= {command.callback.__name__ for command in app.registered_commands if command.callback}
    done = subprocess.run([sys.executable, "-m", "harvest", "--help"], capture_output=True, text=True, check=True)
    assert all(command in done.stdout for command in listed)


def test_the_table_of_files_lists_every_file_and_folder_and_nothing_else() -> None:
    table = TEXT.partition("<!-- files -->")[2]
    listed = set(re.findall(r"^\| `(harvest/[^`]+)` ", table, flags=re.MULTILINE))
    there = {
        f"harvest/{path.name}" + ("/" if path.is_dir() else "")
        for path in (ROOT / "harvest").iterdir()
        if (path.suffix == ".py" and path.name != "__init__.py") or (path / "__init__.py").exists()
    }
    assert listed == there


def test_every_path_that_the_readme_names_exists() -> None:
    named = set(re.findall(r"`((?:tests|jobs|harvest|schemas|docs|infra)/[^` ]*)`", TEXT))
    missing = {path for path in named if not (ROOT / path).exists()}
    assert not missing


def test_every_make_target_that_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {a or b for a, b in re.findall(r"`make ([a-z]+)`|\$ make ([a-z]+)", TEXT)}
    assert {"demo", "test"} <= named <= targets
