"""One shape for every benchmark: rows of figures taken in pairs, A B A B ..., beside their goals, and one table.

A script declares its rows, which measure nothing until they are asked, and hands them to `main`; `jobs/bench.py` takes
the same rows of all scripts. A row that cannot be measured here says why, one that fails does not lose the others.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

# As the harvest command does, for both sides of every pair: threads wait without spinning, and nothing draws a bar.
for name, value in {"OMP_WAIT_POLICY": "PASSIVE", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}.items():
    os.environ.setdefault(name, value)

HEAD = "| what | median | lowest | highest | pairs | goal | reached | remark |\n|---|--:|--:|--:|--:|--:|---|---|"


class NotHereError(Exception):
    """A row cannot be measured on this machine; the text is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a row's measurement found."""

    figures: Sequence[float]
    """One per pair: a ratio of two things timed in turn, or, where the row has a unit, a value of its own."""
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table that is yet to be measured."""

    what: str
    goal: float | None
    """None for a figure that is only told."""
    measure: Callable[[], Found]
    """Raises NotHereError."""
    at_most: bool = False
    """The goal is a ceiling."""
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of the table."""

    what: str
    goal: float | None
    at_most: bool = False
    unit: str = ""
    figures: Sequence[float] = field(default_factory=list)
    """None where it was not measured or failed."""
    remark: str = ""
    failed: bool = False

    @property
    def reached(self) -> bool | None:
        """Whether the median keeps the goal; None without either."""
        if self.goal is None or not self.figures:
            return None
        median = statistics.median(self.figures)
        return median <= self.goal if self.at_most else median >= self.goal

    def __str__(self) -> str:
        def number(value: float) -> str:
            return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}") + (f" {self.unit}" if self.unit else "")

        goal = "" if self.goal is None else ("<= " if self.at_most else ">= ") + f"{self.goal:g} {self.unit}".rstrip()
        cells = ["failed" if self.failed else "not measured", "", "", ""]
        if self.figures:
            of = (statistics.median(self.figures), min(self.figures), max(self.figures))
            cells = [*map(number, of), str(len(self.figures))]
        reached = {None: "", True: "yes", False: "no"}[self.reached]
        return f"| {' | '.join([self.what, *cells, goal, reached, self.remark.replace('|', '/')])} |"


def measured(row: Row) -> Line:
    """The row's figures, or why there are none."""
    known = {"what": row.what, "goal": row.goal, "at_most": row.at_most, "unit": row.unit}
    try:
        found = row.measure()
    except NotHereError as error:
        return Line(**known, remark=str(error))
    except Exception as error:  # it is a line of the table, and the exit status
        traceback.print_exc()
        text = str(error).strip().splitlines() or [""]
        return Line(**known, remark=f"{type(error).__name__}: {text[-1]}"[:200], failed=True)
    return Line(**known, figures=list(found.figures), remark=found.remark)


def in_turn(first: Callable[[], float], second: Callable[[], float], pairs: int) -> list[tuple[float, float]]:
    """Seconds of both in turn, `pairs` times, after a warm-up of each."""
    first(), second()
    return [(first(), second()) for _ in range(pairs)]


def ratios(timings: Iterable[tuple[float, float]]) -> list[float]:
    """Pair by pair, how many times as fast as the first the second is."""
    return [first / second for first, second in timings]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pairs", type=int, help="measurements of each row (default: 5; 2 with --quick)")
    options.add_argument("--quick", action="store_true", help="a small piece of the work, to see that it runs")
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch")
    options.add_argument("--only", default="", metavar="TEXT", help="the rows whose name contains this")
    options.add_argument("--out", type=Path, metavar="FOLDER", help="put the lines into this folder's results file")
    options.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    return options


def read(options: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed options, defaults filled in."""
    asked = options.parse_args(arguments)
    if asked.pairs is None:
        asked.pairs = 2 if asked.quick else 5
    if asked.pairs < 1:
        options.error(f"--pairs {asked.pairs}: at least 1")
    return asked


def main(
    doc: str | None,
    rows: Callable[[argparse.Namespace], Iterable[Row]],
    more: Callable[[argparse.ArgumentParser], None] = lambda options: None,
) -> None:
    """A benchmark as a program: a line for each row that was asked for; status 1 if one failed or none has figures."""
    options = parser(doc)
    more(options)
    asked = read(options)
    if not asked.json:
        print(HEAD, flush=True)
    lines = []
    for row in rows(asked):
        if asked.only in row.what:
            # Whatever a library prints belongs beside the table, not into it.
            with contextlib.redirect_stdout(sys.stderr):
                lines.append(measured(row))
            print(json.dumps(asdict(lines[-1])) if asked.json else lines[-1], flush=True)
    if not lines:
        raise SystemExit(f"no row's name contains {asked.only!r}")
    if asked.out is not None:
        what = Path(sys.argv[0]).stem.removeprefix("bench_")
        path = write(asked.out, what, (doc or what).splitlines()[0], asked, lines)
        print(f"wrote {path}", file=sys.stderr)
    if any(line.failed for line in lines) or not any(line.figures for line in lines):
        raise SystemExit(1)


def write(folder: Path, what: str, title: str, asked: argparse.Namespace, lines: Sequence[Line]) -> Path:
    """Puts lines into `<what>_<hardware>_<yyyymm>.md`; what else an earlier run or a hand left there stays."""
    today = datetime.date.today()
    path = folder / f"{what}_{hardware()}_{today:%Y%m}.md"
    settings = f"{today:%d %B}, {asked.threads} threads{', quick' if asked.quick else ''}"
    text = (
        path.read_text(encoding="utf-8").splitlines() if path.exists() else [f"# {title}", "", *environment(), "", HEAD]
    )
    for line in lines:
        new = f"{str(line).removesuffix(' |')}{'; ' if line.remark else ''}{settings} |"
        old = next((at for at, one in enumerate(text) if one.startswith(f"| {line.what} |")), None)
        if old is None:
            text.insert(max(at for at, one in enumerate(text) if one.startswith("|")) + 1, new)
        else:
            text[old] = new
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def hardware() -> str:
    """Short enough for a file's name."""
    return f"{platform.machine()}-{os.cpu_count()}cpu"


def environment(libraries: Sequence[str] = ("torch", "transformers", "numpy")) -> list[str]:
    """Processor and versions."""
    return [f"{processor()}, {platform.platform()}.", ", ".join(f"{name} {version(name)}" for name in libraries) + "."]


def processor() -> str:
    """The name that the system gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    return f"{platform.machine()}, {os.cpu_count()} cores"
