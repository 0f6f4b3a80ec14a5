"""The last of a run: its report. A run is complete without one, so whatever goes wrong here is a line and no error."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harvest.errors import HarvestError
from harvest.reading.reader import Run
from harvest.runtime.progress import Observer
from harvest.store import layout


def report_after_run(
    run: Run,
    observer: Observer,
    pieces: Callable[[], Sequence[bytes] | None] | None = None,
    still_mine: Callable[[], None] = lambda: None,
) -> None:
    """Writes the report of a finished run, or tells the observer why there is none.

    `pieces`: the run's tokenizer, token by token, where it is loaded already; `still_mine` raises where another
    coordinator has taken the run over.
    """
    try:
        from harvest.report.write import write_report  # matplotlib, which nothing else needs

        still_mine()
        write_report(run, pieces=pieces)
    except Exception as error:
        why = str(error) if isinstance(error, HarvestError) else f"{type(error).__name__}: {error}"
        why = " ".join(why.split())
        observer.warned(f"{layout.REPORT} is not written: {why}; harvest report {run.path} tries again")
