"""What must be equal for a run to go on: job, decisions and fingerprints as flat settings, and where two differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from harvest.config import Job

UNLOCKED = {("data", "limit"), ("data", "max_tokens"), ("store", "memory_gb")}
"""Settings that may differ on resume, besides all of `run`: they change no stored value."""


def lock_of(job: Job, resolved: Any, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Flat `setting -> value`; `resolved`: the dataclass of what every `auto` stands for."""
    asked = job.model_dump(mode="json")
    asked.pop("run")
    for table, key in UNLOCKED:
        asked[table].pop(key)
    decided = {field.name: _plain(getattr(resolved, field.name)) for field in dataclasses.fields(resolved)}
    return {**_flat(asked), **_flat({"resolved": decided}), **_flat({"fingerprint": fingerprint})}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Where two locks differ, as `setting: old -> new`; the data and weights before what follows from them."""
    keys = sorted({*old, *new}, key=lambda key: (key.startswith("resolved."), key))
    return [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = _plain(value)
    return flat
