"""What `harvest plan` finds in the data themselves: how many documents each group has, and the first that ends a run.

What ends one is decided by the same code as in a run, on the rows in doubt; where `data.max_tokens` may end it before
them, they are told and not refused.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from harvest.errors import DocumentError, RequestError
from harvest.plan import Plan
from harvest.planning.estimate import Estimate
from harvest.planning.totals import at_share, length_of, reached
from harvest.records import SourceFile, SourceRow
from harvest.settings.direction import DirectionSettings
from harvest.text.examples import A, B, cell_text, label_of
from harvest.text.reasons import remedy

HEAD, TAIL, PLACES = 8, 4, 32
"""Documents at the beginning and at the end of every file that are tried, and single ones all over the data."""
FILES, SECONDS = 256, 3.0
"""Files that are tried at most, and for how long."""
COUNTED, COUNT_SECONDS = 2**20, 5.0
"""Documents whose labels are counted at most, and for how long."""
QUICK_SECONDS = 1.0
"""The same where no labels are asked for, and only what is missing or broken is looked for."""
IN_DOUBT, NEW_LABELS = 64, 16
"""Documents tried because something about them looks wrong, or because their label is met for the first time."""
MOST_VALUES = 1000
"""Of a group, told apart."""
UNREAD = "unreadable"
"""Stands for the label of a row that is none."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The labels of one direction: value -> documents."""

    settings: DirectionSettings
    a: Counter[str] = field(default_factory=Counter)
    b: Counter[str] = field(default_factory=Counter)
    neither: Counter[str] = field(default_factory=Counter)

    def note(self, group: int, value: str) -> None:
        """One more; beyond MOST_VALUES, values have no names of their own."""
        counter = self.a if group == A else self.b if group == B else self.neither
        counter[value if value in counter or len(counter) < MOST_VALUES else "other values"] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was found."""

    groups: tuple[Groups, ...]
    """Of the directions that read documents, in the job's order."""
    documents: int
    """Whose labels were counted."""
    whole: bool
    """They are all that the job reads."""


def survey(plan: Plan) -> Survey:
    """Looks the data over, for seconds. Raises RequestError that names the first document found that ends a run."""
    trial = _Trial(plan)
    trial.of_places()
    return _counted(plan, trial)


class _Trial:
    """Rows are tokenised as a run would, wherever one that fails must end it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.ends = plan.job.data.on_bad == "fail" and plan.job.data.max_tokens is None
        """A document that cannot be used ends the run, and is reached."""

    def of_places(self) -> None:
        """The first and the last documents of every file, and some between; of a stream the first ones."""
        begin = time.monotonic()
        for file, start, stop in self._places() if self.ends else ():
            if time.monotonic() - begin > SECONDS:
                return
            self(file, start, stop, HEAD)

    def _places(self) -> Iterator[tuple[SourceFile, int, int]]:
        """(file, start, stop): what lies before the end that the job has there."""
        source, limit = self._plan.source, self._plan.job.data.limit
        if any(file.rows is None for file in source.files):
            for file in source.files[:FILES] if limit is None else source.files[:1]:
                yield file, 0, HEAD if limit is None else min(HEAD, limit)
            return
        parts = reached(self._plan.job, source)
        for file, stop in parts[:FILES]:
            yield file, 0, min(HEAD, stop)
            yield file, max(0, stop - TAIL), stop
        if all(source.mark(file.number, 0) is not None for file, _ in parts):  # reached at little cost
            for place in range(PLACES):
                file, row, _ = at_share(parts, (place + 0.5) / PLACES)
                yield file, row, row + 1

    def __call__(self, file: SourceFile, start: int, stop: int, limit: int) -> None:
        """Raises RequestError in the words of the run's own error."""
        source = self._plan.source
        try:
            rows = source.rows(file.number, start, stop, source.mark(file.number, start))
            self._plan.tokeniser.shard(rows, file=file.number, name=file.name, limit=limit)
        except DocumentError as error:
            raise RequestError(f"{error}; {remedy(error.reason)}") from None


