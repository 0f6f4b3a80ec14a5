"""Rows as people read them: what a token spells, and the stretch of its document around it, of what the store holds."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SPECIAL = b"\xff"
"""Of a token that spells no text, as harvest.text.pieces has it."""
GAP = "…"
"""Stands where tokens are not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """A row's token in its document; as text, `The film was[ long].`"""

    document: int
    position: int
    """Of the token, in its document."""
    before: str
    """What the stored tokens before it spell."""
    token: str
    """What it spells itself."""
    after: str
    """What the stored tokens after it spell."""

    def __str__(self) -> str:
        return f"{self.before}[{self.token}]{self.after}"


def quoted(document: int, positions: np.ndarray, ids: np.ndarray, pieces: Sequence[bytes], at: int) -> Quote:
    """The token at index `at` of some of a document's; positions int [n], rising, and ids int [n] of them all."""
    texts, gaps = _texts(positions, ids, pieces)
    return Quote(
        document=document,
        position=int(positions[at]),
        before="".join([*map(_after_gap, texts[:at], gaps), GAP if gaps[at] else ""]),
        token=texts[at],
        after="".join(map(_after_gap, texts[at + 1 :], gaps[at + 1 :])),
    )


def whole(positions: np.ndarray, ids: np.ndarray, pieces: Sequence[bytes]) -> str:
    """What a document's stored tokens spell; positions int [n], rising, and ids int [n]."""
    texts, gaps = _texts(positions, ids, pieces)
    return (GAP if len(positions) and positions[0] > 0 else "") + "".join(map(_after_gap, texts, gaps))


def _texts(positions: np.ndarray, ids: np.ndarray, pieces: Sequence[bytes]) -> tuple[list[str], list[bool]]:
    """The text of each token, and whether tokens before it are missing."""
    gaps = [False, *(np.diff(positions) != 1).tolist()][: len(positions)]
    return spelled(ids.tolist(), pieces, gaps), gaps


def _after_gap(text: str, gap: bool) -> str:
    return GAP + text if gap else text


def spelled(ids: Sequence[int], pieces: Sequence[bytes] | None, gaps: Sequence[bool] = ()) -> list[str]:
    """The text of each token; a letter that several tokens make together stands at its last one, and U+FFFD for what is
    there of one that is cut.

    A token that spells no text is its id, `⟨2⟩`. `pieces`: token id -> its bytes, None where they are not to be had;
    `gaps`: which tokens do not go on from the one before.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts: list[str] = []
    for at, token in enumerate(ids):
        piece = pieces[token] if pieces is not None and 0 <= token < len(pieces) else SPECIAL
        if texts and (piece == SPECIAL or (gaps and gaps[at])):
            texts[-1] += decoder.decode(b"", final=True)
        texts.append(f"⟨{token}⟩" if piece == SPECIAL else decoder.decode(piece))
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts
