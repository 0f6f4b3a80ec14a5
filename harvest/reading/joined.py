"""`harvest.join`: runs over the same tokens, aligned row by row: two models, or layers that were added later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from harvest.errors import RequestError
from harvest.reading.activations import Activations
from harvest.reading.reader import Run
from harvest.reading.rowset import RowSet
from harvest.reading.several import Runs, open_runs
from harvest.reduce.moments import NameStatistics

SLAB_ROWS = 1 << 20
"""Of two token tables that are compared at a time."""
KEYS = ("run", "document", "variant", "position", "token")
Member = Run | Runs


def join(*runs: Any) -> Joined:
    """`join({"base": a, "chat": b})`: runs, or what `open` takes, whose rows are of the same tokens in the same order.

    `join(a, b)` calls them "0" and "1". Raises RequestError naming the first row in which two of them differ.
    """
    given = runs[0] if len(runs) == 1 and isinstance(runs[0], Mapping) else dict(enumerate(runs))
    if len(given) < 2:
        raise RequestError(f"join: {len(given)} runs; give at least two, as a mapping or one after the other")
    for key in given:
        if not str(key) or "/" in str(key):
            raise RequestError(f"join: a run cannot be called {key!r}; allowed is any text without '/'")
    labels = [str(key) for key in given]
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise RequestError(f"join: two runs are called {twice!r}; each needs a name of its own")
    for key, run in given.items():
        if isinstance(run, Joined):
            raise RequestError(f"join: {key} is joined already; give its runs beside the others")
    return Joined({str(key): run if isinstance(run, Member) else open_runs(run) for key, run in given.items()})


class Joined(RowSet):
    """The names of every run as `base/residual.12`, and as `residual.12` where only one run has it.

    Tokens and documents are those of the first run.
    """

    def __init__(self, runs: Mapping[str, Member]) -> None:
        self.runs = dict(runs)
        """What each is called -> the run."""
        (label, first), *others = self.runs.items()
        for name, other in others:
            _refuse_difference(label, first, name, other)
        self._places = {f"{key}/{name}": (key, name) for key, run in self.runs.items() for name in run.names}
        path = ", ".join(f"{key}: {run.path}" for key, run in self.runs.items())
        super().__init__(path, list(self._places), len(first), first._tokens)
        for key, run in self.runs.items():
            alone = {*run.names}.difference(*(other.names for label, other in self.runs.items() if label != key))
            self._places |= {name: (key, name) for name in alone if name not in self._places}

    def __repr__(self) -> str:
        return f"Joined({self.path}, {len(self)} rows, {len(self.names)} names)"

    def _knows(self, name: str) -> bool:
        return name in self._places

    def _open(self, name: str) -> Activations:
        key, own = self._places[name]
        return self.runs[key][own].renamed(name)

    @property
    def _first(self) -> Member:
        return next(iter(self.runs.values()))

    def _pieces(self) -> Sequence[bytes]:
        return self._first._pieces()

    def _refuse_unstored(self, what: str) -> None:
        for run in self.runs.values():
            run._refuse_unstored(what)

    def documents(self) -> pa.Table:
        """Of the first run."""
        return self._first.documents()

    def statistics(self) -> dict[str, NameStatistics]:
        """`base/residual.12` -> as in the run."""
        return {f"{key}/{name}": of for key, run in self.runs.items() for name, of in run.statistics().items()}

    def features(self, name: str, pool: str = "mean", labels: Sequence[str] | None = None) -> Any:
        """As in the run that the name is of."""
        if name not in self._places:
            self[name]  # raises, naming those that there are
        key, own = self._places[name]
        return self.runs[key].features(own, pool, labels)  # type: ignore[arg-type]  # None or not, as it came


def _refuse_difference(one: str, first: Member, two: str, second: Member) -> None:
    """Compares what is not known to be equal by its hash."""
    first._refuse_unstored(f"join: {one}")
    second._refuse_unstored(f"join: {two}")
    shared = min(len(first), len(second))
    known = sorted((start, stop) for start, stop, _ in first._tokens.digests() & second._tokens.digests())
    gaps = zip([0, *(stop for _, stop in known)], [*(start for start, _ in known), shared])
    for start, stop in gaps:
        for at in range(start, stop, SLAB_ROWS):
            row = _first_difference(first, second, at, min(at + SLAB_ROWS, stop))
            if row is not None:
                raise RequestError(
                    f"join: {two} and {one} differ first in row {row}: {_key(second, row)} in {two}, "
                    f"{_key(first, row)} in {one}; allowed are runs over the same tokens"
                )
    if len(first) != len(second):
        (longer, more), (shorter, less) = sorted(((one, first), (two, second)), key=lambda item: -len(item[1]))
        state = "" if less.complete else ", unfinished"
        raise RequestError(
            f"join: {longer} goes on with {_key(more, shared)} where {shorter} ends ({shared} rows{state}); "
            "allowed are runs over the same tokens"
        )


def _first_difference(one: RowSet, two: RowSet, start: int, stop: int) -> int | None:
    """The first row of [start, stop) that is another token; a column that only one of them has counts as 0."""
    tables = [run.tokens(slice(start, stop)) for run in (one, two)]
    differs = np.zeros(stop - start, bool)
    for key in KEYS:
        columns = [table.column(key).to_numpy() if key in table.column_names else 0 for table in tables]
        differs |= np.asarray(columns[0] != columns[1])
    found = np.flatnonzero(differs)
    return start + int(found[0]) if len(found) else None


def _key(run: RowSet, row: int) -> str:
    found = run.tokens(row, [key for key in KEYS if key in run.tokens(slice(0, 0)).column_names]).to_pylist()[0]
    return ", ".join(f"{key} {value}" for key, value in found.items())
