"""The page of the Python interface: signatures and docstrings of what is public, and of what it returns."""

from __future__ import annotations

from typing import Any

import harvest
from writers.markdown import fields, package, prose, table

RETURNED = (
    "reading.rowset.RowSet",
    "reading.several.Runs",
    "reading.joined.Joined",
    "reading.quote.Quote",
    "reading.batches.Batches",
    "reading.loader.Loader",
    "reduce.moments.NameStatistics",
    "reduce.moments.RowStatistics",
    "concepts.best.Best",
    "reduce.direction.Counts",
    "reduce.direction.Eraser",
    "reduce.evaluate.Evaluation",
    "reduce.evaluate.Figure",
)
"""Classes of what is returned, in the order in which one meets them."""
NOT_MADE = ("reading.reader.Run", "reading.activations.Activations", "reduce.direction.Direction")
"""Public, so that one can name them in annotations and `isinstance`."""
SHOWN = ("__len__", "__getitem__", "__call__", "__next__")
"""Methods without a name of their own that are told of where they say something."""
INSIDE = {"reading.activations.Activations": ("empty", "renamed", "over", "gather", "read", "room", "fill", "pick")}
"""Methods that only other parts of Harvest use."""
HEAD = """`import harvest` is light: it loads neither torch nor ray before one of these is used. What is wrong with a
request is a `RequestError` that names the argument, its value and what is allowed.
"""


def page() -> str:
    """Public names in the order of the package, then the classes of what they return."""
    public = {name: home.removeprefix("harvest.").replace(":", ".") for name, home in harvest._HOME.items()}
    parts = [f"# Python\n\n{HEAD}\n`harvest.__version__` is the version of the package.\n"]
    parts += [_entry(f"harvest.{name}", home) for name, home in public.items()]
    parts += ["## What they return\n\nNobody makes these by hand, nor a `Run`, `Activations` or a `Direction`.\n"]
    parts += [_entry(path.rpartition(".")[2], path, level=3) for path in RETURNED]
    return "\n".join(parts)


def _entry(title: str, path: str, level: int = 2) -> str:
    found = package()[path]
    said = prose(found.docstring.value if found.docstring else "")
    if found.is_function:
        return f"{'#' * level} {title}\n\n{_signature(title, found)}\n{said}\n"
    bases = [base for base in map(str, found.bases) if base in {one.rpartition(".")[2] for one in RETURNED}]
    also = f"Has what a [{bases[0]}](#{bases[0].lower()}) has, too.\n" if bases else ""
    made = found.members.get("__init__")
    shown = _signature(title, made) if made and level == 2 and path not in NOT_MADE else ""
    parts = [f"{'#' * level} {title}\n", shown, f"{said}\n", also]
    rows = [(name, kind, what) for name, kind, what in fields(path) if what or kind]
    parts += [table(["attribute", "type", ""], rows)] if rows else []
    parts += [_method(name, member) for name, member in found.members.items() if _shown(path, name, member)]
    return "\n".join(part for part in parts if part)


def _shown(path: str, name: str, member: Any) -> bool:
    """Public methods, and those of SHOWN, that say something."""
    if name in INSIDE.get(path, ()) or not member.is_function or not member.docstring:
        return False
    return name in SHOWN or not name.startswith("_")


def _method(name: str, found: Any) -> str:
    return f"{_signature(name, found)}\n{prose(found.docstring.value)}\n"


def _signature(name: str, found: Any) -> str:
    """As a block of code, broken where it is long."""
    asked = [one for one in found.parameters if one.name not in ("self", "cls")]
    given = [_parameter(one) for one in asked]
    kinds = [str(one.kind.value) for one in asked]
    if "keyword-only" in kinds and "variadic positional" not in kinds:
        given.insert(kinds.index("keyword-only"), "*")
    end = ")" if name.startswith("harvest.") and found.name == "__init__" else f") -> {found.returns}"
    whole = f"{name}({', '.join(given)}{end}"
    if len(whole) > 100:
        whole = f"{name}(\n" + "".join(f"    {one},\n" for one in given) + end
    return f"```python\n{whole}\n```\n"


def _parameter(one: Any) -> str:
    star = {"variadic positional": "*", "variadic keyword": "**"}.get(str(one.kind.value), "")
    kind = "" if one.annotation is None else f": {one.annotation}"
    return f"{star}{one.name}{kind}" + ("" if star or one.default is None else f" = {one.default}")
