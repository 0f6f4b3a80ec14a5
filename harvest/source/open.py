"""What the job names becomes a source: numbered files, each read by its format's own cursor."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

from harvest.config import resolve_package
from harvest.errors import MismatchError
from harvest.records import SourceFile
from harvest.settings.tables import DataSettings
from harvest.source.columns import require_columns
from harvest.source.csvfiles import CsvFile
from harvest.source.jsonarray import HEAD, ArrayFile, opening
from harvest.source.lines import LineFile
from harvest.source.locate import find_places
from harvest.source.objects import object_file
from harvest.source.places import Place
from harvest.source.rows import DataFile, Reader, Slice, Source
from harvest.source.sample import Sample
from harvest.source.tables import ArrowFile, ParquetFile
from harvest.source.textfiles import TextFile

_DESCRIBERS = 8


def open_source(
    data: DataSettings,
    columns: Sequence[str] | Mapping[str, str],
    objects: Any = None,
    known: Sequence[SourceFile] = (),
) -> Source:
    """The dataset that the job names, or the caller's `objects`; `columns` are what each row's values will hold.

    A column is a name, a dotted path into nested fields, or `@file`; as a mapping they tell who asks for them.
    Opens what is needed to check the columns against the first file that has any. `known` files, as another process
    found them, are not counted again. Raises RequestError: nothing there, an unknown format or split, a missing column.
    """
    source = FileSource(_data_files(data, tuple(columns), objects), Sample(share=data.sample, seed=data.seed), known)
    existing = source.columns()
    if existing:
        require_columns(columns, existing, data.path)
    return source


def _data_files(data: DataSettings, columns: Sequence[str], objects: Any) -> list[DataFile]:
    if objects is not None:
        return [object_file(objects, data.path, columns, data.ids)]
    places = find_places(data)
    if places is None:
        from harvest.source.hub import resolve_hub  # a second of imports that only the hub is worth

        path = os.path.expanduser(resolve_package(data.path, "data.path"))
        found = resolve_hub(data, path, columns)
        if not isinstance(found, list):
            return [found]
        places = found
    return [_data_file(place, columns) for place in places]


def _data_file(place: Place, columns: Sequence[str]) -> DataFile:
    if place.format == "json":
        return _json_file(place, columns)
    if place.format == "csv":
        return CsvFile(place, columns)
    if place.format == "parquet":
        return ParquetFile(place, columns)
    return ArrowFile(place, columns) if place.format == "arrow" else LineFile(place, columns)


def _json_file(place: Place, columns: Sequence[str]) -> DataFile:
    """A `.json` file is an array of records or JSON lines: its first character tells."""
    head = place.head(HEAD)
    if opening(head) is not None:
        return ArrayFile(place, columns)
    lines = head.split(b"\n")
    if len(lines) > 1 and lines[0].strip().removeprefix(b"\xef\xbb\xbf") in (b"{", b'"'):
        raise place.refuse("one JSON value over several lines; allowed are an array of records and JSON lines")
    return LineFile(place, columns)


class FileSource:
    """A dataset of numbered files; the reader that a slice ends with goes on where the next slice starts there."""

    def __init__(self, files: Sequence[DataFile], sample: Sample, known: Sequence[SourceFile] = ()) -> None:
        self._files, self._sample = tuple(files), sample
        self._known = {(file.number, file.name, file.fingerprint): file.rows for file in known}
        self._parked: dict[tuple[int, int], Reader] = {}
        self._stamps: dict[int, str] = {}

    @cached_property
    def files(self) -> tuple[SourceFile, ...]:
        """Numbered; counts and fingerprints are taken at the first use, several files at a time."""
        with ThreadPoolExecutor(_DESCRIBERS) as pool:
            return tuple(pool.map(self._describe, range(len(self._files)), self._files))

    def _describe(self, number: int, file: DataFile) -> SourceFile:
        self._stamps.setdefault(number, file.stamp())
        fingerprint = file.fingerprint()
        key = number, file.name, fingerprint
        return SourceFile(
            number=number,
            name=file.name,
            path=file.path,
            format=file.format,
            rows=self._known[key] if key in self._known else file.count(),
            fingerprint=fingerprint,
        )

    def mark(self, file: int, row: int) -> Mapping[str, Any] | None:
        """A cursor close before a row, for a reader elsewhere; None where a reader needs none, or there is none."""
        found = self._files[file]
        return found.mark(row) if isinstance(found, TextFile) else None

    def rows(self, file: int, start: int, stop: int, cursor: Mapping[str, Any] | None = None) -> Slice:
        """One pass over the rows `start` to `stop` of a file that the sample keeps."""
        return Slice(
            start,
            stop,
            partial(self._sample.keep, file),
            borrow=partial(self._borrow, file, start, cursor),
            give_back=partial(self._park, file),
            check=partial(self._require_same, file),
        )

    def _require_same(self, file: int) -> None:
        """Half of one file and half of another is no dataset, and a file that is being written has no end."""
        known, name = self._stamps.get(file), self._files[file].name
        try:
            stamp = self._files[file].stamp()
        except FileNotFoundError:
            if known is None:
                raise
            raise MismatchError(f"data file {name}: it is gone since this run has opened it") from None
        if self._stamps.setdefault(file, stamp) != stamp:
            raise MismatchError(f"data file {name}: it was written to since this run has opened it")

    def _borrow(self, file: int, start: int, cursor: Mapping[str, Any] | None) -> Reader:
        parked = self._parked.pop((file, start), None)
        return parked or self._files[file].reader(start, cursor)

    def _park(self, file: int, reader: Reader) -> None:
        """Keeps the one reader that was used last, where that helps."""
        if not self._files[file].continues:
            return reader.close()
        while self._parked:
            self._parked.popitem()[1].close()
        self._parked[file, reader.row] = reader
        return None

    def kept(self, file: int, start: int, stop: int) -> int:
        """How many row numbers of the range the sample keeps; nothing is read."""
        return self._sample.count(file, start, stop)

    def columns(self) -> tuple[str, ...]:
        """Names of the columns of the first file that has any, nested ones dotted."""
        return next((names for file in self._files if (names := file.columns())), ())
