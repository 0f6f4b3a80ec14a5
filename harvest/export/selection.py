"""Which rows go out, and in what order: units of one row, or of C consecutive tokens of one document.

Order and selection are those of `run.batches`: shuffled, a keyed bijection of the units that needs no table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from harvest.errors import RequestError
from harvest.export.casting import cast_rows
from harvest.export.staging import Staged, refuse_without_room
from harvest.overlap import Ahead
from harvest.reading.activations import Activations
from harvest.reading.reader import Run
from harvest.reading.shuffle import Shuffle

BLOCK_BYTES = 8 << 20
"""Of rows that are gathered and written together, over all names of a pass."""
SLAB_ROWS = 1 << 20
"""Of the token table in memory at once. In shuffled order each slab reads every shard's table, so they are large."""


class Units:
    """Numbers of the run's rows, in the order of the export."""

    def __init__(self, rows: int, context: int = 1, starts: np.ndarray | None = None, seed: int | None = None) -> None:
        """`starts` int64 [n]: the first row of each unit; None: every row of the run is one. `seed`: shuffled."""
        self.context, self._starts = context, starts
        whole = rows if starts is None else len(starts)
        self._shuffle = None if seed is None else Shuffle(whole, seed, 0)
        self.count = whole
        """Units that go out: the first of the order."""

    @property
    def rows(self) -> int:
        """Rows that go out."""
        return self.count * self.context

    def span(self, start: int, stop: int) -> slice | None:
        """The run's rows of units [start, stop) where they are consecutive, else None."""
        if self._shuffle is None and self._starts is None:
            return slice(start, stop)
        return None

    def numbers(self, start: int, stop: int) -> np.ndarray:
        """int64 [(stop - start) * context] row numbers of units [start, stop)."""
        units = np.arange(start, stop)
        if self._shuffle is not None:
            units = self._shuffle(units)
        first = units if self._starts is None else self._starts[units]
        if self.context == 1:
            return first
        return (first[:, None] + np.arange(self.context)).reshape(-1)


