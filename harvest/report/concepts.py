"""What a run found of its concepts: figures layer by layer, and held-out examples along the chosen direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from harvest.concepts import cards
from harvest.concepts.best import bests
from harvest.concepts.directions import Result, settings_of
from harvest.concepts.examples import keeps_examples
from harvest.concepts.gathered import GatheredExamples
from harvest.errors import HarvestError
from harvest.reading.reader import Run
from harvest.reduce.direction import Direction
from harvest.reduce.evaluate import Evaluation, Figure
from harvest.reduce.labels import A
from harvest.report.positions import evenly
from harvest.report.texts import ShownDocument, shown_document
from harvest.report.words import layer_of
from harvest.settings.direction import DirectionSettings
from harvest.store import layout

SHARDS = 64
"""At most, evenly over the run, whose held-out examples are read."""
MOST_ENTRIES = 1000
"""In the table of every mode at every name."""
DOCUMENTS = 3
"""Shown of either end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One mode at one name."""

    mode: str
    at: str
    series: str
    """What belongs on one line of a chart: the site, with its read where there are several."""
    layer: int | None
    status: str
    counts: tuple[int, int]
    norm: float | None
    auroc: Figure
    accuracy: Figure
    cohens_d: Figure
    why: str | None
    """There are no figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """Where a mode tells the groups apart best, by folds of the training examples."""

    entry: Entry
    in_folds: float
    shuffled: float | None
    """AUROC of directions from shuffled labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """Held-out examples along the mode whose best name has the highest AUROC in folds of the training examples."""

    mode: str
    at: str
    of_modes: int
    """That it was chosen from."""
    a: np.ndarray
    """float64 [n]: of group A."""
    b: np.ndarray
    midpoint: float | None
    shards: int
    """That the examples are from."""
    of_shards: int
    most: tuple[ShownDocument, ...]
    """Furthest along first."""
    least: tuple[ShownDocument, ...]
    why_no_documents: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Concept:
    """One entry of [[directions]]."""

    name: str
    groups: str
    """What A and B are."""
    read: str
    entries: tuple[Entry, ...]
    best: tuple[Best, ...]
    checks: tuple[tuple[str, str], ...]
    """(Mode, what adding its direction does to the model's answers), where the job asks."""
    projected: Projected | str
    """Or why there is nothing to show."""


def concepts(run: Run, pieces: Sequence[bytes] | None) -> list[Concept]:
    """In the job's order. Raises DamageError for directions that are missing or torn."""
    settings = {one.name: one for one in settings_of(run.record)}
    return [_concept(run, settings[result.name], result, pieces) for result in run.direction_results]


def _concept(run: Run, settings: DirectionSettings, result: Result, pieces: Sequence[bytes] | None) -> Concept:
    entries = [
        _entry(settings, mode, at, direction)
        for mode, of_mode in result.found.items()
        for at, direction in of_mode.items()
    ]
    best = tuple(
        Best(
            entry=next(entry for entry in entries if (entry.mode, entry.at) == (one.mode, one.at)),
            in_folds=one.in_folds,
            shuffled=one.shuffled,
        )
        for one in bests(result)
    )
    try:
        projected = _projected(run, settings, result, best, pieces)
    except HarvestError as error:
        projected = str(error)
    read = "" if settings.embedding is not None else str(result.card["settings"]["read"])
    return Concept(
        name=result.name,
        groups=cards.groups(run.record, result.card["settings"]),
        read=read,
        entries=tuple(entries),
        best=best,
        checks=tuple((mode, cards.added(check)) for mode, check in (result.card["check"] or {}).items()),
        projected=projected,
    )


def _entry(settings: DirectionSettings, mode: str, at: str, direction: Direction) -> Entry:
    name, read = cards.parts(settings, at)
    site, layer = layer_of(name)
    judged = direction.evaluation or Evaluation(examples=(0, 0), reason="not judged")
    return Entry(
        mode=mode,
        at=at,
        series=f"{site}@{read}" if read else site,
        layer=layer,
        status=direction.status,
        counts=direction.counts.rows,
        norm=direction.norm,
        auroc=judged.auroc,
        accuracy=judged.accuracy,
        cohens_d=judged.cohens_d,
        why=judged.reason,
    )


# ---- held-out examples -------------------------------------------------------------------------------------------


def _projected(
    run: Run, settings: DirectionSettings, result: Result, best: Sequence[Best], pieces: Sequence[bytes] | None
) -> Projected | str:
    if (why := _why_no_examples(run, settings, best)) is not None:
        return why
    chosen_mode = max(best, key=lambda one: one.in_folds).entry  # nothing held out is looked at
    mode, at = chosen_mode.mode, chosen_mode.at
    direction = result.found[mode][at]
    vector = direction.vector
    if vector is None:
        return f"{at}: {direction.status}"
    name, label = cards.parts(settings, at)
    chosen = evenly(len(run.shards), SHARDS)
    attempts = [layout.attempt_path(run.shards[i].attempt) for i in chosen]
    gathered = GatheredExamples(
        run.files, [f"{attempt}/{layout.examples_name(settings.name)}" for attempt in attempts], settings
    )
    examples, keys = gathered.part(label, name, held_out=True), gathered.keys(label, held_out=True)
    if not len(examples):
        return "no example is held out"
    along = examples.states @ vector
    found = Projected(
        mode=mode,
        at=at,
        of_modes=len(best),
        a=along[examples.group == A],
        b=along[examples.group != A],
        midpoint=direction.midpoint,
        shards=len(chosen),
        of_shards=len(run.shards),
        most=(),
        least=(),
        why_no_documents=_why_no_documents(run),
    )
    if found.why_no_documents is not None:
        return found

    def shown(i: int) -> ShownDocument:
        example = examples.index[i]
        return shown_document(
            run,
            name,
            vector,
            pieces,
            document=int(keys.document[example]),
            variant=int(keys.variant[example]),
            position=int(keys.position[example]),
            group="A" if examples.group[i] == A else "B",
            along=float(along[i]),
        )

    order, documents = np.argsort(along, kind="stable"), keys.document[examples.index]
    most, least = (tuple(map(shown, _of_each_document(rows, documents))) for rows in (order[::-1], order))
    return replace(found, most=most, least=least)


def _why_no_examples(run: Run, settings: DirectionSettings, best: Sequence[Best]) -> str | None:
    if settings.embedding is not None:
        return "a direction between tokens has no examples"
    if not best:
        return "no layer was chosen: there are too few training examples, or no direction is defined"
    if not run.files.local:
        return "the run is not on this machine"
    if not keeps_examples(settings, stores_rows=bool(run.record.job["capture"]["store"])):
        return "the run keeps no examples (capture.store = false)"
    return None


def _why_no_documents(run: Run) -> str | None:
    if not run.record.job["capture"]["store"]:
        return "the run stores no rows"
    return None if run.record.job["store"]["compression"] == "none" else "the rows are compressed"


def _of_each_document(order: np.ndarray, document: np.ndarray) -> list[int]:
    """The first example of each of the first documents, in this order of int64 indices."""
    seen: dict[int, int] = {}
    for i in order.tolist():
        seen.setdefault(int(document[i]), i)
        if len(seen) == DOCUMENTS:
            break
    return list(seen.values())
