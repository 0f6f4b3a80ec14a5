"""Text to token ids through the Rust backend: many texts at once, the caller's tokenizer left as it was found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from harvest.errors import RequestError

PIECE_CHARACTERS = 2**20
"""A longer text is encoded in pieces where that changes nothing: the backend keeps about 200 bytes a token."""
CHECK_CHARACTERS = 256
"""Context on both sides of a cut in which the cut is proved harmless."""
CUT_TRIES = 64
"""Places that are tried before a piece is made longer instead."""
MARKS = range(0x10F000, 0x10FFF0)
"""Private-use characters; one that a text does not contain introduces a template's control token in it."""
MARKED = 0x100000
"""Private-use characters that number the control tokens."""

Run = Callable[[Any, Sequence[str], bool], list[np.ndarray]]
"""(backend, texts, add_special) -> [T] or [T, 3] of each."""

_WORD_START = re.compile(r"(?<=[A-Za-z.,]) (?=[A-Za-z])|(?<=\n)(?=\w)|(?<=\w)(?=[\u3001\u3002\uff0c])")
"""Before a space, after a line's end, before a Chinese comma or full stop (whose texts have no spaces)."""


class Encoder:
    """Encodes texts with a fast tokenizer of transformers, which is never changed for its owner.

    Truncation and padding that came with the tokenizer's file are switched off while encoding: a
    document's length is ours to decide.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        added = tokenizer.added_tokens_decoder
        self._special = {int(i): t for i, t in added.items() if t.special and t.content}
        self._ids_of_special = {token.content: i for i, token in self._special.items()}
        words = sorted(self._ids_of_special, key=len, reverse=True)
        self.special_words = re.compile("|".join(map(re.escape, words))) if words else None
        """Finds a spelled special token, the longest first; None where the tokenizer has none."""
        self.added_by_itself = int(self._backend.num_special_tokens_to_add(False))
        """Tokens that the tokenizer puts around any text."""
        self._marked_copies: dict[str, Any] = {}

    def encode(self, texts: Sequence[str], *, add_special: bool, literal: bool) -> list[np.ndarray]:
        """The ids of every text, int32 [T] each, in order.

        `add_special`: with the tokens that the tokenizer puts around a text by itself. `literal`: text that
        spells a special token becomes ordinary tokens.
        """
        return self._encode(texts, add_special, literal, _ids)

    def encode_placed(self, texts: Sequence[str], *, add_special: bool, literal: bool) -> list[np.ndarray]:
        """The same as int32 [T, 3]: id, first character and the one past the last; [a, a] for a token without any.

        Characters of the text as given, whatever the tokenizer normalizes. A byte of a character has all of it.
        """
        return self._encode(texts, add_special, literal, _placed)

    def _encode(self, texts: Sequence[str], add_special: bool, literal: bool, run: Run) -> list[np.ndarray]:
        with _set_for_encoding(self._backend, literal):
            short = iter(run(self._backend, [text for text in texts if len(text) <= PIECE_CHARACTERS], add_special))
            return [
                next(short) if len(text) <= PIECE_CHARACTERS else self._encode_long(text, add_special, run)
                for text in texts
            ]

    def _encode_long(self, text: str, add_special: bool, run: Run) -> np.ndarray:
        pieces = list(_pieces(text, lambda piece: _ids(self._backend, [piece], False)[0]))
        around = self._around(pieces[0]) if add_special else ([], [])
        if len(pieces) == 1 or around is None:
            return run(self._backend, [text], add_special)[0]
        parts, start = [], 0
        for piece in pieces:
            (part,) = run(self._backend, [piece], False)
            if part.ndim == 2:
                part[:, 1:] += start
            parts.append(part)
            start += len(piece)
        before, after = (_without_place(ids, parts[0], at) for ids, at in zip(around, (0, len(text))))
        return np.concatenate([before, *parts, after])

    def _around(self, text: str) -> tuple[list[int], list[int]] | None:
        """The ids that the tokenizer itself puts before and after a text; None where they cannot be told apart."""
        if self.added_by_itself == 0:
            return [], []
        encoding = self._backend.encode(text, add_special_tokens=True)
        own = [i for i, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
        if not own or len(own) + self.added_by_itself != len(encoding.ids):
            return None
        return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]

    def encode_marked(self, text: str, restore: Callable[[str], str]) -> np.ndarray:
        """The ids of a rendered chat, int32 [T], whose control tokens are parsed and whose contents are literal.

        As `encode_marked_placed`, without the places.
        """
        return np.ascontiguousarray(self.encode_marked_placed(text, restore)[:, 0])

    def encode_marked_placed(self, text: str, restore: Callable[[str], str]) -> np.ndarray:
        """A rendered chat, int32 [T, 3] as from `encode_placed`: control tokens parsed, contents literal.

        Characters are those of `restore(text)`. `text` spells special tokens only where the template does; `restore`
        puts back, afterwards, what the contents spelled. A copy of the tokenizer knows a second name for every
        special token, made of private-use characters: the template's get that name, the contents' are ordinary
        text. Everything else of the tokenizer stays in force across the whole text (a prefix space at its very
        start only).
        """
        mark = next(chr(code) for code in MARKS if chr(code) not in text)
        numbers = {i: chr(MARKED + n) for n, i in enumerate(self._special)}
        parts: list[str] = []
        first, past = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
        place = 0
        for piece, special in self._split(text):
            written = mark + numbers[special] if special is not None else restore(piece)
            parts.append(written)
            steps = np.arange(place, place + len(written), dtype=np.int32)
            end = place + len(piece if special is not None else written)
            first.append(steps if special is None else np.full(len(written), place, np.int32))
            past.append(steps + 1 if special is None else np.full(len(written), end, np.int32))
            place = end
        backend = self._marked_copy(mark)
        (found,) = _placed(backend, ["".join(parts)], False)
        for i, number in numbers.items():
            found[found[:, 0] == backend.token_to_id(mark + number), 0] = i
        return _moved(found, np.concatenate(first), np.concatenate(past))

    def _split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """The text in pieces, each with the special token that it spells, if any."""
        at = 0
        for match in self.special_words.finditer(text) if self.special_words is not None else ():
            yield text[at : match.start()], None
            yield match[0], self._ids_of_special[match[0]]
            at = match.end()
        yield text[at:], None

    def _marked_copy(self, mark: str) -> Any:
        if mark not in self._marked_copies:
            try:
                copy = type(self._backend).from_str(self._backend.to_str())
            except Exception as error:  # the backend raises plain Exception for parts written in Python
                raise RequestError(
                    f"tokens.special_in_text = 'literal': this tokenizer cannot be copied ({error}), which chat "
                    "messages that spell a special token need; allowed here is 'parse'"
                ) from error
            copy.add_tokens([_renamed(token, mark + chr(MARKED + n)) for n, token in enumerate(self._special.values())])
            copy.no_truncation()
            copy.no_padding()
            copy.encode_special_tokens = True
            self._marked_copies[mark] = copy
        return self._marked_copies[mark]


def _moved(found: np.ndarray, first: np.ndarray, past: np.ndarray) -> np.ndarray:
    """`found` [T, 3] in characters of another text; `first` and `past` [characters]: where each of them is here."""
    if not len(first):
        return found
    start, end = found[:, 1].copy(), found[:, 2].copy()
    found[:, 1] = np.where(start < len(first), first[np.minimum(start, len(first) - 1)], past[-1])
    found[:, 2] = np.where(end > start, past[np.maximum(end, 1) - 1], found[:, 1])
    return found


def _without_place(ids: Sequence[int], like: np.ndarray, at: int) -> np.ndarray:
    """Ids in the shape of `like`, [T] or [T, 3], standing between characters."""
    array = np.array(ids, np.int32)
    return array if like.ndim == 1 else np.stack([array, np.full_like(array, at), np.full_like(array, at)], axis=1)


def _renamed(token: Any, content: str) -> Any:
    return type(token)(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=False,
    )


@contextmanager
def _set_for_encoding(backend: Any, literal: bool) -> Iterator[None]:
    truncation, padding, parsing = backend.truncation, backend.padding, backend.encode_special_tokens
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = literal
    try:
        yield
    finally:
        backend.encode_special_tokens = parsing
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


def _ids(backend: Any, texts: Sequence[str], add_special: bool) -> list[np.ndarray]:
    encodings = backend.encode_batch_fast(texts, add_special_tokens=add_special)
    return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]


def _placed(backend: Any, texts: Sequence[str], add_special: bool) -> list[np.ndarray]:
    """Slower than `_ids`: the backend keeps track of every character."""
    encodings = backend.encode_batch(texts, add_special_tokens=add_special)
    found = []
    for encoding in encodings:
        ids, offsets = np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int32).reshape(-1, 2)
        found.append(np.concatenate([ids[:, None], offsets], axis=1))
    return found


def _pieces(text: str, encode: Callable[[str], np.ndarray]) -> Iterator[str]:
    """The text in pieces of about PIECE_CHARACTERS, cut before words where the tokenizer starts anew.

    A cut is taken only if the ids around it are the same with and without it; a tokenizer for which no
    cut is harmless (one that puts a space before every text) gets the text whole.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        cut = _harmless_cut(text, start + PIECE_CHARACTERS, encode)
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _harmless_cut(text: str, position: int, encode: Callable[[str], np.ndarray]) -> int | None:
    found = _WORD_START.finditer(text, position, position + PIECE_CHARACTERS)
    for match, _ in zip(found, range(CUT_TRIES)):
        cut = match.start()
        left, right = text[cut - CHECK_CHARACTERS : cut], text[cut : cut + CHECK_CHARACTERS]
        if np.array_equal(encode(left + right), np.concatenate([encode(left), encode(right)])):
            return cut
    return None
