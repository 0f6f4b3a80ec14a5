"""Plots as SVG that takes its colours from the page: light and dark are one drawing. The only matplotlib."""

from __future__ import annotations

import io
import itertools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from harvest.report.concepts import Entry, Projected
from harvest.report.health import NameHealth
from harvest.report.positions import PositionNorms

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # while it is imported it tells where it keeps its fonts

import matplotlib  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import FuncFormatter, NullFormatter  # noqa: E402

INCHES = (4.6, 2.9)
WIDE = 30.0
"""Numbers that differ by more than this factor are drawn by their logarithm."""
INK, GRID, *SERIES = [f"#0a0b{number:02x}" for number in range(10)]
"""Stand for the page's colours: ink, grid and eight series."""
MARKERS = "osD^vPX*"
BANDS = ((0.01, 0.99, 0.12), (0.05, 0.95, 0.16), (0.25, 0.75, 0.22))
"""Shares of rows between which a band lies, and how dark it is."""
TICK_CHARACTERS = 42
"""Below a chart, side by side."""
LEGEND_CHARACTERS = 26
"""Of a label beside another one; twice as many have a line for themselves."""
STEPS = (1, 2, 4, 5, 10, 20, 50, 100)
"""Layers from one tick to the next."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "patch.linewidth": 0.0,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    "grid.color": GRID,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One drawing."""

    title: str
    svg: str
    """Markup for a page; every text in it is escaped."""


