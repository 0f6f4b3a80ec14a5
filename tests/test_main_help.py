"""What `--help` and the page of commands say: of every option what it is without it, in words that stand alone."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import typer
from realdata import ROOT

import harvest
from harvest import __main__ as commands
from harvest.export.directions import OPENS
from harvest.export.known import DIRECTION_FORMATS, format_names

sys.path.insert(0, str(ROOT / "docs"))

import reference

GROUP: Any = typer.main.get_command(commands.app)
OPTIONS = [
    (name, option)
    for name, command in GROUP.commands.items()
    for option in command.params
    if option.param_type_name == "option"
]


def test_the_version_is_printed_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands._status(["--version"]) == 0
    assert capsys.readouterr().out == f"harvest {harvest.__version__}\n"
    assert f"harvest {harvest.__version__}".split()[1].count(".") == 2


def test_a_bare_command_is_still_told_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands._status([]) == 2
    said = capsys.readouterr()
    assert said.err == "harvest: no command is given; harvest --help lists what is allowed\n"
    assert "--version" in said.out
    assert all(name in said.out for name in GROUP.commands)


@pytest.mark.parametrize(("name", "option"), OPTIONS, ids=[f"{name} {one.opts[0]}" for name, one in OPTIONS])
def test_an_option_says_what_holds_without_it_beside_its_help_and_not_in_it(name: str, option: Any) -> None:
    assert option.is_flag or isinstance(option.show_default, str) or option.default is not None
    assert re.search(r"[.]$", option.help)
    assert ";" not in option.help or not re.search(r"; (\w+|the \w+'s)\.$", option.help.replace("; repeatable.", ""))
    assert option.multiple == option.help.endswith("; repeatable.")


def test_help_and_the_page_of_commands_show_these_defaults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = reference.PAGES["commands"]()
    monkeypatch.setenv("COLUMNS", "300")
    for name, option in OPTIONS:
        if isinstance(option.show_default, str):
            commands._status([name, "--help"])
            assert f"({option.show_default})" in " ".join(capsys.readouterr().out.split()), (name, option.opts)
            assert f"| {option.show_default.replace('_', chr(92) + '_')} |" in page, (name, option.opts)
    assert "harvest --version" in page


def test_help_of_export_names_every_format_of_rows_and_of_directions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    commands._status(["export", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert f"One of {', '.join(format_names())}; with --directions safetensors or gguf." in told
    assert set(DIRECTION_FORMATS) == set(OPENS)


def test_how_often_a_watch_looks_is_what_its_help_says() -> None:
    from harvest.runtime import watch

    (every,) = [option for name, option in OPTIONS if option.opts == ["--every"]]
    assert float(every.show_default) == watch.EVERY_SECONDS
