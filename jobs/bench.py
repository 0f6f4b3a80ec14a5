"""The whole table: every measure of Harvest's speed beside its goal, from the scripts that take it.

    python jobs/bench.py [SCRIPT ...] [--only TEXT] [--pairs 5] [--quick] [--out jobs/results]

Each script runs in a process of its own, so that none inherits another's memory, threads or end. What cannot be
measured here is a line that says why; a script that dies leaves lines that say so, and the others go on. `--out` puts
the lines into `bench_<hardware>_<yyyymm>.md`, in the place of the same rows of an earlier run. The exit status is 1
when a line failed; a goal that was missed is no failure, but a finding.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import measuring
from measuring import Line, Row

SCRIPTS = [
    *("capture", "peers", "batching", "directions", "write", "store"),
    *("workers", "schedule", "memory", "start", "gpu"),
]
"""In the order of the table: `bench_<name>.py`, with `rows` and, for options of its own, `more`."""


def declared(name: str, asked: argparse.Namespace) -> list[Row]:
    """The rows of a script that were asked for."""
    module = importlib.import_module(f"bench_{name}")
    options = measuring.parser(None)
    if hasattr(module, "more"):
        module.more(options)
    return [row for row in module.rows(measuring.read(options, arguments(asked))) if asked.only in row.what]


def arguments(asked: argparse.Namespace) -> list[str]:
    """What every script is told."""
    own = ["--pairs", str(asked.pairs), "--threads", str(asked.threads), "--only", asked.only]
    return [*own, *(["--quick"] if asked.quick else [])]


def measured(script: Path, rows: Sequence[Row], asked: argparse.Namespace) -> Iterator[Line]:
    """The lines of one script, as they come; for each row that none came of, one that says so."""
    command = [sys.executable, str(script), "--json", *arguments(asked)]
    missing = {row.what: row for row in rows}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for text in process.stdout:
                if text.startswith("{"):  # the rest is what libraries say
                    line = Line(**json.loads(text))
                    missing.pop(line.what, None)
                    yield line
        except BaseException:
            process.terminate()
            raise
    for row in missing.values():
        remark = f"{script.name} ended with status {process.returncode}"
        yield Line(what=row.what, goal=row.goal, at_most=row.at_most, unit=row.unit, remark=remark, failed=True)


def table(names: Sequence[str], asked: argparse.Namespace) -> Iterator[Line]:
    """The lines of these scripts, in order."""
    for name in names:
        try:
            rows = declared(name, asked)
        except Exception as error:  # a line of the table, and the exit status
            yield Line(what=f"bench_{name}.py", goal=None, remark=f"{type(error).__name__}: {error}", failed=True)
            continue
        if rows:
            yield from measured(Path(__file__).with_name(f"bench_{name}.py"), rows, asked)


def main() -> None:
    options = measuring.parser(__doc__)
    options.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"of {', '.join(SCRIPTS)}; default all")
    asked = measuring.read(options)
    if unknown := set(asked.scripts) - set(SCRIPTS):
        options.error(f"{', '.join(sorted(unknown))}: the scripts are {', '.join(SCRIPTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a script ends with this one
    print(measuring.HEAD, flush=True)
    lines = []
    for line in table(asked.scripts or SCRIPTS, asked):
        lines.append(line)
        print(line, flush=True)
        if asked.out is not None:  # line by line: a table takes three quarters of an hour
            path = measuring.write(asked.out, "bench", "How fast Harvest is, beside its goals", asked, [line])
    if asked.out is not None and lines:
        print(f"wrote {path}", file=sys.stderr)
    if not lines:
        raise SystemExit(f"bench: no row's name contains {asked.only!r}")
    if any(line.failed for line in lines):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