class Charts:
    """Draws; every chart of a page has ids of its own."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def norms_by_layer(self, site: str, names: Sequence[NameHealth]) -> Chart:
        """Mean norm of a site's rows over its layers, with and without special tokens, and where most rows lie."""
        layers = [one.layer or 0 for one in names]

        def draw(axes: Axes) -> None:
            wide = [layers[0] - 0.2, layers[0] + 0.2] if len(names) == 1 else layers
            for low, high, shade in BANDS:
                ends = [[(one.quantiles or {}).get(share, np.nan) for one in names] for share in (low, high)]
                floor, ceiling = (end * (len(wide) // len(end)) for end in ends)
                axes.fill_between(wide, floor, ceiling, color=SERIES[0], alpha=shade)
            _line(axes, layers, [one.mean_norm for one in names], 0, "mean")
            if any(one.special_norm is not None for one in names):
                _line(axes, layers, [one.ordinary_norm for one in names], 1, "mean without special tokens")
            _layers(axes, layers)
            axes.set_ylabel("norm")
            _scale(axes, [n for one in names for n in (one.mean_norm, *(one.quantiles or {}).values())])

        return self._chart(f"Norms of {site} by layer", draw)

    def norms_by_position(self, norms: PositionNorms) -> Chart:
        """Mean norm of sampled rows over the token's position."""
        x = np.arange(len(norms.ranges))

        def draw(axes: Axes) -> None:
            for number, (name, values) in enumerate(norms.norms.items()):
                _line(axes, x, values, number, name)
            labels = [str(first) for first, _ in norms.ranges]
            room = TICK_CHARACTERS // (len(labels[-1]) + 2)
            step = max(1, -(-len(labels) // room))
            axes.set_xticks(x[::step], labels[::step])
            axes.set_xlabel("position in the document (the first of each range)")
            axes.set_ylabel("mean norm")
            _scale(axes, [value for values in norms.norms.values() for value in values])

        return self._chart("Norms by position", draw)

    def auroc(self, series: str, entries: Sequence[Entry]) -> Chart:
        """Held-out AUROC of a site over its layers, a line for each mode, with 95 % intervals."""
        modes = list(dict.fromkeys(entry.mode for entry in entries))

        def draw(axes: Axes) -> None:
            axes.axhline(0.5, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
            for number, mode in enumerate(modes):
                mine = [entry for entry in entries if entry.mode == mode and entry.auroc.value is not None]
                mine.sort(key=lambda entry: entry.layer or 0)
                x = np.array([entry.layer or 0 for entry in mine]) + (0.08 * number if len(mine) < 6 else 0.0)
                ends = ([getattr(one.auroc, end) for one in mine] for end in ("low", "high"))
                low, high = (np.array(end, np.float64) for end in ends)  # None is NaN
                if len(mine) < 6:
                    axes.vlines(x, low, high, color=SERIES[number % 8], alpha=0.5, linewidth=1.4)
                else:
                    axes.fill_between(x, low, high, color=SERIES[number % 8], alpha=0.15)
                _line(axes, x, [entry.auroc.value for entry in mine], number, mode)
            _layers(axes, [entry.layer or 0 for entry in entries])
            axes.set_ylabel("held-out AUROC")

        return self._chart(f"AUROC of {series} by layer", draw)

    def histogram(self, found: Projected) -> Chart:
        """Held-out examples of both groups along a direction."""
        every = np.concatenate([found.a, found.b])
        bins = np.histogram_bin_edges(every, bins=min(40, max(8, round(len(every) ** 0.5))))

        def draw(axes: Axes) -> None:
            for number, (label, values) in enumerate((("A", found.a), ("B", found.b))):
                told = f"{label} ({len(values):,})"
                axes.hist(values, bins.tolist(), color=SERIES[number], alpha=0.45, label=told, histtype="stepfilled")
            if found.midpoint is not None:
                axes.axvline(found.midpoint, color=INK, linewidth=1.0, linestyle=(0, (4, 3)), label="midpoint")
            axes.locator_params(axis="x", nbins=6)
            axes.locator_params(axis="y", integer=True)
            axes.set_xlabel("projection")
            axes.set_ylabel("held-out examples")

        return self._chart(f"Projections on {found.mode} at {found.at}", draw)

    def _chart(self, title: str, draw: Callable[[Axes], None]) -> Chart:
        key = f"c{next(self._numbers)}"
        with matplotlib.rc_context({**STYLE, "svg.hashsalt": key}):
            figure = Figure(figsize=INCHES)
            figure.patch.set_alpha(0.0)
            axes = figure.add_subplot()
            axes.patch.set_alpha(0.0)
            draw(axes)
            lines, labels = axes.get_legend_handles_labels()
            columns = 1 if any(len(label) > LEGEND_CHARACTERS for label in labels) else 2
            rows = -(-len(labels) // columns)
            if rows:
                figure.legend(lines, [_shortened(label) for label in labels], loc="lower center", ncols=columns)
            figure.subplots_adjust(left=0.16, right=0.97, top=0.96, bottom=0.17 + 0.065 * rows)
            drawn = io.StringIO()
            about = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            figure.savefig(drawn, format="svg", metadata=about)
        return Chart(title=title, svg=_inline(drawn.getvalue(), key, title))


def _line(axes: Axes, x: Sequence[float] | np.ndarray, y: Sequence[float | None], number: int, label: str) -> None:
    few = len(x) < 40
    values = np.array(y, np.float64)  # None is NaN
    axes.plot(x, values, color=SERIES[number % 8], marker=MARKERS[number % 8] if few else None, label=label)


def _shortened(label: str, most: int = 2 * LEGEND_CHARACTERS) -> str:
    """A long name without its middle; where it begins and ends says which one it is."""
    return label if len(label) <= most else f"{label[: most // 2]}…{label[1 - most // 2 :]}"


def _layers(axes: Axes, layers: Sequence[int]) -> None:
    axes.set_xlabel("layer")
    ticks = sorted(set(layers))
    low, high = ticks[0], ticks[-1]
    step = next((step for step in STEPS if step * 8 >= high - low), STEPS[-1])
    axes.set_xticks(ticks if len(ticks) <= 8 else range(low, high + 1, step))
    if low == high:
        axes.set_xlim(low - 1, low + 1)


def _scale(axes: Axes, values: Sequence[float | None]) -> None:
    """A logarithmic scale where the numbers ask for one."""
    known = np.array([value for value in values if value is not None and np.isfinite(value)])
    if len(known) and known.min() > 0 and known.max() > WIDE * known.min():
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _inline(svg: str, key: str, title: str) -> str:
    """As a part of a page: no prologue, no size of its own, the page's colours, ids that no other chart has."""
    body = svg[svg.index("<svg") :]
    head, _, rest = body.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    rest = re.sub(r"<style[^>]*>.*?</style>", "", rest, flags=re.DOTALL)
    rest = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{key}-", rest)
    rest = re.sub(r"#0a0b0(\d)", r"var(--chart-\1)", rest)
    label = escape(title, quote=True)
    return f'<svg class="chart" {box[0]} role="img" aria-label="{label}">{rest.strip()}'
