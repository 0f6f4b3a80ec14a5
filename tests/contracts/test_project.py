"""What stands beside the code: nothing strays in at the top, and what is said in several places is said alike."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import harvest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOLDERS = {".ci", "docs", "harvest", "infra", "jobs", "schemas", "tests"}
FILES = {
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "Makefile",
    "README.md",
    "conftest.py",
    "constraints.txt",
    "pyproject.toml",
}
APACHE = "Version 2.0, January 2004"


def tracked() -> list[str]:
    """Paths that the project keeps; a source distribution has no record of them."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return listed.strip("\0").split("\0")


def test_nothing_else_stands_at_the_top_level() -> None:
    paths = tracked()
    assert {path.partition("/")[0] for path in paths if "/" in path} <= FOLDERS
    assert {path for path in paths if "/" not in path} <= FILES


def test_the_readme_says_what_each_thing_at_the_top_level_is() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("<!-- files -->")[2]
    named = set(re.findall(r"`([^`]+)`", "\n".join(line for line in table.splitlines() if line.startswith("| `"))))
    hidden = {".gitignore", "README.md"}
    there = {path.partition("/")[0] + "/" if "/" in path else path for path in tracked()} - hidden
    assert {name for name in there if name not in named} <= {".ci/", "harvest/"}


def test_one_version_is_said_everywhere_and_the_changelog_tells_of_it() -> None:
    assert PROJECT["version"] == harvest.__version__ == citation()["version"]
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    released = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:]]
    assert headings[0] == "[Unreleased]"
    assert all(released)
    assert PROJECT["version"] in [match[1] for match in released if match] or f"Becomes {PROJECT['version']}," in (
        ROOT / "CHANGELOG.md"
    ).read_text(encoding="utf-8")


def test_the_changelog_has_no_heading_that_the_form_does_not_know() -> None:
    kinds = re.findall(r"^### (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert kinds


def test_the_licence_is_the_whole_apache_licence_and_the_one_that_is_named() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert APACHE in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert text.count("\n") > 200
    assert "The Harvest authors" in text
    assert PROJECT["license"] == citation()["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]


def citation() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    return read


def test_the_citation_has_what_its_format_demands_and_says_what_the_project_says() -> None:
    cited = citation()
    assert cited["cff-version"] == "1.2.0"
    assert cited["type"] == "software"
    assert cited["title"] == "Harvest"
    assert cited["message"]
    assert cited["abstract"].rstrip(".") == PROJECT["description"]
    assert [author["name"] for author in cited["authors"]] == [author["name"] for author in PROJECT["authors"]]
    assert cited["keywords"] == PROJECT["keywords"]
    assert set(cited) <= {"cff-version", "message", "type", "title", "abstract", "authors", "version", "license"} | {
        "keywords"
    }


def test_the_hooks_before_a_commit_are_the_commands_of_make_lint() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE)
    assert recipe
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert repository["repo"] == "local"
    assert [hook["entry"] for hook in repository["hooks"]] == commands
    assert all(hook["language"] == "system" and hook["pass_filenames"] is False for hook in repository["hooks"])
    assert re.search(r"^VENV \?= \.venv$", makefile, flags=re.MULTILINE)
