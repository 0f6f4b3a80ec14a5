"""Objects of the caller's as a source: lists and map-style datasets by position, iterables from front to back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from harvest.errors import RequestError, WorkError
from harvest.records import SourceRow
from harvest.source.columns import column_names, missing_columns, project, top_level
from harvest.source.rows import Keep, one_line, wanted_rows

_BLOCK = 256
_PEEK_ROWS = 64
_ALLOWED = (
    "allowed are a list of texts, of records or (with data.ids) of lists of token ids, a datasets.Dataset or "
    "IterableDataset, an iterable, or a function that returns one"
)


class ObjectReader:
    """Records from an iterator that stands at `row`."""

    def __init__(
        self, name: str, columns: Sequence[str], records: Iterator[Any], row: int, rows: int | None, ids: str | None
    ) -> None:
        self.row = row
        self._name, self._columns, self._records, self._rows, self._ids = name, columns, records, rows, ids
        self._over = False

    def _next(self) -> tuple[Any, ...]:
        """The next record as a tuple of one; empty at the end."""
        try:
            record = (next(self._records),)
        except StopIteration:
            self._over = True
            return ()
        except (RequestError, WorkError):
            raise
        except Exception as error:  # the caller's own code failed: say at which row
            raise WorkError(
                f"{self._name} row {self.row}: reading it raised {type(error).__name__}: {one_line(error)}"
            ) from error
        self.row += 1
        return record

    def skip_to(self, row: int) -> None:
        """Passes over records up to `row` or the end."""
        while self.row < row and self._next():
            pass

    def read(self, stop: int, keep: Keep) -> Iterator[SourceRow]:
        """The kept rows up to `stop` or the end."""
        for wanted in wanted_rows(keep, self.row, stop):
            record = self._next()
            if not record:
                return
            if wanted:
                yield self._source_row(self.row - 1, record[0])

    def _source_row(self, row: int, record: Any) -> SourceRow:
        record = _named(record, self._ids)
        if not isinstance(record, Mapping):
            reason = f"{self._name} row {row}: neither text nor a record but a {type(record).__name__}"
            return SourceRow(row=row, values={}, error=reason)
        return SourceRow(row=row, values=project(record, self._columns, self._name))

    def at_end(self) -> bool:
        """By the length; where that is unknown, by having met the end (asking for one more could wait for ever)."""
        return self.row >= self._rows if self._rows is not None else self._over

    def cursor(self) -> Mapping[str, Any] | None:
        """The row, which is all there is to go on with; None where the length is known."""
        return None if self._rows is not None else {"row": self.row}

    def close(self) -> None:
        """Lets go of the records."""
        self._over = True


def _named(record: Any, ids: str | None) -> Any:
    """A bare text is the column `text`, a bare list or array of token ids the column that holds them."""
    if isinstance(record, str):
        return {"text": record}
    if ids is not None and (isinstance(record, list | tuple) or hasattr(record, "__array__")):
        return {ids: record}
    return record


class ObjectFile:
    """An object of the caller's (or a stream that only `datasets` can read), which counts as one file."""

    path = ""

    def __init__(
        self,
        name: str,
        columns: Sequence[str],
        start: Callable[[int], Iterator[Any]],
        identity: str,
        rows: int | None = None,
        seeks: bool = False,
        ids: str | None = None,
    ) -> None:
        """`start(row)`: records from that row on if it `seeks`, else from the first one; `ids`: their column."""
        self.name, self.wanted, self.format = name, tuple(columns), "objects"
        self._start, self._rows, self._seeks, self._identity, self._ids = start, rows, seeks, identity, ids
        self.continues = not seeks

    def count(self) -> int | None:
        """The length, where the object has one."""
        return self._rows

    def fingerprint(self) -> str:
        """Type and length only: the hash of each shard's rows guards the rest."""
        return self._identity

    def stamp(self) -> str:
        """The same: what the caller does to an object in memory cannot be seen."""
        return self._identity

    def columns(self) -> tuple[str, ...]:
        """The columns of the first records: of one, if it has all that are wanted, else of up to 64."""
        names: dict[str, None] = {}
        for record in islice(self._start(0), _PEEK_ROWS):
            record = _named(record, self._ids)
            if isinstance(record, list | tuple) or hasattr(record, "__array__"):
                raise RequestError(
                    f"data: its records are no texts and no mappings but of type {type(record).__name__}; where they "
                    "are token ids, data.ids names them: data.ids = 'ids'"
                )
            if isinstance(record, Mapping):
                names.update(dict.fromkeys(column_names(record)))
            if not missing_columns(self.wanted, names):
                break
        return tuple(names)

    def reader(self, start: int, cursor: Mapping[str, Any] | None) -> ObjectReader:
        """At `start`, by position or by passing over what is before it."""
        if self._seeks:
            return ObjectReader(self.name, self.wanted, self._start(start), start, self._rows, self._ids)
        reader = ObjectReader(self.name, self.wanted, self._start(start), 0, None, self._ids)
        reader.skip_to(start)
        return reader


