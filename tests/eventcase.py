"""Lines of events, held against their schema and their order."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

ROOT = Path(__file__).parents[1]
SCHEMA = json.loads((ROOT / "schemas/events.schema.json").read_text())
FINAL = {"run_completed", "run_failed", "watch_ended"}


def events_of(out: str) -> list[dict[str, Any]]:
    """Every line obeys the schema and holds nothing else, and the last one alone says how it ended."""
    assert out.endswith("\n")
    found = [json.loads(line) for line in out.splitlines()]
    validator = jsonschema.Draft202012Validator(SCHEMA)
    known = {one["properties"]["event"]["const"]: set(one["properties"]) for one in SCHEMA["$defs"].values()}
    for event in found:
        validator.validate(event)
        assert set(event) == known[event["event"]]
    assert [event["event"] in FINAL for event in found] == [False] * (len(found) - 1) + [True]
    return found


def kinds(events: list[dict[str, Any]]) -> Counter[str]:
    return Counter(event["event"] for event in events)


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]
