"""Every message that a user can meet is in messages.txt, and has the form that the others have.

A message is what an error of `harvest.errors` is made with, and what a validator of the job file raises. Who adds or
changes one reads it as a user would (what is wrong, where, what is allowed), and puts it into the list:

    python tests/contracts/test_messages.py
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("messages.txt")
ERRORS = ("RequestError", "NotBuiltError", "WorkError", "DamageError", "MismatchError", "LostLeaseError", "RowError")
VALIDATORS = ("config.py", "settings/")
"""Where pydantic turns a ValueError into the user's line."""
LONGEST = 330
"""Characters of a message, what it fills in not counted."""
TABLES = "model|data|tokens|chat|capture|store|statistics|run|answers|directions"
NAMES = re.compile(rf"\{{|--\w|\b({TABLES})\b|[`']|^[\w.]+(\(.*?\))?: ")
FOREIGN = re.compile(r"(?i)input should|pydantic|pyarrow|valid (integer|string|dictionary|list|tuple)|traceback")
PROPER = ("Ray", "Zarr", "GPU", "CUDA", "TransformerLens")


def messages() -> list[str]:
    """`file: Error: text` of every message in the package, sorted; what is filled in stands in braces."""
    return sorted({line for path in (ROOT / "harvest").rglob("*.py") for line in _of_file(path)})


def _of_file(path: Path) -> Iterator[str]:
    name = path.relative_to(ROOT / "harvest").as_posix()
    kinds = (*ERRORS, "ValueError") if name.startswith(VALIDATORS) else ERRORS
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds and node.args:
            yield f"{name}: {node.func.id}: {_text(node.args[0])}"


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    inner = node.value if isinstance(node, ast.FormattedValue) else node
    return f"{{{ast.unparse(inner)}}}"


def said(line: str) -> str:
    return line.split(": ", 2)[2]


def test_every_message_is_in_the_list() -> None:
    new = sorted({*messages()} - {*LIST.read_text(encoding="utf-8").splitlines()})
    assert new == [], "read them as a user would, then: python tests/contracts/test_messages.py"


def faults(line: str) -> list[str]:
    """What is wrong with the form of a message."""
    text = said(line)
    plain = re.sub(r"\{.*?\}", "", text)
    by_caller = line.startswith(VALIDATORS) or ": RowError: " in line  # who adds setting and value, or file and line
    found = {
        "more than one line": "\n" in text,
        "spaces at its ends": text != text.strip(),
        "a full stop, where it may stand among others": text.endswith("."),
        f"longer than {LONGEST}": len(plain) > LONGEST,
        "names no setting, file or value": not (by_caller or NAMES.search(text)),
        "words of another library": bool(FOREIGN.search(plain)),
        "a capital, where it goes on after `harvest: `": text[0].isupper() and not text.startswith(PROPER),
    }
    return [fault for fault, there in found.items() if there]


def test_every_message_has_the_form_of_the_house() -> None:
    assert {line: found for line in messages() if (found := faults(line))} == {}


def test_the_checks_find_what_they_look_for() -> None:
    assert len(faults("x.py: WorkError: Input should be a valid integer. ")) == 4
    assert faults("x.py: WorkError: a\nb {c}") == ["more than one line"]
    assert len(messages()) > 400


if __name__ == "__main__":
    LIST.write_text("".join(f"{line}\n" for line in messages()), encoding="utf-8")
