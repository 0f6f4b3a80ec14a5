"""Which formats there are: a file in `formats/` is one, by its name; listing them loads none."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from harvest.errors import RequestError
from harvest.export import formats

if TYPE_CHECKING:
    from harvest.export.format import Format


DIRECTION_FORMATS = ("safetensors", "gguf")
"""Of directions, by --directions."""


def format_names() -> tuple[str, ...]:
    """Of all formats, as the command takes them, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(formats.__path__)))


def format_of(name: str) -> Format:
    """The format of this name. Raises RequestError with those that there are."""
    if name == "gguf":
        raise RequestError("format 'gguf': holds directions, not rows; add --directions")
    if name not in format_names():
        raise RequestError(f"format {name!r}: allowed are {', '.join(format_names())}, and gguf with --directions")
    found: Format = importlib.import_module(f"{formats.__name__}.{name}").FORMAT
    return found
