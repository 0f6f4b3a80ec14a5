"""The README is true: its examples run, its output looks so, its tables list what is there."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from realdata import REAL, ROOT

from harvest import show
from harvest.__main__ import app
from harvest.config import load_job
from harvest.model.overview import overview

README = (ROOT / "README.md").read_text(encoding="utf-8")


def real(test: Any) -> Any:
    """Marks what needs the packages."""
    for mark in REAL:
        test = mark(test)
    return test


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@real
@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_every_python_example_runs(
    number: int, run: Any, model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/demo").symlink_to(Path(run.path).resolve())
    monkeypatch.chdir(tmp_path)
    scope = {"model": model, "tokenizer": tokenizer}
    exec(compile(blocks("python")[number], f"README.md, python block {number}", "exec"), scope)
    if "bits" in scope:
        assert np.array_equal(scope["values"], run["residual.15"].numpy(slice(0, scope["rows"])))


@real
def test_the_output_shown_has_the_lines_that_the_demo_prints(run: Any) -> None:
    shown = re.search(r"<!-- output: demo -->\n```text\n(.*?)```", README, flags=re.DOTALL)
    assert shown
    printed = show.run(run).text
    assert [line.split()[:1] for line in shown[1].splitlines()] == [line.split()[:1] for line in printed.splitlines()]


def test_the_table_of_architectures_is_the_one_that_the_code_uses() -> None:
    assert overview() in README.partition("<!-- architectures -->")[2]


def test_every_job_example_is_a_valid_job() -> None:
    for block in blocks("toml"):
        load_job(tomllib.loads(block))


def test_every_command_of_the_table_exists_and_answers() -> None:
    listed = set(re.findall(r"^\| `harvest (\w+) ", README, flags=re.MULTILINE))
    assert listed <= {command.callback.__name__ for command in app.registered_commands if command.callback}
    done = subprocess.run([sys.executable, "-m", "harvest", "--help"], capture_output=True, text=True, check=True)
    assert all(command in done.stdout for command in listed)


def test_the_table_of_files_lists_every_file_and_folder_and_nothing_else() -> None:
    table = README.partition("<!-- files -->")[2]
    listed = set(re.findall(r"^\| `(harvest/[^`]+)` ", table, flags=re.MULTILINE))
    there = {
        f"harvest/{path.name}" + ("/" if path.is_dir() else "")
        for path in (ROOT / "harvest").iterdir()
        if (path.suffix == ".py" and path.name != "__init__.py") or (path / "__init__.py").exists()
    }
    assert listed == there


def test_every_path_that_the_readme_names_exists() -> None:
    named = set(re.findall(r"`((?:tests|jobs|harvest|schemas)/[^` ]*)`", README))
    missing = {path for path in named if not (ROOT / path).exists()}
    assert not missing


def test_every_make_target_that_the_readme_names_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {a or b for a, b in re.findall(r"`make ([a-z]+)`|\$ make ([a-z]+)", README)}
    assert {"demo", "test"} <= named <= targets
