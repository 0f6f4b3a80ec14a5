"""What must be equal for a run to go on: job, decisions and fingerprints as flat settings, and where two differ."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from harvest.config import Job
from harvest.settings.direction import DirectionSettings

UNLOCKED = {("data", "limit"), ("data", "max_tokens"), ("store", "memory_gb")}
"""Settings that may differ on resume, besides all of `run`: they change no stored value."""
GROWING = ("limit", "max_tokens")
"""Settings of `data` that may grow on resume: the last, cut shard is harvested again."""
FORGIVING = {"data.on_bad": "fail", "tokens.long": "fail"}
"""Settings whose strictest value may be given up on resume: what is committed met nothing that another one treats
otherwise."""
DATA = "fingerprint.data."
_CHECKSUM = re.compile(r"(\w+:)?([0-9a-f]{32})")
_SIZED = re.compile(r"(\d+)-(.*)")


def lock_of(job: Job, resolved: Any, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Flat `setting -> value`; `resolved`: the dataclass of what every `auto` stands for."""
    decided = {field.name: _plain(getattr(resolved, field.name)) for field in dataclasses.fields(resolved)}
    return {**asked_of(job), **_flat({"resolved": decided}), **_flat({"fingerprint": fingerprint})}


def asked_of(job: Job) -> dict[str, Any]:
    """The part of the lock that the job alone says: known before anything is opened or loaded."""
    asked = job.model_dump(mode="json")
    asked.pop("run")
    for table, key in UNLOCKED:
        asked[table].pop(key)
    return _flat(asked)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Where two locks differ, as `setting: old -> new`; the data and weights before what follows from them.

    A setting that did not exist when `old` was written had the value that is its default now.
    """
    keys = sorted({*old, *new}, key=lambda key: (key.startswith("resolved."), key))
    return [line for key in keys for line in _told(key, old.get(key, _defaults().get(key)), new.get(key))]


def asked_differences(old: Mapping[str, Any], job: Job) -> list[str]:
    """The same, of what the job alone says; `old` is a whole lock."""
    asked = {key: value for key, value in old.items() if not key.startswith(("resolved.", "fingerprint."))}
    return differences(asked, asked_of(job))


def limit_differences(old: Mapping[str, Any], job: Job) -> list[str]:
    """Limits that do not grow; `old`: the `data` of the job that the run began with."""
    lines = []
    for key in GROWING:
        before, now = old.get(key), getattr(job.data, key)
        if before != now and (before is None or (now is not None and now < before)):
            lines.append(f"data.{key}: {before} -> {now}, which may only grow")
    return lines


def forgives(old: Mapping[str, Any], job: Job) -> bool:
    """Whether the job gives up what a lock was strict about."""
    now = asked_of(job)
    return any(old.get(key) == strictest != now[key] for key, strictest in FORGIVING.items())


@functools.cache
def _defaults() -> Mapping[str, Any]:
    """Of every setting, as a lock holds it."""
    nothing: dict[str, Any] = {"model": {"name": "-"}, "data": {"path": "-"}, "run": {"path": "-"}}
    return asked_of(Job.model_validate(nothing))


@functools.cache
def _direction_defaults() -> Mapping[str, Any]:
    """Of every setting of a direction that has one."""
    values = {
        key: field.get_default(call_default_factory=True)
        for key, field in DirectionSettings.model_fields.items()
        if not field.is_required()
    }
    return dict(TypeAdapter(dict[str, Any]).dump_python(values, mode="json"))


def _told(key: str, old: Any, new: Any) -> list[str]:
    if old == new or (old in (None, {}) and new in (None, {})) or old == FORGIVING.get(key, ...):
        return []
    if key.startswith(DATA):
        return [f"data file {key.removeprefix(DATA)}: {_file(old, new)}"]
    if key.startswith("fingerprint."):
        what = key.removeprefix("fingerprint.")
        return [f"content of the {what}: {_checksum(old)} -> {_checksum(new)}"]
    if key == "directions":
        return _directions(old or [], new or [])
    return [f"{key}: {old!r} -> {new!r}"]


def _directions(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[str]:
    """Setting by setting, of directions of the same name."""
    was = {one["name"]: {**_direction_defaults(), **one} for one in old}
    now = {one["name"]: {**_direction_defaults(), **one} for one in new}
    lines = []
    for name in [*was, *(name for name in now if name not in was)]:
        if name not in was or name not in now:
            lines.append(
                f"directions.{name}: {'there' if name in was else 'none'} -> {'there' if name in now else 'none'}"
            )
            continue
        keys = sorted({*was[name], *now[name]})
        changed = [key for key in keys if was[name].get(key) != now[name].get(key)]
        lines += [f"directions.{name}.{key}: {was[name].get(key)!r} -> {now[name].get(key)!r}" for key in changed]
    return lines or ([f"directions: in the order {[*was]} -> {[*now]}"] if [*was] != [*now] else [])


def _file(old: Any, new: Any) -> str:
    """What is known to be other of a data file."""
    if old is None or new is None:
        return f"{'no part of it' if old is None else 'there'} -> {'no part of it' if new is None else 'there'}"
    sized = _SIZED.fullmatch(str(old)), _SIZED.fullmatch(str(new))
    if sized[0] is None or sized[1] is None:
        return f"{old!r} -> {new!r}"
    if sized[0][1] != sized[1][1]:
        return f"{int(sized[0][1]):,} bytes -> {int(sized[1][1]):,} bytes"
    sums = f"checksum {_short(sized[0][2])} -> {_short(sized[1][2])}"
    return f"{int(sized[0][1]):,} bytes as before, other contents ({sums})"


def _checksum(value: Any) -> str:
    found = _CHECKSUM.fullmatch(str(value))
    return repr(value) if found is None else f"checksum {_short(found[2])}"


def _short(text: str) -> str:
    return text if len(text) <= 12 else text[:8]


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
