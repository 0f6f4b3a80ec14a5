"""Chat messages to the text that the model's own template makes of them, with nothing of a message lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from harvest.errors import RequestError
from harvest.settings.tables import ChatSettings
from harvest.text import reasons
from harvest.text.encode import MARKED, MARKS
from harvest.text.locate import THOUGHTS, located
from harvest.text.reasons import UnusableError, require_text
from harvest.text.spans import Span

FIXED_DATE = datetime(2024, 7, 26)
"""Today, for every template that asks: the day that Llama 3.1's template falls back to."""

Message = dict[str, Any]

_RESERVED = (
    "add_generation_prompt", "conversation", "max_length", "padding", "return_assistant_tokens_mask", "return_dict",
    "return_tensors", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "truncation",
)  # fmt: skip
_PROBE = "probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """A chat as text."""

    text: str
    """What the template made."""
    restore: Callable[[str], str] | None
    """Puts the special tokens that message contents spelled back into a piece of `text`; None: they spelled none."""
    spans: Sequence[Span]
    """Every message's text by its role, and the phases, in characters of `text` with the contents put back."""


class ChatTemplate:
    """The template of a tokenizer with the job's `[chat]` settings."""

    def __init__(
        self,
        tokenizer: Any,
        chat: ChatSettings,
        *,
        column: str,
        guard: re.Pattern[str] | None,
        by_span: bool = False,
    ) -> None:
        """`guard` finds what contents may spell but must not become: special tokens, or None to parse them.
        `by_span`: rows are chosen by span, so a chat whose spans are not certain is of no use.

        Raises RequestError where the tokenizer has no template, or one that is no valid Jinja, and for
        `chat.kwargs` that would change what rendering returns.
        """
        for key in chat.kwargs:
            if key in _RESERVED:
                raise RequestError(f"chat.kwargs.{key}: Harvest decides this one; allowed are the template's variables")
        self._tokenizer, self._chat, self._guard, self._by_span = tokenizer, chat, guard, by_span
        kwargs = dict(chat.kwargs)
        try:
            template = tokenizer.get_chat_template(kwargs.pop("chat_template", None), tools=kwargs.get("tools"))
        except ValueError:
            template = None
        if template is None:
            raise RequestError(
                f"data.messages = {column!r}: the tokenizer has no chat template; "
                "tokens.tokenizer may name one that has (a chat sibling of the model)"
            )
        self.source = template
        """The template itself, in Jinja."""
        self._template = (_today_macro() if "strftime_now" in template else "") + template
        self._kwargs = {"date_string": FIXED_DATE.strftime("%d %b %Y")} if "date_string" in template else {}
        self._kwargs |= kwargs
        self._parts: bool | None = None
        with suppress(UnusableError):  # a template may refuse this chat; only its syntax is asked after
            self._render([{"role": "user", "content": _PROBE}])

    def render(self, value: Any) -> Rendering:
        """The text of a list of `{role, content}` messages, or of a plain string as one user turn.

        Raises UnusableError for what is no chat, what the template refuses, and where the stripped text of
        a message is not found, in order, in the rendering.
        """
        messages = _messages(value)
        if any(isinstance(message.get("content"), list) for message in messages) and not self._handles_parts():
            raise UnusableError(reasons.PARTS_UNKNOWN)
        if self._chat.system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self._chat.system}, *messages]
        restore = None
        if self._guard is not None and any(self._guard.search(text) for text in _strings(messages)):
            messages, restore = _disguise(messages, self._guard, self._template)
        text = self._render(messages)
        _require_all_text(messages, text)
        spans = located(messages, text, self._render, restore, strict=self._by_span)
        return Rendering(text=text, restore=restore, spans=spans)

    def _render(self, messages: Sequence[Message]) -> str:
        wanted = self._chat.generation_prompt
        prompt = messages[-1]["role"] == "user" if wanted == "auto" else wanted
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=prompt,
                **self._kwargs,
            )
        except Exception as error:  # a template is a program: whatever it raises concerns this chat
            seen = " ".join(f"{type(error).__name__}: {error}".split())
            if type(error).__name__ == "TemplateSyntaxError":
                raise RequestError(f"the tokenizer's chat template is not valid: {seen}") from error
            raise UnusableError(reasons.REFUSED, seen) from error
        return str(text)

    def _handles_parts(self) -> bool:
        """Whether `{"type": "text", "text": ...}` comes out as its text, not as a printed structure."""
        if self._parts is None:
            try:
                text = self._render([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
            except UnusableError:
                text = ""
            self._parts = _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text
        return self._parts


def _messages(value: Any) -> list[Message]:
    if isinstance(value, str):
        value = [{"role": "user", "content": value}] if value else []
    if not isinstance(value, list | tuple):
        raise UnusableError(reasons.NOT_MESSAGES, f"{type(value).__name__}, not a list of {{role, content}}")
    if not value:
        raise UnusableError(reasons.EMPTY, harmless=True)
    messages = [_message(message) for message in value]
    for text in _strings(messages):
        require_text(text)
    return messages


def _message(message: Any) -> Message:
    """One message without its null fields (columns of a table that other messages use)."""
    if not isinstance(message, Mapping):
        raise UnusableError(reasons.NOT_MESSAGES, f"a message is {type(message).__name__}, not {{role, content}}")
    fields = {key: value for key, value in message.items() if value is not None}
    content = fields.get("content")
    if not isinstance(fields.get("role"), str) or len(fields) < 2 or not isinstance(content, str | list | None):
        raise UnusableError(reasons.NOT_MESSAGES, f"a message has {', '.join(map(str, message)) or 'nothing'}")
    if isinstance(content, list):
        if not all(
            isinstance(p, Mapping) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content
        ):
            raise UnusableError(reasons.PARTS_NOT_TEXT)
        fields["content"] = [{"type": "text", "text": part["text"]} for part in content]
    return fields


def _strings(value: Any) -> Iterator[str]:
    """Every text within messages, however deep; roles are the template's business."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key != "role":
                yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


def _replaced(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: inner if key == "role" else _replaced(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(inner, change) for inner in value]
    return value


def _disguise(
    messages: Sequence[Message], guard: re.Pattern[str], template: str
) -> tuple[list[Message], Callable[[str], str]]:
    """The messages with every spelled special token behind two private-use characters, and the way back.

    So the only special tokens in the rendering are the template's own, wherever it put the contents and
    whatever it cut off them.
    """
    texts = [template, *_strings(messages)]
    mark = next(chr(code) for code in reversed(MARKS) if not any(chr(code) in text for text in texts))
    words = sorted({word for text in texts[1:] for word in guard.findall(text)})
    numbers = {word: chr(MARKED + n) for n, word in enumerate(words)}
    disguised = _replaced(messages, lambda text: guard.sub(lambda m: mark + numbers[m[0]], text))

    def restore(text: str) -> str:
        return re.sub(f"{mark}(.)", lambda m: words[ord(m[1]) - MARKED], text)

    return disguised, restore


def _require_all_text(messages: Sequence[Message], rendering: str) -> None:
    """Raises UnusableError unless the stripped text of every message stands in the rendering, in order."""
    at = 0
    for message in messages:
        for key in THOUGHTS:
            if isinstance(message.get(key), str):
                _find(message[key], rendering, at, message["role"])
        content = message.get("content")
        for text in [content] if isinstance(content, str) else [part["text"] for part in content or ()]:
            at = _find(text, rendering, at, message["role"])


def _find(text: str, rendering: str, start: int, role: str) -> int:
    text = text.strip()
    found = rendering.find(text, start)
    if found < 0:
        raise UnusableError(reasons.TEXT_MISSING, f"the {role} turn beginning {text[:40]!r}")
    return found + len(text)


def _today_macro() -> str:
    """Jinja that answers `strftime_now(format)` with FIXED_DATE.

    A macro, because transformers hands no function on to a template; the newline at its end is Jinja's
    to drop, so the template behind it renders as if it came first.
    """
    steps = "".join(
        f"|replace({directive!r}, {FIXED_DATE.strftime(directive)!r})"
        for directive in ("%-d", "%-m", *(f"%{letter}" for letter in "aAbBdmYyHIMSpjfFTDxXc"))
    )
    return "{% macro strftime_now(format) %}{{ format" + steps + " }}{% endmacro %}\n"