def _counted(plan: Plan, trial: _Trial) -> Survey:
    """Reads labels; rows in doubt, and the first of some labels, are tried."""
    job, begin, seen = plan.job, time.monotonic(), 0
    groups = tuple(Groups(direction) for direction in job.read_directions)
    seconds, whole = COUNT_SECONDS if groups else QUICK_SECONDS, False
    left = {"wrong": IN_DOUBT, "new": NEW_LABELS}
    for file, row in _rows(plan) if groups or trial.ends else ():
        if seen == COUNTED or time.monotonic() - begin > seconds:
            break
        seen += 1
        doubt = _doubt(job.data.columns, groups, row)
        if doubt is not None and trial.ends and left[doubt]:
            left[doubt] -= 1
            trial(file, row.row, row.row + 1, 1)
    else:
        whole = not any(file.format == "stream" for file in plan.source.files)
    return Survey(groups=groups, documents=seen, whole=whole)


def _rows(plan: Plan) -> Iterator[tuple[SourceFile, SourceRow]]:
    """Every document of the job, in order, as far as that can be read ahead."""
    left = plan.job.data.limit
    for file in plan.source.files:
        if file.format == "stream" and file.rows is None:
            return
        for row in plan.source.rows(file.number, 0, 2**53 if file.rows is None else file.rows):
            if left == 0:
                return
            left = None if left is None else left - 1
            yield file, row


def _doubt(columns: tuple[str, ...], groups: tuple[Groups, ...], row: SourceRow) -> str | None:
    """Notes the labels of a row; `wrong` where it may end a run, `new` where one is met for the first time."""
    values = [row.values.get(column) for column in columns]
    wrong, new = row.error is not None or any(value is None for value in values), False
    holds = all(length_of(value) for value in values)
    for of_one in groups:
        settings = of_one.settings
        for variant in range(len(columns)):
            label = label_of(settings, row.values, variant)
            value = columns[variant] if settings.by_variant else _shown(settings, row)
            wrong |= holds and label.trouble is not None
            new |= holds and value not in (of_one.a, of_one.b, of_one.neither)[label.group]
            of_one.note(label.group, value)
    return "wrong" if wrong else "new" if new else None


def _shown(settings: DirectionSettings, row: SourceRow) -> str:
    if row.error is not None:
        return UNREAD
    value: Any = row.values.get(settings.column or "")
    return "empty" if value is None else repr(cell_text(value)[:40])


# ---- said ------------------------------------------------------------------------------------------------------------


def judged(estimate: Estimate) -> str:
    """The tokens, and how surely."""
    tokens, low, high = estimate.tokens, estimate.tokens_low, estimate.tokens_high
    if tokens is None:
        first = f"the first {estimate.judged_documents:,} documents"
        return f"an unknown number, about {estimate.tokens_each:,.0f} a document by {first}"
    if estimate.judged == "all":
        return f"{tokens:,}"
    if low is None or high is None:
        return f"about {tokens:,}, from the first {estimate.judged_documents:,} documents"
    return f"about {_round(tokens):,} ({_round(low):,} to {_round(high):,})"


def _round(number: int) -> int:
    """Three digits, which is more than an estimate knows."""
    return int(float(f"{number:.3g}"))


def said(found: Survey, on_bad: str) -> list[tuple[str, str]]:
    """A line for each direction: its groups, and what becomes of documents in none."""
    some = "" if found.whole else f"of the first {found.documents:,} documents: "
    return [
        (f"direction {one.settings.name}", some + _line(one, on_bad) if found.documents else "labels not read ahead")
        for one in found.groups
    ]


def _line(groups: Groups, on_bad: str) -> str:
    parts = [f"A {_values(groups.a)}", f"B {_values(groups.b)}"]
    if groups.settings.negative is None and not groups.settings.by_variant:
        parts.pop()
    if groups.neither:
        what = "the run stops at the first of them" if on_bad == "fail" else "left out of the direction, and counted"
        if groups.settings.negative is None and not groups.settings.by_variant:
            what = "not asked for"
        parts.append(f"in no group {_values(groups.neither)}: {what}")
    return "; ".join(parts)


def _values(found: Mapping[str, int]) -> str:
    """`2,000 ('1' 1,200, 'yes' 800)`."""
    most = sorted(found.items(), key=lambda one: -one[1])
    told = ", ".join(f"{value} {count:,}" for value, count in most[:4])
    more = f", {len(most) - 4:,} values more" if len(most) > 4 else ""
    return f"{sum(found.values()):,} ({told}{more})" if most else "none"


def data(found: Survey) -> dict[str, Any]:
    """For programs."""
    directions = {
        one.settings.name: {"A": dict(one.a), "B": dict(one.b), "neither": dict(one.neither)} for one in found.groups
    }
    return {"documents": found.documents, "whole": found.whole, "directions": directions}
