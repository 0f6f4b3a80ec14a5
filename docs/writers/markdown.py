"""Texts of the code as Markdown: docstrings keep their code spans, and nothing else in them is taken for markup."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import griffe

MARKUP = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "{": "&#123;", "}": "&#125;", "|": "&#124;"} | {
    sign: f"\\{sign}" for sign in "*_[]#"
}


@cache
def package() -> Any:
    """The sources of `harvest`, parsed and not imported."""
    return griffe.load("harvest", search_paths=[Path(__file__).parents[2]])


def prose(text: str | None) -> str:
    """A docstring, or one line of it."""
    spans = re.split(r"(`[^`]+`)", inspect.cleandoc(text or ""))
    return "".join(span if at % 2 else _plain(span) for at, span in enumerate(spans))


def _plain(text: str) -> str:
    return "".join(MARKUP.get(sign, sign) for sign in text)


def code(text: Any) -> str:
    """As it is typed; empty for nothing."""
    return f"`{text}`" if str(text) else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are Markdown, of one line each."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(' '.join(cell.split()) for cell in line)} |" for line in lines) + "\n"


def fields(path: str, *, private: Iterable[str] = ()) -> list[tuple[str, str, str]]:
    """(name, type, what it says of itself) of each attribute of a class, in the order of the code, as Markdown."""
    found = []
    for name, member in package()[path].members.items():
        if member.is_attribute and not name.startswith("_") and name not in {"model_config", *private}:
            kind = "" if member.annotation is None else str(member.annotation)
            found.append((code(name), code(kind), prose(member.docstring.value if member.docstring else "")))
    return found


def said(path: str) -> str:
    """The docstring of something in the package, as Markdown."""
    docstring = package()[path].docstring
    return prose(docstring.value if docstring else "")
