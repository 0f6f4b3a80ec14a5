"""The page: everything from a run or its data is escaped, and nothing on it asks for another file. The only jinja2."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import harvest
from harvest.report import words
from harvest.report.charts import Chart, Charts
from harvest.report.concepts import MOST_ENTRIES, Concept, Entry, Projected
from harvest.report.health import NameHealth, sites_of
from harvest.report.overview import Overview
from harvest.report.positions import PositionNorms
from harvest.report.texts import ShownDocument, ShownToken
from harvest.report.work import Work

HERE = Path(__file__).parent
TEMPLATE = "page.html.j2"
MOST_CHARTS = 6
"""Of norms by layer, and for each direction of AUROC by layer."""
MOST_DRAWN = 8
"""Directions with charts."""
MOST_ROWS = 14
"""Of a table that shows them all at once, as page.css limits its height."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that the page says; a section is a text where there is only a reason why it is not there."""

    overview: Overview
    work: Work
    health: Sequence[NameHealth] | str
    positions: PositionNorms | str
    concepts: Sequence[Concept] | str
    no_pieces: str | None
    """Why tokens are shown by their ids."""
    variants: bool
    """Documents have two sequences."""


def page(facts: Facts) -> str:
    """The whole page as HTML."""
    charts = Charts()
    health = [] if isinstance(facts.health, str) else facts.health
    sites = sites_of(health)
    concepts = () if isinstance(facts.concepts, str) else facts.concepts
    positions = None if isinstance(facts.positions, str) else facts.positions
    template = _environment().get_template(TEMPLATE)
    return template.render(
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        version=harvest.__version__,
        overview=facts.overview,
        work=facts.work,
        health=health,
        health_note=facts.health if isinstance(facts.health, str) else None,
        moments=any(one.rows is not None for one in health),
        specials=any(one.special_norm is not None for one in health),
        odd_names=[one.name for one in health if one.non_finite],
        norm_charts=[charts.norms_by_layer(site, names) for site, names in list(sites.items())[:MOST_CHARTS]],
        left_out_sites=list(sites)[MOST_CHARTS:],
        position_chart=None if positions is None else charts.norms_by_position(positions),
        position_caption=None if positions is None else _sample(positions),
        position_note=facts.positions if isinstance(facts.positions, str) else None,
        concepts=[_shown(charts, one, drawn=number < MOST_DRAWN) for number, one in enumerate(concepts)],
        concepts_note=facts.concepts if isinstance(facts.concepts, str) else None,
        most_entries=MOST_ENTRIES,
        most_rows=MOST_ROWS,
        no_pieces=facts.no_pieces,
        variants=facts.variants,
    )


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(HERE),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        count=words.count,
        figure=words.figure,
        share=words.share,
        seconds=words.seconds,
        plural=words.plural,
        capital=lambda text: text[:1].upper() + text[1:],
        drawn=Markup,  # our own charts and style sheet
    )
    return environment


def _sample(positions: PositionNorms) -> str:
    return f"Mean of a seeded sample of {positions.rows:,} rows from {words.plural(positions.shards, 'shard')}"


Texts = list[tuple[str, list[tuple[ShownDocument, list[tuple[ShownToken, str]]]]]]
"""(Title, (document, (token, its style)))."""


def _shown(charts: Charts, concept: Concept, *, drawn: bool) -> tuple[Concept, list[Chart], Chart | None, Texts]:
    """A concept, its AUROC charts, its histogram, and its documents with coloured tokens."""
    series: dict[str, list[Entry]] = {}
    for one in concept.entries:
        if one.layer is not None and one.auroc.value is not None:
            series.setdefault(one.series, []).append(one)
    some = list(series.items())[: MOST_CHARTS if drawn else 0]
    found, projected = [charts.auroc(name, entries) for name, entries in some], concept.projected
    if isinstance(projected, str):
        return concept, found, None, []
    histogram = charts.histogram(projected) if drawn else None
    return concept, found, histogram, list(_texts(projected))


def _texts(projected: Projected) -> Iterator[Any]:
    every = [token.along for one in (*projected.most, *projected.least) for token in one.tokens]
    finite = np.array(every)[np.isfinite(every)]
    if not len(finite):
        return
    middle = float(np.median(finite)) if projected.midpoint is None else projected.midpoint
    reach = float(np.quantile(np.abs(finite - middle), 0.95)) or 1.0
    for title, documents in (("Furthest towards A", projected.most), ("Furthest towards B", projected.least)):
        yield title, [(one, [(token, _style(token.along, middle, reach)) for token in one.tokens]) for one in documents]


def _style(along: float, middle: float, reach: float) -> str:
    """The colour behind a token; none where its row is no number."""
    shade = (along - middle) / reach
    if not np.isfinite(shade):
        return ""
    return f"background: rgb(var(--{'a' if shade > 0 else 'b'}) / {min(abs(shade), 1.0) * 0.6:.2f})"
