"""What a notebook shows of an object: a title, a table, a line below. All of it is text: nothing given is markup.

Colours are the notebook's own, so that it reads on light and on dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from harvest.settings.base import nearest

MOST_ROWS = 40
"""Of a table; the rest is counted."""
_CELL = "text-align: left; padding: 0.1em 1em 0.1em 0; vertical-align: top"


def html(title: str, rows: Sequence[Sequence[str]], *, head: Sequence[str] = (), note: str = "") -> str:
    """One block of HTML without script, style sheet or anything to load. Rows may be long: the first ones are shown."""
    shown = rows if len(rows) <= MOST_ROWS else rows[: MOST_ROWS - 1]
    parts = [f"<div><strong>{escape(title)}</strong>", '<table style="color: inherit">']
    if head:
        parts.append(f"<thead>{_row(head, 'th')}</thead>")
    parts += ["<tbody>", *(_row(row, "td") for row in shown), "</tbody></table>"]
    if len(shown) < len(rows):
        note = f"and {len(rows) - len(shown):,} more{f'; {note}' if note else ''}"
    if note:
        parts.append(f'<div style="opacity: 0.7">{escape(note)}</div>')
    return "".join([*parts, "</div>"])


def _row(cells: Sequence[str], kind: str) -> str:
    inside = "".join(f'<{kind} style="{_CELL}">{escape(cell)}</{kind}>' for cell in cells)
    return f"<tr>{inside}</tr>"


def listed(kind: str, values: Mapping[str, object]) -> str:
    """For a terminal: a line for each value, the first ones where there are many."""
    items = [f"  {name}: {value!r}".replace("\n", "\n  ") for name, value in values.items()]
    shown = items if len(items) <= MOST_ROWS else items[: MOST_ROWS - 1]
    more = [f"  and {len(items) - len(shown):,} more"] if len(shown) < len(items) else []
    return "\n".join([f"{kind}, {len(items):,}:", *shown, *more]) if items else f"{kind}: none"


def few(names: Sequence[str], most: int = 6) -> str:
    """`a, b, c ... z (36)`."""
    if len(names) <= most:
        return ", ".join(names) or "none"
    return f"{', '.join(names[: most - 1])} ... {names[-1]} ({len(names):,})"


def meant(asked: str, names: Sequence[str]) -> str:
    """`; did you mean residual.29?`: of these names the layer nearest to the one asked for, else the one most like it;
    nothing where none is."""
    site, _, layer = str(asked).rpartition(".")
    layers = [int(name.rpartition(".")[2]) for name in names if _is_layer_of(site, name)]
    if layers and layer.isdecimal():
        return f"; did you mean {site}.{min(layers, key=lambda one: abs(one - int(layer)))}?"
    found = nearest(str(asked), names)
    return f"; did you mean {found[0]}?" if found else ""


def _is_layer_of(site: str, name: str) -> bool:
    head, _, layer = name.rpartition(".")
    return head == site and layer.isdecimal()


def size(number: float) -> str:
    """`2.88 GB`: decimal units, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.2f} {unit}"
        number /= 1000
    return f"{number:,.2f} TB"


def plural(number: int, noun: str) -> str:
    """`1 shard`, `2,000 shards`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def figure(number: float | None) -> str:
    """Four digits that are worth reading; `-` for none."""
    if number is None or number != number:
        return "-"
    return f"{number:,.0f}" if 1000 <= abs(number) < 1e7 else f"{number:.4g}"
