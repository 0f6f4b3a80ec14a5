"""Which reductions there are: a file of this folder with a REDUCTION is one, by its name."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from harvest import reduce
from harvest.errors import RequestError
from harvest.reduce.base import Reduction
from harvest.settings.tables import StatisticsSettings


def reductions_of(statistics: StatisticsSettings) -> list[Reduction[Any]]:
    """Those of a run, each once: first the one that counts values that are no finite numbers, then the covariance and
    `statistics.also`.

    Raises RequestError for a name that no file has.
    """
    asked = ["moments" if statistics.moments else "health", *(["covariance"] if statistics.covariance else [])]
    asked += statistics.also
    return [reduction_of(name) for name in dict.fromkeys(asked)]


def reduction_of(name: str) -> Reduction[Any]:
    """The reduction of this name. Raises RequestError with those that there are."""
    found = _in_file(name) if name in _files() else None
    if found is None:
        there = [file for file in _files() if _in_file(file) is not None]
        raise RequestError(f"statistics.also = {name!r}: no such reduction; allowed are {', '.join(there)}")
    return found


def _files() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(reduce.__path__))


def _in_file(name: str) -> Reduction[Any] | None:
    found: Reduction[Any] | None = getattr(importlib.import_module(f"{reduce.__name__}.{name}"), "REDUCTION", None)
    return found
