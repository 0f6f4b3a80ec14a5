"""What a wrong job file is told: one line with the setting, its value and what is allowed, in the job file's words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from harvest.settings.base import MOST, nearest, shown
from harvest.settings.direction import DIRECTION_NAME

PLAIN = {bool: ("true", "false"), str: ("text",), dict: ("a table",)}
WORDS = {"ge": "of at least", "gt": "above", "le": "at most"}
KINDS = {
    "string_type": "text",
    "bool_type": "true and false",
    "int_type": "a whole number",
    "float_type": "a number",
    "dict_type": "a table",
    "model_type": "a table",
    "list_type": "a list",
    "tuple_type": "a list",
}
"""What is allowed inside a list or a table, by what pydantic calls the error."""


def one_line(errors: list[Any], job: type[BaseModel], settings: Any) -> str:
    """The first thing that is wrong with the `settings` of a job, of all that pydantic found."""
    # a table that is missing and one that nobody knows are often one, misspelt
    unknown = [error for error in errors if error["type"] == "extra_forbidden" and len(error["loc"]) == 1]
    first = unknown[0] if unknown and errors[0]["type"] == "missing" else errors[0]
    path = _path(first, settings)
    if first["type"] == "extra_forbidden":
        return _unknown(path, job, table=isinstance(first["input"], Mapping))
    where = ".".join(map(str, path))
    if first["type"] == "missing" and isinstance(first["loc"][-1], str):
        where = {"model": "model.name", "data": "data.path", "run": "run.path"}.get(where, where)
        return f"{where}: missing; it has no default"
    if first["type"] == "value_error":
        return _own_words(where, str(first["ctx"]["error"]), first["input"])
    value, field = _at(settings, path), _field(job, path)
    if field is None:
        here = [error for error in errors if _path(error, settings) == path]
        kinds = list(dict.fromkeys(_kind(error) for error in here))
    else:  # nobody counts to MOST, but who does is told
        beyond = first["type"] == "less_than_equal"
        kinds = _kinds(field.annotation, [one for one in field.metadata if beyond or getattr(one, "le", None) != MOST])
    return f"{where} = {shown(value)}: {_allowed(kinds)}{_as_list(value, kinds)}"


def _own_words(where: str, text: str, value: Any) -> str:
    """What a validator of ours says: of a value, or of one setting of a table, which begins it."""
    if text.startswith("direction "):  # says itself which
        return text
    told = re.match(r"([\w.-]+)(: | = )", text)
    if isinstance(value, Mapping):
        inside = where and told is not None and (told[1].partition(".")[0] in value or told[1] == "tokens")
        return f"{where}{'.' if inside else ': '}{text}".removeprefix(": ")
    return f"{where} = {shown(value)}: {text}"


def _unknown(path: list[Any], job: type[BaseModel], *, table: bool) -> str:
    """A setting that there is not: perhaps of this table and misspelt, perhaps of another; or a `table`."""
    asked, tables = str(path[-1]), _tables(job)
    here = [part for part in path[:-1] if not isinstance(part, int)]
    known = list(tables[here[0]].model_fields if here else job.model_fields)
    near = nearest(asked, known)
    if table and not here:
        hint = f"did you mean [{near[0]}]? " if near else ""
        return f"[{asked}]: unknown table; {hint}known here: {', '.join(known)}"
    there = {
        setting: f"{name}.{setting}" for name, of_one in reversed(tables.items()) for setting in of_one.model_fields
    }
    elsewhere = [there[setting] for setting in nearest(asked, there, 0.8)]
    meant = [there[asked]] if asked in there else near or elsewhere
    hint = f"did you mean {meant[0]}? " if meant else ""
    return f"{'.'.join(map(str, path))}: unknown setting; {hint}known here: {', '.join(known)}"


# ---- where ---------------------------------------------------------------------------------------------------------


def _path(error: Any, settings: Any) -> list[Any]:
    """The place in the job file, without the labels that pydantic puts in for the members of a union."""
    path: list[Any] = []
    for part in error["loc"]:
        if _has(settings, part):
            path.append(part)
            settings = settings[part]
    named = error["type"] == "missing" and isinstance(error["loc"][-1], str)  # else a list that is too short
    return [*path, error["loc"][-1]] if named else path


def _has(settings: Any, part: Any) -> bool:
    if isinstance(settings, Mapping):
        return part in settings
    return isinstance(settings, list | tuple) and isinstance(part, int) and part < len(settings)


def _at(settings: Any, path: Iterable[Any]) -> Any:
    for part in path:
        settings = settings[part]
    return settings


def _tables(job: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Table of the job file -> its settings."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in job.model_fields.items():
        for table in (field.annotation, *get_args(field.annotation)):
            if isinstance(table, type) and issubclass(table, BaseModel):
                found[name] = table
    return found


def _field(job: type[BaseModel], path: list[Any]) -> FieldInfo | None:
    """The setting at a path; None below one, where lists and tables hold what they like."""
    names = [part for part in path if not isinstance(part, int)]
    table = _tables(job).get(names[0])
    if len(names) == 1:
        return job.model_fields.get(names[0]) if len(path) == 1 else None
    fields = table.model_fields if table is not None else {}
    return fields.get(names[1]) if len(names) == 2 and path[-1] == names[1] else None


# ---- what is allowed -----------------------------------------------------------------------------------------------


def _kinds(kind: Any, about: Iterable[Any] = ()) -> list[str]:
    """What a setting may be, from its annotation and the bounds beside it."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _kinds(inner[0], [fact for one in inner[1:] for fact in getattr(one, "metadata", [one])])
    if origin in (Union, UnionType):
        return [allowed for one in inner if one is not NoneType for allowed in _kinds(one, about)]
    if origin is Literal:
        return [repr(value) for value in inner]
    least = any(getattr(one, "min_length", 0) for one in about)
    if origin in (list, tuple):
        return [_list_of(inner) + (", at least one" if least else "")]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [f"a table of {', '.join(kind.model_fields)}"]
    if kind in (int, float):
        return [("a whole number" if kind is int else "a number") + _bounds(about)]
    if any(getattr(one, "pattern", None) == DIRECTION_NAME for one in about):
        return ["text of letters, digits, '_', '.' and '-'"]
    return [allowed + (", not empty" if least else "") for allowed in PLAIN[origin or kind]]


