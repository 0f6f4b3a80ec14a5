"""What a worker says in its own log: one JSON object per line, with its run, worker and shard."""

from __future__ import annotations

import json
import sys
import time

_ALWAYS: dict[str, str] = {}


def always(**fields: str) -> None:
    """Fields of every line of this process from now on, such as its run."""
    _ALWAYS.update(fields)


def say(event: str, **fields: str) -> None:
    """One line on stderr; empty fields are left out."""
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **_ALWAYS, "event": event, **fields}
    print(json.dumps({key: value for key, value in line.items() if value}), file=sys.stderr, flush=True)
