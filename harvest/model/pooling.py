"""One vector for several tokens of a sequence, summed at no less than float32: many half-precision rows do not fit one.

Legend: n spans, d width of a row.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from harvest.errors import RequestError

MODES = ("mean", "last")


def span_pool(hidden: torch.Tensor, spans: Sequence[tuple[int, int]], mode: str = "mean") -> torch.Tensor:
    """[n, d] of `hidden` [seq, d]: the mean of the rows of each span, or its last row; [0, d] without spans.

    Spans are half-open and may overlap. The result is float32, or float64 where `hidden` is; means are summed in
    float64 where the device has it. Gradients flow through. Raises RequestError for a `hidden` that is no [seq, d] of
    floats, an unknown mode and a span that is empty or leaves the sequence: a row beyond the end has no value.
    """
    if mode not in MODES:
        raise RequestError(f"mode = {mode!r}: allowed are {', '.join(map(repr, MODES))}")
    if hidden.dim() != 2 or not hidden.is_floating_point():
        raise RequestError(f"hidden: {hidden.dtype} of shape {tuple(hidden.shape)}; allowed is [seq, d] of floats")
    checked = [_span(span, len(hidden)) for span in spans]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if not checked:
        return hidden.new_empty((0, hidden.shape[1]), dtype=wide)
    if mode == "last":
        return hidden[[stop - 1 for _, stop in checked]].to(wide)
    summed = wide if hidden.device.type == "mps" else torch.float64  # MPS has no float64
    return torch.stack([hidden[start:stop].mean(0, dtype=summed) for start, stop in checked]).to(wide)


def _span(span: Any, length: int) -> tuple[int, int]:
    start, stop = checked_span(span, length, "span")
    if start == stop:
        raise RequestError(f"span = {(start, stop)}: it is empty; allowed are spans of at least one token")
    return start, stop


def checked_span(span: Any, length: int, what: str) -> tuple[int, int]:
    """(start, stop) as plain ints with 0 <= start <= stop <= length; RequestError naming `what` for anything else."""
    try:
        start, stop = map(operator.index, span)
    except (TypeError, ValueError):
        raise RequestError(f"{what} = {span!r}: allowed is (start, stop), two whole numbers") from None
    if not 0 <= start <= stop <= length:
        raise RequestError(
            f"{what} = {(start, stop)}: the sequence has {length} tokens; allowed are 0 <= start <= stop <= {length}"
        )
    return start, stop
