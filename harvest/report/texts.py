"""Documents as the page shows them: their stored tokens, each with how far its row lies along a direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harvest.reading.quote import spelled
from harvest.reading.reader import Run

BEFORE = 120
AFTER = 24
"""Stored tokens shown before and after the one where the state is read."""
_SHOWN = {ord("\n"): "↵", ord("\t"): "→", **dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "·")}
"""Control characters, which a page cannot hold or would hide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """One token of a document."""

    text: str
    position: int
    along: float
    """Of its row, along the direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownDocument:
    """A held-out document and a stretch of its tokens."""

    document: int
    variant: int
    group: str
    """A or B."""
    along: float
    """Of the state that was read."""
    tokens: tuple[ShownToken, ...]
    gap_before: bool
    """Stored tokens before the first one are not shown."""
    gap_after: bool


def shown_document(
    run: Run,
    name: str,
    vector: np.ndarray,
    pieces: Sequence[bytes] | None,
    *,
    document: int,
    variant: int,
    position: int,
    group: str,
    along: float,
) -> ShownDocument:
    """`vector` float64 [d] of the name; `position`: where the state is read; `pieces`: token id -> its bytes, None
    where they are not to be had."""
    rows = run.find(document=document)
    columns = ["position", "token", *(["variant"] if run.record.job["data"].get("contrast") else [])]
    table = run.tokens(rows, columns)
    if "variant" in table.column_names:
        mine = np.flatnonzero(table.column("variant").to_numpy() == variant)
        rows, table = rows[mine], table.take(mine)
    positions = table.column("position").to_numpy()
    at = int(np.searchsorted(positions, position)) if position >= 0 else len(rows)
    start, stop = max(0, at - BEFORE), min(len(rows), at + 1 + AFTER)
    values = run[name].numpy(rows[start:stop], "float64") @ vector
    texts = spelled(table.column("token").to_numpy()[start:stop].tolist(), pieces)
    return ShownDocument(
        document=document,
        variant=variant,
        group=group,
        along=along,
        tokens=tuple(
            ShownToken(text=text.translate(_SHOWN), position=place, along=value)
            for text, place, value in zip(texts, positions[start:stop].tolist(), values.tolist())
        ),
        gap_before=start > 0,
        gap_after=stop < len(rows),
    )
