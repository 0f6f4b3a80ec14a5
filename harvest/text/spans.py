"""Named stretches of a document: read from a column, found in the text, and said of every token that overlaps one."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harvest.errors import RequestError
from harvest.settings.direction import DirectionSettings
from harvest.settings.tables import CaptureSettings, DataSettings
from harvest.text import reasons
from harvest.text.reasons import UnusableError, require_text

PROMPT, REASONING, ANSWER = PHASES = ("prompt", "reasoning", "answer")
"""Found in the text itself, where it tells."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Of chats by custom; a template may know others, and some take any."""
_OPEN, _CLOSE = "<think>", "</think>"
_FIELDS = {"name", "start", "end"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Characters of a text (tokens of a list of ids), `end` not included; empty ones cover no token."""

    name: str
    start: int
    end: int
    quiet: bool = False
    """Can be asked for, and is never what the `span` column says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpans:
    """What the spans of one document mean for its T tokens."""

    names: tuple[str, ...]
    """What `innermost` counts in."""
    innermost: np.ndarray
    """int32 [T]: the shortest span that overlaps the token, the first of equals; -1 outside all."""
    chosen: np.ndarray
    """bool [T]: the token overlaps a span that `capture.positions` names."""
    met: frozenset[str]
    """Those of the names asked for that some token overlaps."""
    named: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Name that directions read at -> bool [T]: the token overlaps such a span."""

    def behind_one(self, lead: int) -> TokenSpans:
        """With one token outside all spans in the place of the first `lead`."""
        innermost, chosen = np.insert(self.innermost[lead:], 0, -1), np.insert(self.chosen[lead:], 0, False)
        named = {name: np.insert(inside[lead:], 0, False) for name, inside in self.named.items()}
        return replace(self, innermost=innermost, chosen=chosen, named=named)

    def up_to(self, tokens: int | None) -> TokenSpans:
        """Of the first tokens."""
        named = {name: inside[:tokens] for name, inside in self.named.items()}
        return replace(self, innermost=self.innermost[:tokens], chosen=self.chosen[:tokens], named=named)


def uses_spans(data: DataSettings, capture: CaptureSettings, directions: Sequence[DirectionSettings] = ()) -> bool:
    """Whether the token table of a job has a `span` column; chats have spans by role without being asked."""
    asked = data.spans is not None or data.kind == "messages" or asked_spans(capture) or spans_read(directions)
    return bool(asked)


def spans_read(directions: Sequence[DirectionSettings]) -> tuple[str, ...]:
    """The names of spans that directions read at."""
    return tuple(dict.fromkeys(read.span for direction in directions for read in direction.reads if read.span))


def asked_spans(capture: CaptureSettings) -> tuple[str, ...]:
    """The names in `capture.positions = {span = [...]}`; none for other positions."""
    positions = capture.positions
    return tuple(positions["span"]) if isinstance(positions, Mapping) and "span" in positions else ()


def require_span_source(
    data: DataSettings, capture: CaptureSettings, directions: Sequence[DirectionSettings] = ()
) -> None:
    """Raises RequestError for a span that no document can have."""
    if data.spans is not None or data.kind == "messages":
        return
    known = PHASES if data.kind == "text" else ()
    for name in (*asked_spans(capture), *spans_read(directions)):
        if name not in known:
            allowed = f"allowed are {', '.join(known)}" if known else "none is known"
            raise RequestError(
                f"{_asked_by(name, capture)}: {name!r} is no span of data.{data.kind} alone; "
                f"without data.spans {allowed}"
            )


def _asked_by(name: str, capture: CaptureSettings) -> str:
    asked = list(asked_spans(capture))
    return f"capture.positions = {{span = {asked}}}" if name in asked else f"directions: read = {{span = {name!r}}}"


def refuse_span(name: str, capture: CaptureSettings, met: Collection[str]) -> RequestError:
    """The error for a name that is no phase, and no role of the chats that were met."""
    return RequestError(
        f"{_asked_by(name, capture)}: {name!r} is neither a phase nor a role of these chats; "
        f"allowed are {', '.join(sorted({*PHASES, *ROLES, *met}))}"
    )


def doubtful_spans(asked: Sequence[str], template: str) -> tuple[str, ...]:
    """Names asked for that no chat has by custom: no phase, no usual role, no word of the chat template."""
    known = {*PHASES, *ROLES, *re.findall(r"\w+", template)}
    return tuple(name for name in asked if name not in known)


def read_spans(value: Any, length: int) -> list[Span]:
    """The spans in a cell: a list of `{name, start, end}`, one of them, JSON text of either, or null for none.

    `length`: characters (or ids) of the document. Raises UnusableError for anything else and for spans that do
    not lie within the document.
    """
    if isinstance(value, str):  # a cell of a csv file
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError:
            raise UnusableError(reasons.SPANS_NOT_VALID, f"{value[:40]!r} is not JSON") from None
    if value is None:
        return []
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple | np.ndarray):
        raise UnusableError(reasons.SPANS_NOT_VALID, f"{type(value).__name__}, not a list of {{name, start, end}}")
    return [_span(item, length) for item in value]


def _span(item: Any, length: int) -> Span:
    if not isinstance(item, Mapping) or not set(item) >= _FIELDS:
        seen = ", ".join(map(str, item)) if isinstance(item, Mapping) else type(item).__name__
        raise UnusableError(reasons.SPANS_NOT_VALID, f"a span has {seen or 'nothing'}, not name, start and end")
    name, start, end = item["name"], item["start"], item["end"]
    if not isinstance(name, str) or not name:
        raise UnusableError(reasons.SPANS_NOT_VALID, f"a span is called {name!r}, which is no text")
    require_text(name)
    if not all(isinstance(at, int | np.integer) and not isinstance(at, bool) for at in (start, end)):
        raise UnusableError(reasons.SPANS_NOT_VALID, f"{name} from {start!r} to {end!r}, not whole numbers")
    if not 0 <= start <= end <= length:
        raise UnusableError(reasons.SPANS_NOT_VALID, f"{name} from {start} to {end} of a document of {length}")
    return Span(name=name, start=int(start), end=int(end))


def phases_of_text(text: str) -> list[Span]:
    """`prompt`, `reasoning` and `answer` of a text that holds `</think>`; nothing of any other."""
    return split_phases(text, 0, len(text)) if _CLOSE in text else []


def split_phases(text: str, start: int, stop: int) -> list[Span]:
    """Phases of text[start:stop], what the model said: without a mark of thinking all of it is the answer.

    `reasoning` lies between `<think>`, or the beginning, and the last `</think>`, or the end of a text that begins
    with `<think>`; what stands before `<think>` is the prompt. Blanks around a phase belong to none.
    """
    opened = text.find(_OPEN, start, stop)
    closed = text.rfind(_CLOSE, start, stop)
    if closed < 0 and (opened < 0 or text[start:opened].strip()):
        return [_phase(ANSWER, text, start, stop)]
    if opened > closed >= 0:  # an answer that writes about thinking
        opened = -1
    spans = []
    if text[start : max(opened, start)].strip():
        spans.append(_phase(PROMPT, text, start, opened))
    within = start if opened < 0 else opened + len(_OPEN)
    spans.append(_phase(REASONING, text, within, stop if closed < 0 else closed))
    if closed >= 0:
        spans.append(_phase(ANSWER, text, closed + len(_CLOSE), stop))
    return spans


def _phase(name: str, text: str, start: int, stop: int) -> Span:
    inside = text[start:stop]
    start += len(inside) - len(inside.lstrip())
    return Span(name=name, start=start, end=start + len(inside.strip()))


def with_phases(spans: Sequence[Span], phases: Sequence[Span]) -> list[Span]:
    """Those of the column, then the phases found whose names it does not use."""
    named = {span.name for span in spans}
    return [*spans, *(phase for phase in phases if phase.name not in named)]


def token_spans(
    spans: Sequence[Span], offsets: np.ndarray, asked: Collection[str], read: Collection[str] = ()
) -> TokenSpans:
    """What spans say of every token; `offsets` int [T, 2]: its characters, [a, a] where it has none.

    `asked`: names whose tokens are `chosen`; `read`: those that are told apart in `named`. Offsets rise but for tokens
    without characters, so each span looks at its own tokens only.
    """
    starts, ends = offsets[:, 0], offsets[:, 1]
    wide = ends > starts
    reached = np.maximum.accumulate(np.where(wide, ends, 0)) if len(ends) else ends
    ahead = np.where(wide, starts, np.iinfo(np.int32).max)
    ahead = np.minimum.accumulate(ahead[::-1])[::-1] if len(starts) else starts
    names = tuple(dict.fromkeys(span.name for span in spans))
    innermost = np.full(len(offsets), -1, np.int32)
    chosen = np.zeros(len(offsets), bool)
    named = {name: np.zeros(len(offsets), bool) for name in read}
    met = set()
    for _, span in sorted(enumerate(spans), key=lambda pair: (pair[1].start - pair[1].end, -pair[0])):
        low = int(np.searchsorted(reached, span.start, side="right"))
        high = int(np.searchsorted(ahead, span.end, side="left"))
        if low >= high or span.start == span.end:
            continue
        inside = wide[low:high] & (starts[low:high] < span.end) & (ends[low:high] > span.start)
        if not span.quiet:
            innermost[low:high][inside] = names.index(span.name)
        if span.name in asked:
            chosen[low:high] |= inside
            met |= {span.name} if inside.any() else set()
        if span.name in named:
            named[span.name][low:high] |= inside
    return TokenSpans(names=names, innermost=innermost, chosen=chosen, met=frozenset(met), named=named)
