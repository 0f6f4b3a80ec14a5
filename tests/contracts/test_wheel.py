"""What is handed out: a wheel with the package alone, and a source distribution with everything to work on it."""

from __future__ import annotations

import subprocess
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from wheel import ROOT, build, install

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("built"))


def files_of(*folders: str) -> set[str]:
    """Files of the checkout below these folders, without what Python makes of them."""
    return {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.endswith(".pyc")
    }


def test_the_wheel_holds_the_package_the_licence_and_nothing_else(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[1]).namelist())
    about = f"harvest-{PROJECT['version']}.dist-info"
    assert {name for name in names if not name.startswith(f"{about}/")} == files_of("harvest")
    assert {"harvest/py.typed", "harvest/report/page.html.j2", f"{about}/licenses/LICENSE"} <= names


def test_the_wheel_says_what_the_project_says(built: tuple[Path, Path]) -> None:
    about = f"harvest-{PROJECT['version']}.dist-info"
    archive = zipfile.ZipFile(built[1])
    told = message_from_string(archive.read(f"{about}/METADATA").decode())
    assert (told["Name"], told["Version"], told["License-Expression"]) == ("harvest", PROJECT["version"], "Apache-2.0")
    assert told["Requires-Python"] == PROJECT["requires-python"]
    assert told["Description-Content-Type"] == "text/markdown"
    needed = [line for line in told.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert len(needed) == len(PROJECT["dependencies"])
    assert "harvest = harvest.__main__:main" in archive.read(f"{about}/entry_points.txt").decode()
    assert built[1].name.endswith("-py3-none-any.whl")


def test_the_source_distribution_holds_what_the_tests_and_the_demo_need(built: tuple[Path, Path]) -> None:
    prefix = f"harvest-{PROJECT['version']}/"
    with tarfile.open(built[0]) as archive:
        names = {name.removeprefix(prefix) for name in archive.getnames()}
    top = {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "Makefile", "constraints.txt", "conftest.py"}
    assert top | {".ci/run", ".pre-commit-config.yaml", "jobs/demo.toml"} <= names
    assert files_of("harvest", "tests", "schemas", "infra") <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_the_wheel_alone_answers_and_has_the_schemas(built: tuple[Path, Path], tmp_path: Path) -> None:
    programs = install(built[1], tmp_path / "env")
    (tmp_path / "schemas").mkdir()

    def output(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = output(programs / "python", "-c", "import harvest; print(harvest.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path / "env")
    assert "harvest" in output(programs / "harvest", "--help")
    output(programs / "python", "-m", "harvest.schemas", "schemas")
    made = {path.name for path in (tmp_path / "schemas").iterdir() if path.stat().st_size}
    assert made == {path.name for path in (ROOT / "schemas").iterdir()}
