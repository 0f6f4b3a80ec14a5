"""Columns by name: exact names first, then dotted ones into nested fields; a column that nobody has is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harvest.errors import RequestError
from harvest.settings.base import nearest

FILE_COLUMN = "@file"
"""Asks for the name of the source file."""
_SHOWN = 40


def lookup(record: Mapping[str, Any], column: str) -> Any:
    """The value of a column, which may be dotted (`data.body`); None where the record does not have it."""
    if column in record:
        return record[column]
    at = column.find(".")
    while at >= 0:
        inner = record.get(column[:at])
        if isinstance(inner, Mapping):
            value = lookup(inner, column[at + 1 :])
            if value is not None:
                return value
        at = column.find(".", at + 1)
    return None


def project(record: Mapping[str, Any], columns: Sequence[str], file: str) -> dict[str, Any]:
    """Exactly the requested columns of a record of that file."""
    return {column: file if column == FILE_COLUMN else lookup(record, column) for column in columns}


def column_names(record: Mapping[str, Any]) -> list[str]:
    """Every name by which `lookup` finds something in a record, outer ones first."""
    names = []
    for name, value in record.items():
        names.append(name)
        if isinstance(value, Mapping):
            names += [f"{name}.{inner}" for inner in column_names(value)]
    return names


def top_level(columns: Iterable[str], existing: Iterable[str]) -> list[str]:
    """Those existing top-level columns that the requested ones (dotted or not) may come from."""
    wanted = [column for column in columns if column != FILE_COLUMN]
    return [name for name in existing if any(c == name or c.startswith(f"{name}.") for c in wanted)]


def missing_columns(wanted: Iterable[str], existing: Iterable[str]) -> list[str]:
    """The requested columns that do not exist."""
    known = {FILE_COLUMN, *existing}
    return [column for column in wanted if column not in known]


def require_columns(wanted: Iterable[str] | Mapping[str, str], existing: Sequence[str], file: str) -> None:
    """Raises RequestError that names the first requested column that does not exist, who asks, and those that do."""
    missing = missing_columns(wanted, existing)
    if not missing:
        return
    asked = wanted[missing[0]] if isinstance(wanted, Mapping) else f"column {missing[0]!r}"
    meant = nearest(missing[0], existing)
    hint = f"did you mean {meant[0]!r}? " if meant else ""
    shown = ", ".join(existing[:_SHOWN]) + (", ..." if len(existing) > _SHOWN else "")
    raise RequestError(f"{asked}: {file} has no such column; {hint}it has {shown or 'none'}")
