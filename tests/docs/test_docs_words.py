"""What the pages name is there: messages, settings, files, commands, versions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from pages import PAGES, README, SITE, blocks
from realdata import ROOT

from harvest.__main__ import app
from harvest.config import Job
from harvest.reading.reader import Run

TABLES = {
    name: set(kind.annotation.model_fields)  # type: ignore[union-attr]
    for name, kind in Job.model_fields.items()
    if hasattr(kind.annotation, "model_fields")
}
each = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(SITE)))


def quoted(page: Path) -> list[str]:
    """The inline code of a page, outside its blocks."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


@cache
def templates() -> list[re.Pattern[str]]:
    """Every text in the code, with what is put into it as any text; those of few words of their own left out."""
    found = []
    for path in (ROOT / "harvest").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else "…" for part in parts]
            whole = "".join(map(str, texts))
            if sum(map(str.isalpha, whole)) >= 6:
                found.append(re.compile(".+".join(map(re.escape, whole.split("…"))), flags=re.DOTALL))
    return found


def messages() -> list[str]:
    """Those that the page of troubleshooting explains: a line of code, then what it means."""
    text = (SITE / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^`([^`]+)`\n\n:   ", text, flags=re.MULTILINE)


@pytest.mark.parametrize("message", messages())
def test_a_message_that_is_explained_is_one_that_the_code_says(message: str) -> None:
    ways = [message, message.partition(": ")[2]]
    assert any(one.fullmatch(way) for one in templates() for way in ways if len(way) > 10), message


def test_the_settings_without_a_default_are_those_that_the_first_page_names() -> None:
    page = (SITE / "index.md").read_text(encoding="utf-8")
    told = re.search(r"Every setting has a default, except these three: ([^.]*(?:\.[a-z`][^.]*)*)\.\s", page)
    needed = {
        f"{table}.{name}"
        for table, kind in Job.model_fields.items()
        if hasattr(kind.annotation, "model_fields")
        for name, field in kind.annotation.model_fields.items()
        if field.is_required()
    }
    assert told is not None
    assert {*re.findall(r"`([^`]+)`", told[1])} == needed
    assert len(needed) == 3


def test_messages_of_each_kind_of_trouble_are_explained() -> None:
    page = (SITE / "troubleshooting.md").read_text(encoding="utf-8")
    for kind in ("data", "model", "run", "Reading", "Room", "Directions", "Damage", "Exports", "Stores", "Clusters"):
        section = re.search(rf"^## (?:The )?{kind}\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL)
        assert section is not None, kind
        assert re.search(r"^(`.*`\n\n:   |harvest: )", section[1], flags=re.MULTILINE), kind
    assert len(messages()) + page.count("\nharvest: ") >= 40


def settings(page: Path) -> Iterator[tuple[str, str]]:
    for code in quoted(page):
        for one in re.split(r", | and ", code):
            if (match := re.fullmatch(r"([a-z]+)\.([a-z_]+)(?: = .*)?", one)) and match[2] not in ("parquet", "json"):
                yield match[1], match[2]


@each
def test_every_setting_that_a_page_names_exists(page: Path) -> None:
    for table, key in settings(page):
        if table in TABLES and (table, key) != ("model", "layers"):
            known = TABLES[table] | ({*dir(Run), "names"} if table == "run" else set())
            assert key in known, f"{table}.{key}"


def test_pages_name_settings_of_every_table() -> None:
    assert {table for page in PAGES for table, _ in settings(page)} >= set(TABLES) - {"answers", "directions"}


@each
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    named = {code for code in quoted(page) if re.match(r"(tests|jobs|harvest|schemas|infra|docs)/", code)}
    assert {path for path in named if not (ROOT / path.split()[0]).exists()} == set()


@each
def test_every_command_and_target_that_a_page_names_exists(page: Path) -> None:
    commands = {command.callback.__name__ for command in app.registered_commands if command.callback}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for code in quoted(page):
        if match := re.match(r"harvest (\w+)", code):
            assert match[1] in commands, code
        if match := re.match(r"make ([\w-]+)$", code):
            assert match[1] in targets, code


def test_the_promises_are_those_of_the_readme_in_its_order() -> None:
    told = re.findall(r"^\*\*([\w ]+)\.\*\*", (SITE / "promises.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    table = README.read_text(encoding="utf-8").partition("| promise | kept by |")[2].partition("<!--")[0]
    kept = [line.removeprefix("| ") for line in table.splitlines()[2:] if line]
    assert len(told) == len(kept) == 11
    assert [line[: len(promise)] for promise, line in zip(told, kept)] == told


@each
def test_no_line_of_a_block_is_cut_at_the_edge_of_the_page(page: Path) -> None:
    """100 characters are what it has room for; lines of a console are wrapped."""
    lines = [line for block in blocks(page) if block.language != "console" for line in block.text.splitlines()]
    assert [line for line in lines if len(line) > 100] == []


def test_versions_of_other_tools_are_those_that_are_run_here() -> None:
    page = (SITE / "compared.md").read_text(encoding="utf-8")
    pins = (ROOT / "tests/peers/requirements-saelens.txt").read_text() + (ROOT / "constraints.txt").read_text()
    for tool, package in (("SAELens", "sae-lens"), ("transformers", "transformers")):
        said = re.search(rf"{tool} (\d[\d.]*\d)", page)
        pinned = re.search(rf"^{package}==(\S+)", pins, flags=re.MULTILINE)
        assert said is not None
        assert pinned is not None
        assert f"{pinned[1]}.".startswith(f"{said[1]}."), (tool, said[1], pinned[1])