def _list_of(inner: tuple[Any, ...]) -> str:
    kinds = _kinds(inner[0])
    if len(inner) == 2 and inner[1] is not Ellipsis:
        return "a list of two texts"
    if kinds[0].startswith("a table"):
        return "a list of tables"
    return f"a list of {'texts' if kinds == ['text'] else ' and '.join([', '.join(kinds[:-1]), kinds[-1]])}"


def _bounds(about: Iterable[Any]) -> str:
    bounds = {key: bound for key in WORDS for one in about if (bound := getattr(one, key, None)) is not None}
    return f" {' and '.join(f'{WORDS[key]} {bound}' for key, bound in bounds.items())}" if bounds else ""


def _kind(error: Any) -> str:
    """What one of pydantic's errors says is allowed."""
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"]).replace(" or ", " and ")
    return str(KINDS.get(error["type"], error["msg"]))


def _allowed(kinds: list[str]) -> str:
    if len(kinds) == 1:
        several = kinds[0].startswith("'") or kinds[0].startswith("true")
        return f"allowed {'are' if several else 'is'} {kinds[0]}"
    return f"allowed are {', '.join(kinds[:-1])} and {kinds[-1]}"


def _as_list(value: Any, kinds: list[str]) -> str:
    """A list of one is often given without its brackets."""
    given = isinstance(value, str) and value and len(value) < 40 and "a list of texts" in "".join(kinds)
    return f", such as [{value!r}]" if given else ""
