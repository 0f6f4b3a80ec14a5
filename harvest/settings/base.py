"""What every table of a job file is: strict, frozen, no unknown keys; and the kinds of numbers that several have."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Auto = Literal["auto"]
Names = Annotated[tuple[str, ...], Field(strict=False)]
MOST = 2**53
"""Counts beyond it are typing errors, and what counts rows and bytes does not hold them."""
MOST_THREADS = 1024
_SHOWN = 200
_BESIDE = 10_000


class Settings(BaseModel):
    """One table of the job file. Unknown keys are errors; TOML types are taken as they are.

    What stands under a setting describes it in the schema and on the page of the job file.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, protected_namespaces=(), use_attribute_docstrings=True
    )


def shown(value: Any) -> str:
    """A value as a line can show it: as the job file writes it, and not at any length."""
    text = _toml(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {_toml(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value)


def nearest(word: str, known: Iterable[str], like: float = 0.6) -> list[str]:
    """The known word that was probably meant; empty where none is at least so much alike (1: the same)."""
    return difflib.get_close_matches(word, list(known), 1, like)


def path_meant(path: str) -> str:
    """`; did you mean ...?` where something of nearly that name lies beside a path that is not there; else nothing."""
    folder, name = os.path.split(os.path.expanduser(path))
    try:
        meant = nearest(name, itertools.islice((entry.name for entry in os.scandir(folder or ".")), _BESIDE), 0.75)
    except OSError:
        return ""
    return f"; did you mean {os.path.join(folder, meant[0])}?" if meant else ""


def _check_count(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= MOST):
        return value
    raise ValueError("allowed are 'auto' or a whole number of at least 1" + _bound(value, MOST))


def _check_threads(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= MOST_THREADS):
        return value
    raise ValueError("allowed are 'auto' or a whole number of at least 1" + _bound(value, MOST_THREADS))


def _bound(value: Any, most: int) -> str:
    return f" and at most {most}" if type(value) is int and value > most else ""


def _check_amount(value: Any) -> Any:
    if value == "auto" or (type(value) in (int, float) and 0 <= value <= MOST):
        return value
    raise ValueError("allowed are 'auto' or a number of at least 0")


Count = Annotated[int | Literal["auto"], BeforeValidator(_check_count)]
Threads = Annotated[int | Literal["auto"], BeforeValidator(_check_threads)]
Amount = Annotated[int | float | Literal["auto"], BeforeValidator(_check_amount)]
