"""The Makefile installs what a target needs and no more, and says what it does before it is silent for minutes."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def would_do(target: str, venv: Path) -> list[str]:
    """The commands of a target in a checkout where nothing is installed yet."""
    words = ["make", "--dry-run", "--always-make", target, f"VENV={venv}"]
    apart = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}  # of a make above
    done = subprocess.run(words, cwd=ROOT, env=apart, capture_output=True, text=True, check=True)
    return done.stdout.replace("\\\n", " ").splitlines()


def extras(lines: list[str]) -> set[str]:
    return {
        one
        for line in lines
        if (found := re.search(r"--editable '\.\[([\w,]+)\]'", line))
        for one in found[1].split(",")
    }


@pytest.mark.parametrize(("target", "needed"), [("demo", set()), ("docs", {"docs"}), ("test", {"s3", "test"})])
def test_a_target_installs_the_extras_that_it_needs(target: str, needed: set[str], tmp_path: Path) -> None:
    assert extras(would_do(target, tmp_path / "venv")) == needed


@pytest.mark.parametrize("target", ["demo", "docs", "test"])
def test_what_is_installed_is_said_before_pip_is_silent(target: str, tmp_path: Path) -> None:
    lines = would_do(target, tmp_path / "venv")
    stamps = [at for at, line in enumerate(lines) if line.startswith("touch ")]
    starts = [0, *(at + 1 for at in stamps)]
    for start, stop in zip(starts, stamps, strict=False):
        assert lines[start].startswith('echo "Installing '), lines[start:stop]


def test_the_site_is_built_with_what_its_extra_names() -> None:
    names = {re.split(r"[>=<]", one)[0] for one in EXTRAS["docs"]}
    assert names <= {re.split(r"[>=<]", one)[0] for one in EXTRAS["test"]}
    assert {metadata.metadata(name)["Name"].lower() for name in names} == names


def test_the_demo_ends_with_commands_that_show_what_it_made() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndemo:")[2].partition("\n\n")[0]
    hints = "\n".join(line for line in recipe.splitlines() if line.startswith("\t@echo"))
    for command in ("status", "directions", "verify"):
        assert f"harvest {command} runs/demo" in hints
