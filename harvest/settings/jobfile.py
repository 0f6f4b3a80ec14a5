"""The job file as it is read: TOML, or one line that says what else it is, or in which of its lines the fault lies."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from harvest.errors import RequestError
from harvest.settings.base import path_meant, shown

OTHERS = {
    "a data file": (".csv", ".tsv", ".jsonl", ".ndjson", ".txt", ".parquet", ".arrow", ".gz", ".bz2", ".xz", ".zst"),
    "a model's file": (".gguf", ".safetensors", ".bin", ".pt", ".pth"),
    "a page": (".html", ".md"),
    "a program": (".py", ".ipynb", ".sh"),
    "no TOML": (".json", ".yaml", ".yml"),
}
"""What else is given as a job file by mistake, by the ends of its name."""
_AT = re.compile(r"\s*\(at line (\d+), column \d+\)$")
_BARE = re.compile(r"^\s*([\w.\"'-]+)\s*=\s*([^\s\"'\[{#][^#]*?)\s*(#.*)?$")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a job file; RequestError that says what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RequestError(f"job file {path}: no such file{path_meant(str(path))}") from None
    except IsADirectoryError:
        raise RequestError(f"job file {path}: it is a folder; allowed is a TOML file") from None
    except OSError as error:
        raise RequestError(f"job file {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        _refuse_other(path)
        raise RequestError(f"job file {path}: not valid UTF-8 at byte {error.start}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        _refuse_other(path)
        raise RequestError(f"job file {path}: {_fault(text, str(error))}") from None
    except RecursionError:
        raise RequestError(f"job file {path}: not valid TOML: nested too deeply") from None


def _refuse_other(path: Path) -> None:
    """Where the name says that it is something else."""
    what = next((what for what, ends in OTHERS.items() if path.suffix.lower() in ends), None)
    if what is not None:
        hint = ", which a job file names as data.path" if what == "a data file" else ""
        raise RequestError(
            f"job file {path}: it is {what}{hint}; allowed is a TOML file with [model], [data] and [run]"
        )


def _fault(text: str, said: str) -> str:
    """In which line, and what is most often meant there."""
    at = _AT.search(said)
    if at is None:
        return f"not valid TOML: {said[0].lower()}{said[1:]}"
    line = text.splitlines()[int(at[1]) - 1].strip() if int(at[1]) <= len(text.splitlines()) else ""
    told = re.sub(r"^(Illegal|Found invalid) character '\\n'", "a quote is not closed", said[: at.start()])
    bare = _BARE.match(line)
    hint = "" if bare is None else _meant(bare[1], bare[2])
    return f"line {at[1]}, {line[:80]!r}: not valid TOML: {told[0].lower()}{told[1:]}{hint}"


def _meant(key: str, value: str) -> str:
    """What a value without quotes was probably meant to be."""
    if value.lower() in ("true", "false"):
        return f"; truth values are small: {key} = {value.lower()}"
    if re.match(r"[+-]?\d[\d_]*(,\d{3})+$", value):
        return f"; numbers have no commas: {key} = {value.replace(',', '_')}"
    number = re.match(r"[+-]?\d[\d_]*(\.\d*)?(e[+-]?\d+)?$", value)
    return "" if number else f"; text needs quotes: {key} = {shown(value)}"