class StreamFile(ObjectFile):
    """A stream out of `datasets`, known by its commit."""

    def __init__(self, name: str, columns: Sequence[str], dataset: Iterable[Any], version: str) -> None:
        super().__init__(name, columns, lambda _: iter(dataset), version)
        self.format = "stream"


class OneShot:
    """An iterator that can be read once: what it gave since the start of the slice before the current one is kept.

    So a look at the first rows and a second try at a slice work; going further back is an error, never other rows.
    """

    def __init__(self, name: str, iterator: Iterator[Any]) -> None:
        self._name, self._iterator = name, iterator
        self._kept: deque[Any] = deque()
        self._base = 0
        self._last_start = 0
        self._lock = threading.Lock()

    def start(self, start: int) -> Iterator[Any]:
        """Records from `start` on."""
        with self._lock:
            if start < self._base:
                raise RequestError(
                    f"data: {self._name} is an iterator that can be read once and has moved on to row {self._base}, "
                    f"row {start} is gone; pass a list, a dataset, or a function that returns a new iterator"
                )
            if start > self._base + len(self._kept):
                self._jump(start)
            while self._base < min(self._last_start, start):
                self._kept.popleft()
                self._base += 1
            self._last_start = start
        return self._records(start)

    def _jump(self, start: int) -> None:
        """Passes over rows that nobody has asked for, without keeping them."""
        passed = sum(1 for _ in islice(self._iterator, start - self._base - len(self._kept)))
        self._base += len(self._kept) + passed
        self._kept.clear()

    def _records(self, row: int) -> Iterator[Any]:
        while True:
            with self._lock:
                if row < self._base:
                    raise WorkError(f"data: {self._name}: row {row} has been let go while it was read")
                if row > self._base + len(self._kept):
                    return  # a jump met the end
                if row == self._base + len(self._kept):
                    try:
                        self._kept.append(next(self._iterator))
                    except StopIteration:
                        return
                record = self._kept[row - self._base]
            yield record
            row += 1


def object_file(objects: Any, name: str, columns: Sequence[str], ids: str | None = None) -> ObjectFile:
    """The source file that an object is; raises RequestError for objects that are no sequence of records.

    `ids`: the column of token ids, which a bare list of them stands for.
    """
    kind = type(objects).__name__
    if hasattr(objects, "iloc"):
        raise RequestError(
            f"data: {kind} is no sequence of texts or records: its missing values are numbers (NaN); pass "
            "datasets.Dataset.from_pandas(frame), or frame.to_dict('records')"
        )
    if isinstance(objects, str | bytes | Mapping | type):
        hint = "; take one split of it" if hasattr(objects, "column_names") else ""
        raise RequestError(f"data: {kind} is no sequence of texts or records{hint}; {_ALLOWED}")
    if hasattr(objects, "column_names") and hasattr(objects, "__len__") and hasattr(objects, "select_columns"):
        return _dataset_file(objects, name, columns)
    identity = f"object:{kind}"
    if hasattr(objects, "__getitem__") and hasattr(objects, "__len__"):
        rows = len(objects)
        return ObjectFile(
            name,
            columns,
            lambda at: (objects[i] for i in range(at, rows)),
            f"{identity}:{rows}",
            rows,
            seeks=True,
            ids=ids,
        )
    if isinstance(objects, Iterator):
        return ObjectFile(name, columns, OneShot(name, objects).start, identity, seeks=True, ids=ids)
    if isinstance(objects, Iterable):
        return ObjectFile(name, columns, lambda _: iter(objects), identity, ids=ids)
    if callable(objects):
        return ObjectFile(name, columns, lambda _: iter(objects()), identity, ids=ids)
    raise RequestError(f"data: {kind} is no sequence of texts or records; {_ALLOWED}")


def _dataset_file(dataset: Any, name: str, columns: Sequence[str]) -> ObjectFile:
    """A map-style dataset: blocks of the wanted columns, as plain Python values."""
    existing = list(dataset.column_names)
    wanted = top_level(columns, existing)
    plain = dataset.with_format(None)
    if wanted and not missing_columns([c for c in columns if "." not in c], existing):
        plain = plain.select_columns(wanted)
    rows = len(plain)

    def records(start: int) -> Iterator[dict[str, Any]]:
        for at in range(start, rows, _BLOCK):
            block = plain[at : at + _BLOCK]
            keys = list(block)
            yield from (dict(zip(keys, values)) for values in zip(*block.values()))

    return ObjectFile(name, columns, records, f"object:{type(dataset).__name__}:{rows}", rows, seeks=True)
