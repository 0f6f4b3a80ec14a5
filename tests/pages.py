"""The README and the site's pages, read as their reader reads them: block by block, in a folder of one's own.

A block of TOML is loaded as a job. A block with a title is a file of that name. A block of Python is executed by
itself, so that it can be copied alone. In a block of a console each `$` line is a command:

- `harvest ...` runs in this process and has to end with status 0, or with the one that its comment names
  (`# exit status 2`); the lines below it are what it prints: failures word by word (`...` is any text), others by their
  first words;
- commands that need a cluster or half a minute are parsed by the real command line, and their settings are checked;
- `make`, `pip`, `python`, `sbatch`: their targets, extras and files have to exist;
- a few programs of others (OTHERS) are only named.
"""

from __future__ import annotations

import re
import shlex
import signal
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from realdata import ROOT

from harvest import __main__ as commands
from harvest.config import load_job

README = ROOT / "README.md"
SITE = ROOT / "docs/pages"
GENERATED = ("reference", "examples")
"""Folders of the site that are written by a program, and tested with it."""
PAGES = [page for page in sorted(SITE.rglob("*.md")) if page.relative_to(SITE).parts[0] not in GENERATED]
OTHERS = ("export", "kubectl", "llama-cli", "ray", "scancel", "source", "ssh", "cat", "head")
ELSEWHERE = ("run.workers=", "run.address=", "--calibrate")
"""What a command asks for that a test does not have."""
FENCE = re.compile(r"^( *)```(\w+)(?: title=\"([^\"]+)\")?[^\n]*\n(.*?)^\1```$", flags=re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The blocks of a page in their order; of one language where it is given."""
    whole = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(whole):
        indent, kind, title, text = match.groups()
        inner = "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))
        found.append(Block(page, whole[: match.start()].count("\n") + 1, kind, title, inner))
    return [block for block in found if language in (None, block.language)]


def follow(block: Block, scope: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Does what a reader of this block does, in the working directory; returns what a block of Python leaves behind."""
    if block.language == "toml":
        load_job(tomllib.loads(block.text))
    if block.title is not None:
        Path(block.title).parent.mkdir(parents=True, exist_ok=True)
        Path(block.title).write_text(block.text, encoding="utf-8")
        if block.language == "python":
            compile(block.text, block.where, "exec")
    elif block.language == "python":
        scope = dict(scope)
        exec(compile(block.text, block.where, "exec"), scope)
    elif block.language == "console":
        for line, shown in _lines(block):
            _command(block, line, shown, capsys)
    return scope


def _lines(block: Block) -> list[tuple[str, list[str]]]:
    """Each command with the lines that are shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line.strip() and found:
            found[-1][1].append(line)
    return found


def _command(block: Block, line: str, shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line, comments=True)
    program, rest = words[0], words[1:]
    if program == "harvest":
        _harvest(block, line, rest, shown, capsys)
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), f"{block.where}: {line}"
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for named in re.findall(r"\[([\w,]+)\]", " ".join(rest)):
            assert set(named.split(",")) <= set(extras), f"{block.where}: {line}"
    elif program in ("python", "sbatch"):
        file = next(word for word in rest if not word.startswith("-"))
        assert (ROOT / file).exists() or Path(file).exists(), f"{block.where}: no {file}"
        if (ROOT / file).exists():
            text = (ROOT / file).read_text() + (ROOT / "harvest/__main__.py").read_text()
            assert all(f'"{word}"' in text for word in rest if word.startswith("--") and "=" not in word), line
    else:
        assert program in OTHERS, f"{block.where}: {program}"


def _harvest(block: Block, line: str, words: list[str], shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Runs a command, or parses it where it needs what a test does not have."""
    if any(word.startswith(ELSEWHERE) for word in words):
        group = typer.main.get_command(commands.app)
        name, command, rest = group.resolve_command(group.make_context("harvest", list(words)), list(words))  # type: ignore[attr-defined]
        given = command.make_context(name, rest).params
        load_job(given["job"], given.get("overrides") or ())
        return
    expected = re.search(r"# exit status (\d+)", line)
    capsys.readouterr()
    before = signal.getsignal(signal.SIGTERM)
    try:
        status = commands._status(words)
    finally:
        signal.signal(signal.SIGTERM, before)
    said = capsys.readouterr()
    assert status == (int(expected[1]) if expected else 0), f"{block.where}: {line}\n{said.err}"
    printed = (said.out + said.err).splitlines()
    firsts = [row.split()[:1] for row in printed]
    for row in shown:
        if row.startswith("harvest: "):
            there = any(re.fullmatch(".*".join(map(re.escape, row.split("..."))), seen) for seen in printed)
        else:
            there = row == "..." or row.split()[:1] in firsts
        assert there, f"{block.where}: {line}\nshows {row!r}, it printed\n{said.out}{said.err}"