def choose_units(run: Run, rows: Any, context: int | None, seed: int | None, limit: int | None) -> Units:
    """The units of a run: all rows, or those where `rows` (an expression over the token table) holds.

    `context`: units are so many tokens of a document with positions that count up by one; what is left of a document
    is left out. `limit`: at most so many rows. Raises RequestError where nothing is left.
    """
    numbers = None if rows is None else run.rows_where(rows)
    if numbers is not None and not len(numbers):
        raise RequestError(f"--rows: no row of {run.path} passes")
    starts = numbers if context is None else context_starts(run, numbers, context)
    units = Units(len(run), context or 1, starts, seed)
    if limit is not None:
        units.count = min(units.count, limit // units.context)
    if not units.count:
        raise RequestError(f"--limit = {limit}: allowed is at least {units.context}, which is --context")
    return units


def context_starts(run: Run, numbers: np.ndarray | None, context: int) -> np.ndarray:
    """int64 [n] first rows of the contexts, rising; `numbers`: the rows to choose from, rising, or all."""
    known = run.tokens(rows=slice(0, 0)).column_names
    keys = ["document", *(["variant"] if "variant" in known else [])]
    total = len(run) if numbers is None else len(numbers)
    begins, last = [], None
    for start in range(0, total, SLAB_ROWS):
        chosen = np.arange(start, min(start + SLAB_ROWS, total))
        rows = chosen if numbers is None else numbers[chosen]
        table = run.tokens(slice(start, start + len(rows)) if numbers is None else rows, [*keys, "position"])
        # A stretch goes on while row and position both count up by one in the same document.
        columns = [np.asarray(table.column(key).to_numpy(), np.int64) for key in keys]
        here = np.stack([*columns, table.column("position").to_numpy() - rows, rows - chosen])
        before = np.concatenate([np.full((len(here), 1), -1) if last is None else last, here[:, :-1]], axis=1)
        begins.append(chosen[(here != before).any(axis=0)])
        last = here[:, -1:]
    first = np.concatenate([np.zeros(0, np.int64), *begins])
    lengths = np.diff(np.append(first, total))
    if not (lengths >= context).any():
        longest = int(lengths.max(initial=0))
        raise RequestError(
            f"--context = {context}: the longest stretch of one document has {longest} rows; allowed is at most that"
        )
    each = lengths // context
    before_each = np.cumsum(each) - each
    inside = np.arange(each.sum()) - np.repeat(before_each, each)
    places = np.repeat(first, each) + inside * context
    found: np.ndarray = places if numbers is None else numbers[places]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One name of the run on its way out."""

    name: str
    """In the run."""
    label: str
    """In the export."""
    dtype: str
    """In the export."""
    array: Activations

    @property
    def width(self) -> int:
        return self.array.shape[1]

    @property
    def row_bytes(self) -> int:
        """Of a row in the export."""
        return self.width * torch.empty(0, dtype=getattr(torch, self.dtype)).element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Some units, in order."""

    start: int
    """The first unit's place in the export."""
    units: int
    values: Mapping[str, torch.Tensor]
    """Label -> [units * context, d], in the export's dtype."""


class Selected:
    """The rows of an export, streamed: blocks of values, slabs of tokens."""

    def __init__(self, run: Run, columns: Sequence[Column], units: Units) -> None:
        self.run, self.columns, self.units = run, list(columns), units
        self._staged: dict[str, Staged] = {}
        if self._stages:
            row_bytes = sum(column.array.empty(1).nbytes for column in columns)
            refuse_without_room(row_bytes * len(run))

    @property
    def _stages(self) -> bool:
        """Rows are picked out of an object store, or out of compressed chunks."""
        return self.units.span(0, 1) is None and not all(column.array.mapped for column in self.columns)

    def _gather(self, column: Column, numbers: np.ndarray) -> torch.Tensor:
        if not self._stages:
            return column.array.gather(numbers)
        if column.name not in self._staged:
            self._staged[column.name] = Staged(column.array)
        return self._staged[column.name].gather(numbers)

    @property
    def bytes(self) -> int:
        """Of all values in the export."""
        return sum(column.row_bytes for column in self.columns) * self.units.rows

    def blocks(
        self, columns: Sequence[Column] | None = None, start: int = 0, stop: int | None = None
    ) -> Iterator[Block]:
        """Units [start, stop) of the columns, all by default; gathered by a thread that is a block ahead."""
        columns = self.columns if columns is None else columns
        stop = self.units.count if stop is None else stop
        unit_bytes = self.units.context * sum(column.row_bytes for column in columns)
        step = max(1, BLOCK_BYTES // unit_bytes)
        cuts = range(start, stop, step)
        with Ahead((self._block(columns, at, min(at + step, stop)) for at in cuts), depth=1, name="export") as ahead:
            for block in ahead:
                assert block is not None
                yield block

    def _block(self, columns: Sequence[Column], start: int, stop: int) -> Block:
        span = self.units.span(start, stop)
        numbers = self.units.numbers(start, stop)
        values = {}
        for column in columns:
            rows = self._gather(column, numbers) if span is None else column.array[span]
            values[column.label] = cast_rows(rows, column.dtype, self._where(column.name, start))
        return Block(start=start, units=stop - start, values=values)

    def _where(self, name: str, start: int) -> Callable[[int], str]:
        def where(row: int) -> str:
            unit, inside = divmod(row, self.units.context)
            number = int(self.units.numbers(start + unit, start + unit + 1)[inside])
            key = self.run.tokens(number, ["document", "position"]).to_pylist()[0]
            return f"{name}: document {key['document']}, position {key['position']}"

        return where

    def tokens(
        self, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None
    ) -> Iterator[pa.Table]:
        """The token table of units [start, stop), row by row with the values, in slabs of whole units."""
        stop = self.units.count if stop is None else stop
        step = max(1, SLAB_ROWS // self.units.context)
        for at in range(start, stop, step):
            end = min(at + step, stop)
            span = self.units.span(at, end)
            yield self.run.tokens(self.units.numbers(at, end) if span is None else span, columns)
