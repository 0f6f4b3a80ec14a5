"""What a model should say: the token that speaks for each answer, and which answer is right for a sequence.

An answer is told from the others by its first token, the one whose logit can be read off a single forward. It is
encoded as what goes on a text: without BOS, and without what a tokenizer puts before a text's first word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harvest.errors import RequestError
from harvest.settings.tables import DataSettings
from harvest.text.encode import Encoder
from harvest.text.examples import cell_text

BEFORE = ("\n", ":", ".")
"""What stands before an answer while it is encoded: the first behind which it begins with a token of its own."""


def answer_tokens(tokenizer: Any, answers: Mapping[str, str], *, literal: bool, size: int) -> dict[str, int]:
    """Group value -> id of its answer's first token. `literal`: as `tokens.special_in_text`; `size`: of the head.

    Raises RequestError for an answer that has no token of its own, and for two whose first tokens are one.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise RequestError("answers: need a fast tokenizer; the model has none, and tokens.tokenizer may name one")
    encoder, found = Encoder(tokenizer), dict[str, int]()
    said: dict[int, str] = {}
    for value, text in answers.items():
        token = _first_token(encoder, text, literal)
        if token is None or not 0 <= token < size:
            raise RequestError(
                f"answers.{value} = {text!r}: its first token cannot be told from what stands before it, or is beyond "
                f"the head's {size}; allowed are texts that begin a word, a line or a sign"
            )
        if said.setdefault(token, text) != text:
            shown = tokenizer.convert_ids_to_tokens([token])[0]
            raise RequestError(
                f"answers.{value} = {text!r}: begins with the token {shown!r} like {said[token]!r}, so that their "
                "logits are one; allowed are answers whose first tokens differ"
            )
        found[value] = token
    return found


def _first_token(encoder: Encoder, text: str, literal: bool) -> int | None:
    for before in BEFORE:
        (placed,) = encoder.encode_placed([before + text], add_special=False, literal=literal)
        behind = placed[placed[:, 2] > len(before)]
        if len(behind) and behind[0, 1] == len(before):
            return int(behind[0, 0])
    return None


class RightAnswers:
    """Which of the job's answers is right for a sequence."""

    def __init__(self, data: DataSettings, column: str | None, answers: Mapping[str, int]) -> None:
        """`column` says it, or without one the sequence itself; `answers`: value -> which of the answers."""
        self._contrast, self._column, self._answers = data.contrast or (), column, answers

    def __call__(self, values: Mapping[str, Any], variant: int) -> int:
        """The number of the answer; -1 for a value that has none."""
        value = self._contrast[variant] if self._column is None else values.get(self._column)
        return -1 if value is None else self._answers.get(cell_text(value), -1)
