"""The card of a direction: what it was made from and what it is worth, mode by mode and name by name; plain values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from harvest.reduce.compare import cosines
from harvest.reduce.direction import Direction
from harvest.settings.direction import DirectionSettings
from harvest.store.ledger import RunRecord

Found = Mapping[str, Mapping[str, Direction]]
"""Mode -> name of the activations (with `@read` where there are several) -> its direction; in the job's order."""


def head(run: RunRecord, settings: DirectionSettings) -> dict[str, Any]:
    """Which direction of which model, and by which job."""
    job, lock = run.job, json.dumps(run.fingerprint, sort_keys=True, default=str).encode()
    return {
        "direction": settings.name,
        "settings": settings.model_dump(mode="json"),
        "model": job["model"]["name"],
        "revision": job["model"]["revision"],
        "weights": run.fingerprint.get("fingerprint.model"),
        "dtype": run.plan["resolved"]["dtype"],
        "job": hashlib.blake2b(lock, digest_size=16).hexdigest(),
        "harvest": run.provenance.get("harvest"),
        "check": None,
        "answers": {
            value: {"text": job["answers"][value], "token": token}
            for value, token in run.plan["resolved"].get("answers", {}).items()
        },
    }


def groups(run: RunRecord, settings: Mapping[str, Any]) -> str:
    """What A and B are, of a direction's settings as its card has them: `label 1 against 0`."""
    if settings["positive"] is None:
        a, b = run.job["data"]["contrast"]
        return f"{a} against {b} of each row"
    told = "not A" if settings["negative"] == "rest" else _values(settings["negative"])
    return f"{settings['column'] or 'tokens'} {_values(settings['positive'])} against {told}"


def _values(values: Any) -> str:
    """Of a group: values of its column, or tokens with their spaces."""
    if isinstance(values, dict):
        return "/".join(map(repr, values["tokens"]))
    return "nothing" if values is None else "/".join(values)


def added(check: Mapping[str, Any]) -> str:
    """What adding a direction does to the logits of the answers, as its card has it."""
    if check["reason"] is not None:
        return f"added: not tried, {check['reason']}"
    a, b = (f"{check[letter]['before']:.2f} -> {check[letter]['after']:.2f}" for letter in "AB")
    moved = [check[letter]["after"] - check[letter]["before"] for letter in "AB"]
    way = "the right way" if check["right_way"] else "the wrong way"
    documents = f"{check['documents']:,} document{'' if check['documents'] == 1 else 's'}"
    return (
        f"added at {check['at']}: logits of A's answers {a}, of B's {b} at the ends of {documents}; "
        f"A gains {moved[0] - moved[1]:+.2f} on B, {way}"
    )


def entry(
    settings: DirectionSettings, at: str, direction: Direction, basis: str, score: float | None
) -> dict[str, Any]:
    """One direction; `basis`: which share of the examples it has seen, `score`: what folds of them say of it."""
    name, read = parts(settings, at)
    return {
        "at": at,
        "activations": name,
        "read": read or None,
        "layer": layer_numbers(name),
        **direction.card(),
        "from": basis,
        "cross_validated_auroc": score,
    }


def agreement(found: Found) -> dict[str, dict[str, float]]:
    """Name -> `mode/mode` -> cosine of their vectors."""
    ats = next(iter(found.values()))
    return {
        at: {f"{a}/{b}": value for (a, b), value in cosines({m: of[at] for m, of in found.items()}).items()}
        for at in ats
    }


def parts(settings: DirectionSettings, at: str) -> tuple[str, str]:
    """`residual.12@-3` -> its name and its read's label, which is empty where the job gives no list of reads."""
    name, _, label = at.rpartition("@") if any(read.label for read in settings.reads) else (at, "", "")
    return name, label


def layer_numbers(name: str) -> dict[str, int | None]:
    """A name's layer as people count: the block whose output it is, the block whose input, index in `hidden_states`.

    For places inside a block, `block`; empty for what lies outside all blocks.
    """
    site, _, number = name.rpartition(".")
    if name == "embedding":
        return {"block_output": None, "block_input": 0, "hidden_states": 0}
    if not number.isdigit() or ":" in name:
        return {}
    layer = int(number)
    if site not in ("residual", "residual_pre"):
        return {"block": layer}
    before = layer if site == "residual_pre" else layer + 1
    return {"block_output": before - 1 if before else None, "block_input": before, "hidden_states": before}
