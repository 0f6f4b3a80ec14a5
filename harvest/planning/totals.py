"""How many tokens and rows the whole data come to: judged from documents all over them, and how surely.

Of small files every document's length is read, so that one very long text counts for what it is; of large ones, some
documents at places evenly spread. What only reading from the front can reach is judged from the first documents, and
the result says so.
"""

from __future__ import annotations

import heapq
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from harvest.config import Job
from harvest.errors import HarvestError
from harvest.records import SourceFile, SourceRow
from harvest.source.rows import Source
from harvest.text.tokenise import Tokeniser

WHOLE_BYTES = 32 * 2**20
"""Files of at most so many bytes together are read whole."""
PASSED = 0.1
"""What passing over a document costs, which the sample leaves out, of reading it."""
PICKED = 512
"""Documents that are tokenised, evenly spread."""
LONGEST = 16
"""Of the longest documents, so many besides."""
CHARACTERS = 2**20
"""Of the first kind together, and of the second: more would take seconds."""
PLACES, AT_EACH = 64, 8
"""Of large files: where, and how many documents at each."""
LEAST_PLACES, SECONDS = 16, 1.5
"""After so long, so many places do."""
UNSEEN = 0.25
"""How far off the tokens of a length may be, as a share, where no document of it was tokenised, or fewer than FEW."""
FEW = 8
_BLOCK = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Of all documents that the sample and the limit leave."""

    tokens: float
    """Fed to the model."""
    rows: float
    spread: float | None
    """The tokens are within so many of `tokens` in 19 of 20 cases; None where nothing tells."""
    documents: int
    """That were tokenised."""
    judged: Literal["all", "lengths", "places", "first"]
    """`all`: nothing is judged; `lengths`: of every document; `places`: of some, evenly spread."""


def of_first(documents: int, probed: int, tokens: int, rows: int) -> Totals:
    """What `probed` first documents say of so many; exact where they are all."""
    share = documents / max(1, probed)
    exact = documents == probed
    return Totals(
        tokens=share * tokens,
        rows=share * rows,
        spread=0.0 if exact else None,
        documents=probed,
        judged="all" if exact else "first",
    )


def of_whole(job: Job, source: Source, tokeniser: Tokeniser, documents: int, context: int) -> Totals | None:
    """None where the data cannot be reached all over at little cost, or not be read: who harvests it says so.

    `context`: tokens at which `tokens.long = "truncate"` cuts.
    """
    files = source.files
    if not documents or any(file.rows is None or not os.path.isfile(file.path) for file in files):
        return None
    parts = reached(job, source)
    size = sum(os.path.getsize(file.path) * stop / max(1, file.rows or 0) for file, stop in parts)
    try:
        if max(PASSED, job.data.sample or 1.0) * size <= WHOLE_BYTES:
            most = len(job.data.columns) * context if job.tokens.long == "truncate" else None
            return _by_lengths(job, source, tokeniser, parts, documents, most)
        return _by_places(job, source, tokeniser, parts, documents)
    except HarvestError:
        return None


def reached(job: Job, source: Source) -> list[tuple[SourceFile, int]]:
    """Every file that the limit does not cut off whole, and the row at which the job ends in it; rows must be known."""
    left, found = job.data.limit, []
    for file in source.files:
        stop, kept = file.rows or 0, source.kept(file.number, 0, file.rows or 0)
        if left is not None and kept > left:
            stop = _row_after(source, file, left)
        if stop:
            found.append((file, stop))
        left = None if left is None else left - min(left, kept)
        if left == 0:
            break
    return found


def _row_after(source: Source, file: SourceFile, kept: int) -> int:
    """The row before which exactly so many of the file's are kept."""
    start = 0
    while (here := source.kept(file.number, start, start + _BLOCK)) < kept:
        start, kept = start + _BLOCK, kept - here
    low, high = start, start + _BLOCK
    while low < high:
        middle = (low + high) // 2
        if source.kept(file.number, start, middle) < kept:
            low = middle + 1
        else:
            high = middle
    return low


# ---- every length ----------------------------------------------------------------------------------------------------


def _by_lengths(
    job: Job,
    source: Source,
    tokeniser: Tokeniser,
    parts: Sequence[tuple[SourceFile, int]],
    documents: int,
    most: int | None,
) -> Totals:
    """Tokens of a document go with its length; how they do, documents of about that length tell."""
    lengths, rows = _read(job, source, parts, documents)
    picked = np.array(sorted(rows), np.int64)
    sizes = np.array(tokeniser.sizes([rows[at] for at in picked.tolist()], len(picked)), np.float64).reshape(-1, 2)
    if len(picked) == len(lengths):
        tokens, stored = sizes.sum(axis=0).tolist()
        return Totals(tokens=tokens, rows=stored, spread=0.0, documents=len(picked), judged="all")
    tokens, stored, spread = by_length(lengths, picked, sizes, most, per_document=_rows_per_document(job))
    return Totals(tokens=tokens, rows=stored, spread=spread, documents=len(picked), judged="lengths")


