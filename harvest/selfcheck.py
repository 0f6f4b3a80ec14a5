"""Before a worker's first shard counts: a few of its own documents, batched and padded, against each of them alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from harvest.errors import MismatchError
from harvest.model.capture import Capture
from harvest.records import Batch, Window
from harvest.text.batch import Batching, sort_windows

WINDOWS = 4
TOKENS = 64
"""Of a window, at most: the check costs about a batch, and padding goes wrong at once or not at all."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Of an error relative to the name's typical row. Rounding of other batch shapes stays 10 to 100 times below; a
neighbour, a pad or a position out of place shows as 0.3 and more."""


def self_check(capture: Capture, windows: Sequence[Window], dtype: torch.dtype, batching: Batching) -> dict[str, float]:
    """Name -> largest error of a row, relative to its norm, or the name's median one where that is longer; {} without
    windows.

    `dtype` is the forward's, `batching` the job's. Raises MismatchError naming name and document where batching
    changes what is captured.
    """
    chosen = _chosen(windows)
    if not chosen:
        return {}
    (window,) = batching(chosen, tokens_per_batch=WINDOWS * TOKENS, rows_per_window=WINDOWS * TOKENS)
    together = _captured(capture, window.batches, window.rows, dtype)
    errors: dict[str, float] = {}
    for one in chosen:
        (alone,) = sort_windows([one], tokens_per_batch=TOKENS, rows_per_window=TOKENS, length_step=1)
        rows = slice(one.row, one.row + len(one.keep))
        for name, expected in _captured(capture, alone.batches, alone.rows, dtype).items():
            error = _error(together[name][rows], expected, together[name])
            errors[name] = max(errors.get(name, 0.0), error)
            if error > TOLERANCE[dtype]:
                raise MismatchError(
                    f"self-check: {name} of document {one.document} differs by {error:.2g} of a row's norm between "
                    f"a batch and the document alone (allowed is {TOLERANCE[dtype]:g}): what this model computes for "
                    "a document depends on its neighbours in the batch; with tokens.batch = 1 each runs alone"
                )
    return errors


def _chosen(windows: Sequence[Window]) -> list[Window]:
    """Pieces of a few windows from all over the shard, every position kept, rows renumbered.

    One is long and the others at most a third of it, none as long as the next if they can be: so padding takes part,
    and where windows are packed, several share a row. Each is from another part of its window, since documents often
    begin alike, and copies of one another may see each other unnoticed; a shard of few windows gives some twice.
    """
    picks = [windows[round(share * (len(windows) - 1))] for share in np.linspace(0, 1, WINDOWS)] if windows else []
    picks.sort(key=lambda window: -len(window.ids))
    chosen: list[Window] = []
    row = 0
    for number, pick in enumerate(picks):
        longest = TOKENS if number == 0 else max(1, len(chosen[0].ids) // 3 - 2 * (number - 1))
        start = number * len(pick.ids) // WINDOWS
        ids = pick.ids[start : start + longest]
        chosen.append(Window(ids=ids, keep=np.arange(len(ids), dtype=np.int32), row=row, document=pick.document))
        row += len(ids)
    return chosen


def _captured(capture: Capture, batches: Sequence[Batch], rows: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    into: dict[str, Any] = {str(name): torch.empty(rows, name.width, dtype=dtype) for name in capture.names}
    for batch in batches:
        capture(batch, into)
    capture.wait()
    return into


def _error(found: torch.Tensor, expected: torch.Tensor, rows: torch.Tensor) -> float:
    """Non-finite rows are left out: they are counted and reported by name elsewhere. Rows near zero are no measure, and
    a sink's row, many times as long as the rest, is one for itself alone."""
    norms = rows.double().norm(dim=1)
    typical = norms[norms != 0].nanmedian().nan_to_num(0.0).clamp_min(1e-30)
    own = expected.double().norm(dim=1)
    error = (found.double() - expected.double()).norm(dim=1) / torch.maximum(own, typical)
    finite = error[error.isfinite()]
    return float(finite.max()) if len(finite) else 0.0
