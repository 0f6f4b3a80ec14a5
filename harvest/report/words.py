"""Numbers as the page shows them; a number that is none is a dash."""

from __future__ import annotations

import math

NONE = "–"  # noqa: RUF001  (an en dash is what stands for nothing in a table)


def count(number: int | float | None) -> str:
    """`12,345`."""
    return NONE if number is None else f"{number:,.0f}"


def figure(number: float | None) -> str:
    """Four digits that are worth reading."""
    if number is None or not math.isfinite(number):
        return NONE
    return f"{number:,.0f}" if 1000 <= abs(number) < 1e7 else f"{number:.4g}"


def share(number: float | None) -> str:
    """`12 %`, with more digits where it is small."""
    if number is None or not math.isfinite(number):
        return NONE
    return f"{100 * number:.0f} %" if number >= 0.1 else f"{100 * number:.2g} %"


def seconds(number: float) -> str:
    """`0.12 s`, `41.8 s`, `2 h 03 min`."""
    if number < 100:
        return f"{number:.2f} s" if number < 10 else f"{number:.1f} s"
    minutes = round(number / 60)
    return f"{number:,.0f} s" if number < 600 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(number: int | float) -> str:
    """Decimal units, as disks are sold."""
    value = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:,.2f} TB"


def plural(number: int, noun: str, several: str = "") -> str:
    """`1 shard`, `2 shards`, `3 tries`."""
    return f"{number:,} {noun if number == 1 else several or noun + 's'}"


def layer_of(name: str) -> tuple[str, int | None]:
    """`residual.12` -> its site and layer; a name outside all layers is its own site."""
    site, _, number = name.rpartition(".")
    return (site, int(number)) if site and number.isdigit() and ":" not in name else (name, None)
