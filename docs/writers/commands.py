"""The page of commands: what typer itself knows of them."""

from __future__ import annotations

import re
from typing import Any

import typer

from harvest import __main__ as commands
from writers.markdown import code, prose, table

HEAD = """# Commands

`harvest COMMAND`, or `python -m harvest COMMAND`; `--help` behind it prints the same. `harvest --version` prints the
version.
"""
STATUS = re.compile(r"(\d+): (.*?)\.(?= \d+:|\n|$)")


def page() -> str:
    """Every command with its arguments and options, and what a status means."""
    group: Any = typer.main.get_command(commands.app)
    parts = [
        HEAD,
        *(_command(name, command) for name, command in group.commands.items()),
        "## Exit status\n\n" + table(["status", "meaning"], statuses()),
        "One line on stderr, beginning with `harvest:`, says why a status is not 0.\n",
    ]
    return "\n".join(parts)


def statuses() -> list[tuple[str, str]]:
    """(status, meaning), as the module of the commands has it."""
    return [(code(status), prose(meaning)) for status, meaning in STATUS.findall(commands.__doc__ or "")]


def _command(name: str, command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    usage = " ".join(["harvest", name, *(one.metavar for one in arguments), "[OPTIONS]"])
    rows = [(code(one.metavar), "", prose(one.help)) for one in arguments]
    rows += [(code(_spelled(one)), _default(one), prose(one.help)) for one in options]
    return f"## {name}\n\n{prose(command.help)}\n\n```text\n{usage}\n```\n\n" + table(["", "default", ""], rows)


def _spelled(option: Any) -> str:
    value = option.metavar or option.opts[0].strip("-").upper()
    return option.opts[0] if option.is_flag else f"{option.opts[0]} {value}"


def _default(option: Any) -> str:
    if isinstance(option.show_default, str):
        return prose(option.show_default)
    return "off" if option.is_flag else code(option.default)
