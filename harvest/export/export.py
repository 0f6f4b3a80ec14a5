"""`harvest export`: a request is checked whole, then one format writes it, and its card is the last file.

request -> run, columns, units -> folder -> tokens.parquet, the format's files -> README.md, export.json
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from harvest.errors import RequestError
from harvest.export.card import make_card, readme
from harvest.export.casting import EXACT
from harvest.export.folder import Folder
from harvest.export.format import Format
from harvest.export.formats.parquet import write_tokens
from harvest.export.known import format_of
from harvest.export.naming import NAMINGS, label
from harvest.export.rowfilter import row_filter
from harvest.export.selection import Column, Selected, choose_units
from harvest.reading.reader import Run, open_run
from harvest.store.storedrows import TORCH_DTYPES

TABLE_BYTES_PER_ROW = 24
"""Of tokens.parquet and token columns, at most about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command was asked for."""

    format: str
    run: str
    out: str
    name: Sequence[str] = ()
    """Names of the run; none: all of them."""
    shuffle: int | None = None
    """Seed of the order; None: dataset order."""
    dtype: str | None = None
    context: int | None = None
    naming: str | None = None
    rows: str | None = None
    limit: int | None = None


def export_run(request: Request, advanced: Callable[[int, int], None] = lambda done, expected: None) -> dict[str, Any]:
    """Writes the export and returns its card, with `out`; `advanced` hears of (bytes written, bytes expected).

    Raises RequestError, with nothing written, for whatever cannot be; WorkError where a value does not fit its dtype,
    the disk is full, or the store lost something: then too nothing is left.
    """
    format = format_of(request.format)
    _refuse_numbers(request)
    run = open_run(request.run)
    columns = _columns(run, request, format)
    chosen = None if request.rows is None else row_filter(request.rows, run.tokens(slice(0, 0)).schema)
    folder = Folder(request.out, run.files)
    selected = Selected(run, columns, choose_units(run, chosen, request.context, request.shuffle, request.limit))
    format.prepare(selected)
    _refuse_what_does_not_fit(selected, folder, request)
    expected = selected.bytes + selected.units.rows * TABLE_BYTES_PER_ROW
    folder.advanced = lambda written: advanced(written, expected)
    with folder:
        write_tokens(selected, folder)
        extra = format.write(selected, folder)
        card = make_card(selected, asdict(request), extra)
        folder.blob("README.md", readme(card, format, request.out).encode())
        folder.finish(card)
    return {**card, "out": request.out, "files": folder.files}


def _refuse_numbers(request: Request) -> None:
    if request.shuffle is not None and not 0 <= request.shuffle < 2**63:
        raise RequestError(f"--shuffle = {request.shuffle}: allowed are seeds of 0 to 2**63 - 1")
    for option, value in (("--context", request.context), ("--limit", request.limit)):
        if value is not None and value < 1:
            raise RequestError(f"{option} = {value}: allowed are whole numbers of at least 1")


def _columns(run: Run, request: Request, format: Format) -> list[Column]:
    """The names in the order asked for, with their labels and dtypes."""
    names = list(dict.fromkeys(request.name or run.names))
    if not names or not len(run):
        raise RequestError(f"{run.path}: holds no rows to export ({len(run.shards)} committed shards)")
    for option, value, allowed in (("dtype", request.dtype, TORCH_DTYPES), ("naming", request.naming, NAMINGS)):
        if value is not None and value not in allowed:
            raise RequestError(f"--{option} = {value!r}: allowed are {', '.join(allowed)}")
    if request.dtype is not None and request.dtype not in format.dtypes:
        raise RequestError(f"--dtype = {request.dtype!r}: {request.format} holds {', '.join(format.dtypes)}")
    columns = []
    for name in names:
        array = run[name]
        stored = str(array.dtype).removeprefix("torch.")
        dtype = request.dtype or (stored if stored in format.known else "float32")
        spelled = label(name, request.naming or format.naming, run.record.plan["names"])
        columns.append(Column(name=name, label=spelled, dtype=dtype, array=array))
    labels = [column.label for column in columns]
    for column in columns:
        if labels.count(column.label) > 1:
            twice = [other.name for other in columns if other.label == column.label]
            raise RequestError(f"--naming: {' and '.join(twice)} would both be called {column.label}; choose one")
    return columns


def _refuse_what_does_not_fit(selected: Selected, folder: Folder, request: Request) -> None:
    """The disk, and values whose extremes the run's statistics know; others are found as they are written."""
    free = folder.free_bytes
    needed = selected.bytes + selected.units.rows * TABLE_BYTES_PER_ROW
    if free is not None and needed > free:
        raise RequestError(f"out = {request.out!r}: {needed:,} bytes are needed, {free:,} are free")
    run = selected.run
    narrowed = [column for column in selected.columns if column.dtype not in EXACT[_stored(column)]]
    if not narrowed or selected.units.rows < len(run):
        return
    try:
        statistics = run.statistics()
    except RequestError:  # the run keeps none
        return
    for column in narrowed:
        known, end = statistics[column.name], torch.finfo(TORCH_DTYPES[column.dtype]).max
        largest = max(abs(known.min), abs(known.max))
        if largest > end:
            raise RequestError(
                f"--dtype = {column.dtype!r}: {column.name} holds values up to {largest:g}, {column.dtype} ends at "
                f"{end:g}; allowed are {', '.join(EXACT[_stored(column)])}"
            )


def _stored(column: Column) -> str:
    return str(column.array.dtype).removeprefix("torch.")
