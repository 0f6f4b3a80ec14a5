"""Finding a text in the token table: tokens are spelled out in bytes, one shard at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harvest.errors import HarvestError, RequestError
from harvest.settings.model import ModelSettings
from harvest.store.ledger import RunRecord
from harvest.text.pieces import SPECIAL, pieces_of
from harvest.tokens import TokenRows

GIVE_TOKENS = "give token = an id, or filter tokens() by ids"


def rows_of_text(tokens: TokenRows, text: str, pieces: Sequence[bytes], among: np.ndarray | None = None) -> np.ndarray:
    """Row numbers int64, rising, of the tokens that the text goes over, wherever it occurs within a document.

    `pieces`: token id -> its bytes; `among` int64, rising: only an occurrence that lies in these rows.
    """
    wanted = text.encode()
    keys = [key for key in ("document", "variant") if key in tokens.schema.names]
    found = [np.zeros(0, np.int64)]
    for first, table in tokens.parts([*keys, "position", "token"]):
        ids = table.column("token").to_numpy()
        spelled = [pieces[i] if 0 <= i < len(pieces) else SPECIAL for i in ids.tolist()]
        ends = np.cumsum([len(piece) for piece in spelled])
        columns = [table.column(key).to_numpy() for key in keys]
        goes_on = np.diff(table.column("position").to_numpy()) == 1
        for column in columns:
            goes_on &= np.diff(column) == 0
        stretch = np.concatenate([[0], np.cumsum(~goes_on)])
        found.append(_occurrences(b"".join(spelled), wanted, ends, stretch) + first)
    rows = np.unique(np.concatenate(found))
    return rows if among is None else np.intersect1d(rows, among)


def _occurrences(whole: bytes, wanted: bytes, ends: np.ndarray, stretch: np.ndarray) -> np.ndarray:
    """int64 [m] tokens that an occurrence goes over; one that would go beyond a stretch is none."""
    tokens = [np.zeros(0, np.int64)]
    at = whole.find(wanted)
    while at >= 0:
        first = int(np.searchsorted(ends, at, side="right"))
        last = int(np.searchsorted(ends, at + len(wanted) - 1, side="right"))
        if stretch[first] == stretch[last]:
            tokens.append(np.arange(first, last + 1))
        at = whole.find(wanted, at + 1)
    return np.concatenate(tokens)


def pieces_of_run(record: RunRecord) -> list[bytes]:
    """Of the tokenizer that made a run. Raises RequestError where it is not to be had, or is another one by now."""
    from harvest.model.fingerprint import of_tokenizer  # loads transformers
    from harvest.model.load import load_tokenizer

    settings = ModelSettings.model_validate(record.job.get("model") or {"name": ""})
    named = record.job.get("tokens", {}).get("tokenizer")
    try:
        tokenizer = load_tokenizer(settings, named)
    except (HarvestError, OSError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise RequestError(f"find(text=...): the run's tokenizer cannot be loaded ({why}); {GIVE_TOKENS}") from None
    told = record.fingerprint.get("fingerprint.tokenizer")
    if tokenizer is None or (told is not None and of_tokenizer(tokenizer) != told):
        raise RequestError(
            f"find(text=...): {named or settings.name} has another tokenizer than the run; {GIVE_TOKENS}"
        )
    return pieces_of(tokenizer)
