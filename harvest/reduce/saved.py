"""Directions as bytes and back: one safetensors file of vectors, and a card of plain values that says what they are."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from harvest.errors import DamageError
from harvest.reduce.direction import Counts, Direction, Eraser
from harvest.reduce.evaluate import Evaluation, Figure

Found = Mapping[str, Mapping[str, Direction]]
"""Mode -> name of the activations (with `@read` where there are several) -> its direction."""
ARRAYS = ("vector", "raw")
ERASER = ("left", "right", "mean")


def vectors_bytes(found: Found) -> bytes:
    """`mode/name/vector` and `/raw` float64 [d], and of `leace` `/left` [d, 1], `/right` [1, d] and `/mean` [d]."""
    arrays: dict[str, np.ndarray] = {}
    for mode, directions in found.items():
        for name, direction in directions.items():
            for field in ARRAYS:
                value = getattr(direction, field)
                if value is not None:
                    arrays[f"{mode}/{name}/{field}"] = np.ascontiguousarray(value)
            for field in ERASER if direction.eraser is not None else ():
                arrays[f"{mode}/{name}/{field}"] = np.ascontiguousarray(getattr(direction.eraser, field))
    blob: bytes = save(arrays)
    return blob


def raw_bytes(directions: Mapping[str, Direction]) -> bytes:
    """Name -> `raw` float64 [d] of defined directions, as safetensors."""
    raw = {name: np.ascontiguousarray(one.raw) for name, one in directions.items() if one.raw is not None}
    blob: bytes = save(raw)
    return blob


def card_bytes(card: Mapping[str, Any]) -> bytes:
    """JSON; a number that is none is null."""
    return (json.dumps(_plain(card), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_directions(vectors: bytes, card: Mapping[str, Any], where: str) -> dict[str, dict[str, Direction]]:
    """Mode -> name -> direction, out of both files. Raises DamageError naming `where` they are not ours."""
    try:
        arrays = load(vectors)
        found: dict[str, dict[str, Direction]] = {}
        for entry in card["directions"]:
            found.setdefault(entry["mode"], {})[entry["at"]] = _direction(entry, arrays)
    except (ValueError, LookupError, TypeError, SafetensorError) as error:
        raise DamageError(f"{where}: not a direction that a run wrote ({' '.join(str(error).split())[:200]})") from None
    return found


def _direction(entry: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Direction:
    key = f"{entry['mode']}/{entry['at']}"
    vector, raw = (arrays.get(f"{key}/{field}") for field in ARRAYS)
    if entry["status"] == "ok" and (vector is None or raw is None):
        raise ValueError(f"no vector of {key}")
    eraser = None
    if f"{key}/left" in arrays:
        eraser = Eraser(**{field: arrays[f"{key}/{field}"] for field in ERASER})
    counts: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry["counts"].items()}
    return Direction(
        mode=entry["mode"],
        status=entry["status"],
        counts=Counts(**counts),
        vector=vector,
        raw=raw,
        norm=entry["norm"],
        standard_error=entry["standard_error"],
        midpoint=entry["midpoint"],
        fit=entry["fit"],
        eraser=eraser,
        name=entry["name"],
        evaluation=_evaluation(entry["evaluation"]),
    )


def _evaluation(told: Mapping[str, Any] | None) -> Evaluation | None:
    if told is None:
        return None
    figures = {key: Figure(**value) for key, value in told.items() if isinstance(value, dict)}
    return Evaluation(examples=tuple(told["examples"]), reason=told["reason"], **figures)
