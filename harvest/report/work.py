"""How the work went: stages, tries, self-checks, as the commit records and the lease tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harvest.errors import DamageError
from harvest.reading.reader import Run
from harvest.stages import Stages, stages_of
from harvest.store.layout import parse_attempt
from harvest.store.lease import read_holder

MOST_CHECKED = 8
"""Names whose error in the self-check is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of all committed shards."""

    stages: Stages | None
    """None where the run's records do not measure them whole."""
    seconds: tuple[tuple[str, float], ...]
    """(Stage, busy seconds) as they stand in the records, most first; what `stages` explains is not repeated."""
    tokens_per_second: float | None
    """Tokens of the forward by its busy seconds."""
    lives: int
    """Starts of the command that committed a shard."""
    idle_tries: int
    """Tries at shards that no record names: failed, called off, stopped, or harvested again since. At least so many:
    a life's last ones are not known."""
    failed: tuple[tuple[str, str], ...]
    """(Shard, error) of shards that failed in the last life and are not committed."""
    self_check: tuple[tuple[str, float], ...]
    """(Name, error relative to its rows' norm), largest first."""
    checked: int
    """Names compared."""


def work(run: Run, summary: Mapping[str, Any]) -> Work:
    """`summary` as `run.summary()`."""
    numbers: dict[str, list[int]] = {}
    for record in run.shards:
        parsed = parse_attempt(record.attempt)
        if parsed is not None:
            numbers.setdefault(parsed[1], []).append(parsed[2])
    stages, forward = stages_of(run.shards), summary["seconds"].get("forward", 0.0)
    committed = {record.shard.key for record in run.shards}
    try:
        holder = read_holder(run.files)
    except DamageError:  # whoever runs next will say so
        holder = None
    failed = {} if holder is None else holder.failed
    errors = sorted(summary["self_check"].items(), key=lambda item: -item[1])
    busy = sorted(summary["seconds"].items(), key=lambda item: -item[1])
    return Work(
        stages=stages,
        seconds=tuple(busy) if stages is None else (),
        tokens_per_second=summary["forward_tokens"] / forward if forward else None,
        lives=len(numbers),
        idle_tries=sum(max(found) - len(found) for found in numbers.values()),
        failed=tuple((shard, error) for shard, error in failed.items() if shard not in committed),
        self_check=tuple(errors[:MOST_CHECKED]),
        checked=len(errors),
    )
