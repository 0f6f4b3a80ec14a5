"""Every path and name of the run folder; nothing else builds a path or decides what is ours.

RUN/run.json  RUN/ledger/<shard>.json  RUN/coordinator.json  RUN/shards/<attempt>/<array>/c.0.0  RUN/complete.json
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from harvest.errors import RequestError

RUN = "run.json"
COMPLETE = "complete.json"
COORDINATOR = "coordinator.json"
LEDGER = "ledger"
SHARDS = "shards"
DIRECTIONS = "directions"
STATISTICS = "statistics.parquet"
COVARIANCE = "covariance.safetensors"
REPORT = "report.html"
TOKENS = "tokens.parquet"
"""Within an attempt, as are the next three."""
DOCUMENTS = "documents.parquet"
STATES = "states.safetensors"
POOLED = "pooled"
ZARR = "zarr.json"

_KEY = r"f\d{5,}-s\d{6,}"
_ATTEMPT = re.compile(rf"({_KEY})\.([0-9a-f]{{8}})-(\d+)")
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_RESERVED = frozenset({ZARR, TOKENS, DOCUMENTS, STATES})
_OURS = re.compile(
    r"run\.json|complete\.json|coordinator\.json|statistics\.parquet|covariance\.safetensors|report\.html"
    rf"|ledger/{_KEY}\.json"
    r"|directions/[A-Za-z0-9_.-]+\.(?:safetensors|json)"
    rf"|shards/{_KEY}\.[0-9a-f]{{8}}-\d+/(?:[^/]+/)*"
    r"(?:zarr\.json|c\.\d+\.\d+|tokens\.parquet|documents\.parquet|states\.safetensors|examples-[A-Za-z0-9_.-]+\.arrow)"
)
_TEMPORARY = re.compile(r"((?:.*/)?)\.([^/]+)\.(?:[0-9a-f]{16}\.tmp|lock)")


def record_path(key: str) -> str:
    """Where a shard's commit record lies."""
    return f"{LEDGER}/{key}.json"


def record_key(path: str) -> str | None:
    """The shard key of a ledger file; None for a file that is no commit record."""
    match = re.fullmatch(rf"{LEDGER}/({_KEY})\.json", path)
    return match[1] if match else None


def attempt_name(key: str, life: str, number: int) -> str:
    """`f00000-s000017.9c1f02ab-1`: the try `number` at a shard in a coordinator's life."""
    name = f"{key}.{life}-{number}"
    if parse_attempt(name) is None:
        raise ValueError(f"{name!r} is not the name of an attempt")
    return name


def parse_attempt(name: str) -> tuple[str, str, int] | None:
    """(shard key, life, number) of an attempt's name; None for anything else."""
    match = _ATTEMPT.fullmatch(name)
    return (match[1], match[2], int(match[3])) if match else None


def attempt_path(attempt: str) -> str:
    """The folder of an attempt."""
    return f"{SHARDS}/{attempt}"


def attempt_of(path: str) -> str | None:
    """The attempt that a path of the run lies in; None outside all attempts."""
    parts = path.split("/", 2)
    return parts[1] if len(parts) == 3 and parts[0] == SHARDS and parse_attempt(parts[1]) else None


def pooled_name(pool: str, name: str) -> str:
    """What the array of a name's pooled rows is called: one row per document that has rows, in document order."""
    return f"{POOLED}/{pool}/{name}"


def scale_name(name: str) -> str:
    """What the array of a name's scales is called where its rows are int8: one float32 per row."""
    return f"{name}.scale"


def examples_name(direction: str) -> str:
    """Within an attempt: the examples of a direction."""
    return f"examples-{direction}.arrow"


def direction_path(direction: str, kind: str) -> str:
    """What a run comes to for a direction; `kind` is `safetensors` or `json`."""
    return f"{DIRECTIONS}/{direction}.{kind}"


def array_path(name: str) -> str:
    """The folder of an array within its attempt; `/` in a name nests, everything else stays inside one part.

    Letters, digits, `.`, `_` and `-` are kept, other bytes are written `%XX`; so is the first character of a
    part that would be hidden, empty of meaning (`..`) or one of our own files.
    """
    return "/".join(_part(name, part) for part in name.split("/"))


def _part(name: str, part: str) -> str:
    if not part:
        raise RequestError(f"name {name!r}: has an empty part")
    coded = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in part.encode())
    if coded.startswith(".") or coded in _RESERVED or re.fullmatch(r"c\.\d+\.\d+", coded):
        coded = f"%{ord(coded[0]):02X}{coded[1:]}"
    if len(coded) > 255:
        raise RequestError(f"name {name!r}: too long for a folder (255 characters, other signs count three)")
    return coded


def array_name(path: str) -> str:
    """The inverse of `array_path`."""
    return unquote_to_bytes(path).decode()


def object_name(number: int) -> str:
    """The file of an array's rows: chunk key of outer chunk `number`, which spans all columns."""
    return f"c.{number}.0"


def is_ours(path: str) -> bool:
    """Whether a run may have written this file, by its name; temporary and lock files of ours included."""
    match = _TEMPORARY.fullmatch(path)
    return _OURS.fullmatch(match[1] + match[2] if match else path) is not None


def is_temporary(path: str) -> bool:
    """Whether the file is one that a local store writes beside another: a killed process leaves it behind."""
    match = _TEMPORARY.fullmatch(path)
    return match is not None and _OURS.fullmatch(match[1] + match[2]) is not None
