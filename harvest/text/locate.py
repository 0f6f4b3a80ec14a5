"""Where the text of every message stands in a rendered chat: proved, never guessed.

A short text may occur anywhere ("a" in `<|im_start|>`, "user" as the name of a role), so it is not searched for: the
chat is rendered once more with a private-use mark on both sides of every text. Where the marks change nothing else,
they say where the texts are. Templates that rewrite texts (thinking of earlier turns) may lose a mark; then the other
one and the text itself tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from harvest.text import reasons
from harvest.text.encode import MARKED, MARKS
from harvest.text.reasons import UnusableError
from harvest.text.spans import ANSWER, PROMPT, REASONING, Span, split_phases

Message = dict[str, Any]
Place = tuple[int, int]
"""First character and the one past the last."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys beside `content` that hold text of the message."""
MOST_MARKED = 60_000
"""Texts of one chat that get marks; there are no more private-use characters."""


def located(
    messages: Sequence[Message],
    rendering: str,
    render: Callable[[Sequence[Message]], str],
    restore: Callable[[str], str] | None,
    *,
    strict: bool,
) -> list[Span]:
    """Every message's text as a span named by its role, then `prompt`, `reasoning` and `answer`.

    Characters of the rendering after `restore`. A text that cannot be placed for certain raises UnusableError if
    `strict`, and has no span otherwise.
    """
    texts = [(number, key, text) for number, message in enumerate(messages) for key, text in _texts(message)]
    found = _places(texts, messages, rendering, render)
    if restore is not None:
        back = restore
        found = [[(len(back(rendering[:a])), len(back(rendering[:b]))) for a, b in places] for places in found]
        rendering = restore(rendering)
    if strict:
        _require_all_placed(texts, found, messages)
    spans, last = [], len(messages) - 1
    of_message: dict[int, list[tuple[str, list[Place]]]] = {}
    for (number, key, _), places in zip(texts, found):
        of_message.setdefault(number, []).append((key, places))
    for number, own in of_message.items():
        spans += [Span(name=messages[number]["role"], start=a, end=b) for a, b in _joined([p for _, p in own])]
    if messages[last]["role"] != "assistant" or last not in of_message:
        return [*spans, Span(name=PROMPT, start=0, end=len(rendering), quiet=True)]
    thought = _joined([places for key, places in of_message[last] if key in THOUGHTS])
    said = _joined([places for key, places in of_message[last] if key not in THOUGHTS])
    return spans + _phases(rendering, thought, said)


def _require_all_placed(
    texts: Sequence[tuple[int, str, str]], found: Sequence[Sequence[Place]], messages: Sequence[Message]
) -> None:
    for (number, _, text), places in zip(texts, found):
        if not places:
            seen = f"the {messages[number]['role']} turn beginning {text.strip()[:40]!r}"
            raise UnusableError(reasons.NOT_LOCATED, seen)


def _texts(message: Message) -> Iterator[tuple[str, str]]:
    """(key, text) of everything that the message says, in the order in which templates write it; blanks say nothing."""
    said = [(key, message[key]) for key in THOUGHTS if isinstance(message.get(key), str)]
    content = message.get("content")
    parts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
    said += [(f"content {number}", part) for number, part in enumerate(parts)]
    return ((key, text) for key, text in said if text.strip())


def _joined(places_of: Sequence[Sequence[Place]]) -> list[Place]:
    """One stretch from the first of some texts to the last; each for itself where a template says one of them twice."""
    flat = [place for places in places_of for place in places]
    if not flat or any(len(places) > 1 for places in places_of):
        return flat
    return [(min(a for a, _ in flat), max(b for _, b in flat))]


def _phases(rendering: str, thought: Sequence[Place], said: Sequence[Place]) -> list[Span]:
    """Of the last message, an assistant's; all before it is the prompt."""
    if not thought and not said:
        return []
    start, stop = min([*thought, *said])[0], max(b for _, b in [*thought, *said])
    prompt = Span(name=PROMPT, start=0, end=start, quiet=True)
    if not thought:
        return [prompt, *(span for span in split_phases(rendering, start, stop) if span.name != PROMPT)]
    spans = [Span(name=REASONING, start=a, end=b) for a, b in thought]
    return [prompt, *spans, *(Span(name=ANSWER, start=a, end=b) for a, b in said)]


def _places(
    texts: Sequence[tuple[int, str, str]],
    messages: Sequence[Message],
    rendering: str,
    render: Callable[[Sequence[Message]], str],
) -> list[list[Place]]:
    """Where each text stands, once or more; nothing where that is not certain."""
    opening, closing = _unused(rendering, [text for _, _, text in texts])
    marked = _marked(texts, messages, opening, closing)
    try:
        seen = render(marked)
    except UnusableError:
        seen = ""
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    bare: list[str] = []
    length = 0
    for piece in re.split(f"([{opening}{closing}].)", seen, flags=re.DOTALL):
        if piece[:1] in (opening, closing) and piece:
            places = starts if piece[0] == opening else ends
            places.setdefault(ord(piece[1]) - MARKED, []).append(length)
        else:
            bare.append(piece)
            length += len(piece)
    if "".join(bare) != rendering:  # the marks themselves changed what the template does
        starts, ends = {}, {}
    return [_place(text.strip(), starts.get(i, []), ends.get(i, []), rendering) for i, (_, _, text) in enumerate(texts)]


def _place(text: str, starts: Sequence[int], ends: Sequence[int], rendering: str) -> list[Place]:
    """Checked against the rendering; nothing where there is doubt."""
    if starts and not ends:
        ends = [start + len(text) for start in starts]
    elif ends and not starts:
        starts = [end - len(text) for end in ends]
    elif not starts and rendering.count(text) == 1:
        starts = [rendering.index(text)]
        ends = [starts[0] + len(text)]
    places = list(zip(starts, ends))
    sure = len(starts) == len(ends) and all(a >= 0 and rendering[a:b] == text for a, b in places)
    return places if sure else []


def _marked(
    texts: Sequence[tuple[int, str, str]], messages: Sequence[Message], opening: str, closing: str
) -> list[Message]:
    """The messages with every text between its marks; blanks at its ends stay outside, where templates trim them."""
    changed: list[Message] = [dict(message) for message in messages]
    for i, (number, key, text) in enumerate(texts[:MOST_MARKED]):
        message, bare = changed[number], text.strip()
        before = text[: len(text) - len(text.lstrip())]
        around = before + opening + chr(MARKED + i) + bare + closing + chr(MARKED + i) + text[len(before) + len(bare) :]
        if key in THOUGHTS or isinstance(message["content"], str):
            message[key if key in THOUGHTS else "content"] = around
        else:
            part = int(key.removeprefix("content "))
            parts: list[Mapping[str, Any]] = list(message["content"])
            parts[part] = {**parts[part], "text": around}
            message["content"] = parts
    return changed


def _unused(rendering: str, texts: Sequence[str]) -> tuple[str, str]:
    """Two private-use characters that nothing here contains."""
    free = (chr(code) for code in MARKS if chr(code) not in rendering and not any(chr(code) in text for text in texts))
    return next(free), next(free)