def _read(
    job: Job, source: Source, parts: Sequence[tuple[SourceFile, int]], documents: int
) -> tuple[NDArray[np.int64], dict[int, SourceRow]]:
    """The length of every document, and some of them: evenly spread ones, and the longest."""
    columns, step = job.data.columns, max(1, documents // PICKED)
    lengths: list[int] = []
    spread: dict[int, SourceRow] = {}
    longest: list[tuple[int, int, SourceRow]] = []
    for file, stop in parts:
        for row in source.rows(file.number, 0, stop):
            length, number = sum(length_of(row.values.get(column)) for column in columns), len(lengths)
            lengths.append(length)
            if number % step == 0:
                spread[number] = row
            elif length <= CHARACTERS:
                heapq.heappush(longest, (length, number, row))
                if len(longest) > LONGEST:
                    heapq.heappop(longest)
    room, thinner = CHARACTERS, math.ceil(sum(lengths[number] for number in spread) / CHARACTERS)
    rows = {number: spread[number] for number in list(spread)[:: max(1, thinner)]}
    for length, number, row in sorted(longest, key=lambda one: -one[0]):
        if length <= room:
            room -= length
            rows[number] = row
    return np.array(lengths, np.int64), rows


def length_of(value: Any) -> int:
    """Characters of a text or of the texts of a chat; token ids of a list of them."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(length_of(inner) for inner in value.values())
    if isinstance(value, Sequence) and len(value) and isinstance(value[0], Mapping | str):
        return sum(length_of(inner) for inner in value)
    return len(value) if hasattr(value, "__len__") else 0


def by_length(
    lengths: NDArray[np.int64],
    picked: NDArray[np.int64],
    sizes: NDArray[np.float64],
    most: int | None,
    *,
    per_document: bool,
) -> tuple[float, float, float]:
    """(tokens, rows, spread of the tokens) of documents of these lengths, int64 [N].

    `sizes` float64 [n, 2]: tokens and rows of the `picked` ones. Documents are taken together whose lengths are within
    a factor of two. `most`: tokens of a document that is cut off; `per_document`: rows do not go with the tokens.
    """
    length = np.maximum(lengths, 1).astype(np.float64)
    kind = np.frexp(length)[1]
    seen = {int(one): np.flatnonzero(kind[picked] == one) for one in np.unique(kind[picked])}
    tokens = rows = variance = 0.0
    for one in np.unique(kind).tolist():
        here, near = length[kind == one], seen[min(seen, key=lambda other: abs(other - one))]
        own, (of_tokens, of_rows) = seen.get(one, near[:0]), sizes[near].sum(axis=0)
        ratio = of_tokens / length[picked[near]].sum()
        each = here * ratio if most is None or len(own) else np.minimum(here * ratio, most)
        total = float(each.sum())
        tokens += total
        rows += len(here) * of_rows / len(near) if per_document else total * of_rows / max(1.0, of_tokens)
        off = UNSEEN * total / max(1, len(own)) ** 0.5
        if len(own) > 1:
            seen_off = np.std(sizes[own, 0] - ratio * length[picked[own]], ddof=1) * len(here) / len(own) ** 0.5
            off = seen_off if len(own) >= FEW else max(off, seen_off)
        variance += float(off) ** 2 * (1 - len(own) / len(here))
    return tokens, float(rows), 2 * variance**0.5


def _rows_per_document(job: Job) -> bool:
    """Rows are as many in a long document as in a short one."""
    return job.capture.positions in ("last", "first") or isinstance(job.capture.positions, tuple)


# ---- some places -----------------------------------------------------------------------------------------------------


def _by_places(
    job: Job, source: Source, tokeniser: Tokeniser, parts: Sequence[tuple[SourceFile, int]], documents: int
) -> Totals | None:
    """Means of neighbours differ as chance has it; a trend over the data is no doubt, for the places are spread."""
    begin = time.monotonic()
    found: dict[int, NDArray[np.float64]] = {}
    window = int(2 * AT_EACH / (job.data.sample or 1.0)) + 1
    for place in _spread(PLACES):
        if len(found) >= LEAST_PLACES and time.monotonic() - begin > SECONDS:
            break
        file, row, stop = at_share(parts, (place + 0.5) / PLACES)
        rows = source.rows(file.number, row, min(row + window, stop), source.mark(file.number, row))
        sizes = tokeniser.sizes(rows, AT_EACH)
        if sizes:
            found[place] = np.array(sizes, np.float64)
    if not found:
        return None
    all_of_them = np.concatenate(list(found.values()))
    tokens, rows = (documents * all_of_them.mean(axis=0)).tolist()
    means = np.array([found[place][:, 0].mean() for place in sorted(found)])
    spread = None
    if len(means) > 1:
        steps = np.diff(means)
        spread = 2 * documents * float((steps**2).sum() / 2 / len(steps) / len(means)) ** 0.5
    return Totals(tokens=tokens, rows=rows, spread=spread, documents=len(all_of_them), judged="places")


def _spread(count: int) -> Iterator[int]:
    """0 to count - 1, a power of two, such that the first ones are far apart, however many they are."""
    bits = count.bit_length() - 1
    return (int(f"{number:0{bits}b}"[::-1], 2) for number in range(count))


def at_share(parts: Sequence[tuple[SourceFile, int]], share: float) -> tuple[SourceFile, int, int]:
    """(file, row, the row at which the job ends in it) after such a share of all rows."""
    row = int(share * sum(stop for _, stop in parts))
    for file, stop in parts:
        if row < stop:
            return file, row, stop
        row -= stop
    file, stop = parts[-1]
    return file, stop - 1, stop
