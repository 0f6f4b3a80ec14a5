"""What `import harvest` offers: the names that it loads late are those that editors and type checkers see."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import write_run

import harvest
from harvest.errors import RequestError

ROOT = Path(__file__).parents[1]
USE = """
from pathlib import Path
from typing import assert_type
import harvest
from harvest.reading.several import Runs

def first(run: harvest.Run, name: str) -> harvest.Activations:
    return run[name]

opened = harvest.open(Path("runs/demo"))
assert_type(opened, harvest.Run)
assert_type(harvest.open(["a", "b"]), harvest.Run | Runs)
assert_type(opened.best().direction, harvest.Direction)
assert_type(opened.quote(3).token, str)
assert_type(harvest.run("job.toml"), harvest.Run)
harvest.run("job.toml", modle=None)  # a slip
"""


def seen_by_checkers() -> dict[str, str]:
    """Name -> `module:attribute`, of the imports that never run."""
    (block,) = [
        node
        for node in ast.parse((ROOT / "harvest/__init__.py").read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    found: dict[str, str] = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
        else:
            assert isinstance(node, ast.Assign)
            name, source = map(ast.unparse, (node.targets[0], node.value))
            found[name] = found.pop(source)
    return found


def test_what_type_checkers_see_is_what_there_is() -> None:
    assert seen_by_checkers() == harvest._HOME
    for name, home in harvest._HOME.items():
        module, _, attribute = home.partition(":")
        assert getattr(harvest, name) is getattr(importlib.import_module(module), attribute)


def test_the_classes_of_annotations_are_those_of_what_is_returned(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r")
    run = harvest.open(fake.path)
    assert type(run) is harvest.Run
    assert type(run["mlp.1"]) is harvest.Activations
    assert type(harvest.concept_direction([[1.0, 0.0], [0.0, 1.0]], [0, 1])) is harvest.Direction


@pytest.mark.slow
def test_a_type_checker_knows_what_calls_return_and_finds_a_slip(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(USE)
    words = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(tmp_path / "use.py")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    problems = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(problems) == 1, done.stdout + done.stderr
    assert f"use.py:{USE[: USE.index('modle')].count(chr(10)) + 1}: error: Unexpected keyword" in problems[0]


@pytest.mark.parametrize(
    ("asked", "meant"), [("residual.7", "residual.10"), ("residual.99", "residual.10"), ("rezidual.0", "residual.0")]
)
def test_a_name_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path, asked: str, meant: str) -> None:
    run = harvest.open(write_run(tmp_path / "r").path)
    told = f"name '{asked}': this run has residual.0, residual.10, mlp.1; did you mean {meant}?"
    for ask in (lambda: run[asked], lambda: run.features(asked)):
        with pytest.raises(RequestError) as refused:
            ask()
        assert str(refused.value) == told


def test_of_hundreds_of_names_some_are_listed_and_the_nearest_layer_named(tmp_path: Path) -> None:
    names = {f"{site}.{layer}": 2 for site in ("residual", "mlp") for layer in range(40)}
    run = harvest.open(write_run(tmp_path / "r", names=names).path)
    with pytest.raises(RequestError) as refused:
        run["mlp.55"]
    assert str(refused.value) == (
        "name 'mlp.55': this run has residual.0, residual.1, residual.2, residual.3, residual.4 ... mlp.39 (80); "
        "did you mean mlp.39?"
    )
    with pytest.raises(RequestError, match=r"\(80\)$"):
        run["zzz"]
