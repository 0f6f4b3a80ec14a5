"""Where the package makes the errors that a user can meet, and what they say, told from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "harvest"
ERRORS = ("RequestError", "WorkError", "DamageError", "MismatchError", "LostLeaseError", "RowError")
OF_DOCUMENTS = ("DocumentError", "UnusableError", "_unusable")
"""What is said of a document that cannot be used: the reason, from words of REASONS, and then what was seen."""
REASONS = "text/reasons.py"
VALIDATORS = ("config.py", "settings/")
"""Where pydantic turns a ValueError into the user's line."""


class Message(NamedTuple):
    """One place where an error is made."""

    file: str
    error: str
    text: str
    """What is filled in stands in braces."""
    first: int
    """Line where making it begins."""
    last: int

    def __str__(self) -> str:
        return f"{self.file}: {self.error}: {self.text}"


def every_message() -> list[Message]:
    """Of the whole package, file by file."""
    return [message for path in sorted(PACKAGE.rglob("*.py")) for message in _of_file(path)]


def _of_file(path: Path) -> Iterator[Message]:
    name = path.relative_to(PACKAGE).as_posix()
    kinds = (*ERRORS, "ValueError") if name.startswith(VALIDATORS) else ERRORS
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        kind, said = _said(node, name, kinds)
        if said is not None:
            yield Message(name, kind, _text(said), node.lineno, node.end_lineno or node.lineno)  # type: ignore[attr-defined]


def _said(node: ast.AST, file: str, kinds: tuple[str, ...]) -> tuple[str, ast.expr | None]:
    """Which error a piece of source makes, and with what text; None where it makes none."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in kinds and node.args:
            return node.func.id, node.args[0]
        if node.func.id in OF_DOCUMENTS and len(node.args) > 1:
            return "DocumentError", node.args[1]
    private = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id[0] == "_"
    if file == REASONS and isinstance(node, ast.Assign | ast.Return) and not private:
        return "DocumentError", node.value if isinstance(node.value, ast.Constant | ast.JoinedStr) else None
    return "DocumentError", None


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    inner = node.value if isinstance(node, ast.FormattedValue) else node
    return f"{{{ast.unparse(inner)}}}"
