"""What a format is: how it is written, what it can hold, and how its readers open it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harvest.export.folder import Folder
from harvest.export.selection import Selected

Write = Callable[[Selected, Folder], Mapping[str, Any]]
"""Writes the rows; returns what the card should say beside what it says of every format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format of `harvest export`."""

    write: Write
    opens: str
    """How to read it, a few lines of Python."""
    dtypes: tuple[str, ...]
    """Those it can hold."""
    known: tuple[str, ...]
    """Those that all its readers know: any other stored dtype goes out as float32, which holds every value of it."""
    naming: str | None = None
    """The spelling of names that its readers expect; None: ours."""
    front: str = ""
    """What README.md begins with, for hosts that read it."""
    prepare: Callable[[Selected], None] = lambda selected: None
    """Leaves out units that the format has no place for, before anything is written."""
