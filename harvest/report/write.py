"""Gathers what a run's files say and writes the page; a section that cannot be made says why, the others stand."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from harvest.errors import HarvestError, RequestError
from harvest.reading.reader import Run
from harvest.reading.textsearch import pieces_of_run
from harvest.report.concepts import concepts
from harvest.report.health import health
from harvest.report.overview import overview
from harvest.report.page import Facts, page
from harvest.report.positions import position_norms
from harvest.report.work import work
from harvest.store import layout

Found = TypeVar("Found")
Pieces = Callable[[], Sequence[bytes] | None]
"""Token id -> its bytes, asked for only where tokens are shown; None for a tokenizer that is not there."""


def facts_of(run: Run, pieces: Pieces | None = None) -> Facts:
    """What a run's page says. Raises DamageError only for what no page can do without: run.json and the records."""
    summary = run.summary()
    spelled, no_pieces = _pieces(run, pieces)
    return Facts(
        overview=overview(run, summary),
        work=work(run, summary),
        health=_or_why(lambda: health(run, summary)),
        positions=_or_why(lambda: position_norms(run)),
        concepts=_or_why(lambda: concepts(run, spelled)),
        no_pieces=no_pieces,
        variants=bool(run.record.job["data"].get("contrast")),
    )


def _or_why(find: Callable[[], Found]) -> Found | str:
    try:
        return find()
    except (HarvestError, FileNotFoundError) as error:
        return str(error)


def _pieces(run: Run, pieces: Pieces | None) -> tuple[Sequence[bytes] | None, str | None]:
    """What tokens spell, or why that is not known; only directions show any."""
    if not run.record.job.get("directions") or not run.record.job["capture"]["store"] or not run.files.local:
        return None, None
    try:
        found = pieces_of_run(run.record) if pieces is None else pieces()
    except HarvestError as error:
        return None, str(error).removeprefix("tokens as text: ").partition(";")[0]
    return found, "the run has no tokenizer" if found is None else None


def write_report(run: Run, out: str | os.PathLike[str] | None = None, pieces: Pieces | None = None) -> dict[str, Any]:
    """Writes the page into the run's folder, or as the file `out`; returns where it is and its size.

    `pieces`: the run's tokenizer, where it is loaded already. Raises RequestError where it cannot be written there.
    """
    if out is not None and not Path(out).absolute().parent.is_dir():
        raise RequestError(f"--out {os.fspath(out)!r}: {Path(out).absolute().parent} is no folder")
    blob = page(facts_of(run, pieces)).encode("utf-8", "replace")  # names of files may hold bytes that are no text
    where = f"{run.files.url}/{layout.REPORT}" if out is None else os.fspath(out)
    try:
        if out is None:
            run.files.replace(layout.REPORT, blob)
        else:
            Path(out).write_bytes(blob)
    except OSError as error:
        raise RequestError(
            f"{where}: cannot be written ({error.strerror or error}); --out FILE writes elsewhere"
        ) from None
    return {"report": where, "bytes": len(blob)}
