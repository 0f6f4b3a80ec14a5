"""Finding a text in the token table: tokens are spelled out in bytes, one shard at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harvest.errors import HarvestError, RequestError
from harvest.reading.tokens import TokenRows
from harvest.settings.model import ModelSettings
from harvest.store.ledger import RunRecord
from harvest.text.pieces import SPECIAL, pieces_of

GIVE_TOKENS = "find(token=...) and tokens() go by ids"


def rows_of_text(tokens: TokenRows, text: str, pieces: Sequence[bytes], among: np.ndarray | None = None) -> np.ndarray:
    """Row numbers int64, rising, of the tokens that the text goes over, wherever it occurs within a document.

    `pieces`: token id -> its bytes; `among` int64, rising: only an occurrence that lies in these rows.
    """
    try:
        wanted = text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"find(text={text!r:.100}): half a surrogate pair is no text") from None
    keys = [key for key in ("document", "variant") if key in tokens.schema.names]
    found = [np.zeros(0, np.int64)]
    for first, table in tokens.parts([*keys, "position", "token"]):
        ids = table.column("token").to_numpy()
        goes_on = np.diff(table.column("position").to_numpy()) == 1
        for key in keys:
            goes_on &= np.diff(table.column(key).to_numpy()) == 0
        spelled = [pieces[i] if 0 <= i < len(pieces) else SPECIAL for i in ids.tolist()]
        for token in (np.flatnonzero(~goes_on) + 1).tolist():  # no occurrence goes over what is no byte of a text
            spelled[token] = SPECIAL + spelled[token]
        ends = np.cumsum([len(piece) for piece in spelled])
        found.append(_covered(b"".join(spelled), wanted, ends) + first)
    rows = np.concatenate(found)
    return rows if among is None else np.intersect1d(rows, among)


def _covered(whole: bytes, wanted: bytes, ends: np.ndarray) -> np.ndarray:
    """int64 [m], rising: the tokens that an occurrence goes over; `ends` int64 [n] of the tokens in `whole`."""
    starts, stops = _occurrences(whole, wanted)
    change = np.zeros(len(ends) + 1, np.int64)
    np.add.at(change, np.searchsorted(ends, starts, side="right"), 1)
    np.add.at(change, np.searchsorted(ends, stops - 1, side="right") + 1, -1)
    return np.flatnonzero(np.cumsum(change[:-1]))


def _occurrences(whole: bytes, wanted: bytes) -> tuple[np.ndarray, np.ndarray]:
    """int64 [k] where occurrences begin and end; those that go on into one another at every period are one.

    In "aaaa" every "aaa" overlaps the next. What overlaps the last one of such a range does so by less than half of
    what is wanted, so the searches together take time in proportion to `whole`.
    """
    period, length = _period(wanted), len(wanted)
    breaks = None
    starts, stops = [], []
    at = whole.find(wanted)
    while at >= 0:
        last = at
        if 2 * period <= length:
            if breaks is None:
                data = np.frombuffer(whole, np.uint8)
                breaks = np.flatnonzero(data[period:] != data[:-period])
            # The first byte beyond the occurrence that is not the one a period before it.
            after = int(np.searchsorted(breaks, at + length - period))
            end = int(breaks[after]) + period if after < len(breaks) else len(whole)
            last += (end - at - length) // period * period
        starts.append(at)
        stops.append(last + length)
        at = whole.find(wanted, last + 1)
    return np.array(starts, np.int64), np.array(stops, np.int64)


def _period(wanted: bytes) -> int:
    """The least shift at which the bytes lie over themselves."""
    borders, border = [0], 0  # of each beginning: the longest proper part that it begins and ends with
    for byte in wanted[1:]:
        while border and byte != wanted[border]:
            border = borders[border - 1]
        border += byte == wanted[border]
        borders.append(border)
    return len(wanted) - borders[-1]


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
        raise RequestError(f"tokens as text: the run's tokenizer cannot be loaded ({why}); {GIVE_TOKENS}") from None
    told = record.fingerprint.get("fingerprint.tokenizer")
    if tokenizer is None or (told is not None and of_tokenizer(tokenizer) != told):
        raise RequestError(
            f"tokens as text: {named or settings.name} has another tokenizer than the run; {GIVE_TOKENS}"
        )
    return pieces_of(tokenizer)
