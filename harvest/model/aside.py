"""Rows on their way from an accelerator to the host, beside the forward that goes on."""

from __future__ import annotations

import numpy as np
import torch

from harvest.records import Batch

FEW_ROWS_PER_SPAN = 8
"""Below this mean length of a run, one copy and a scatter on the host are cheaper than a copy per run."""


def sent(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on the device. To CUDA from page-locked memory: from any other the host would wait for the device."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class SideCopies:
    """Copies from one CUDA device on a stream of their own: the modules that follow do not wait for the bus.

    What a module gave may be written over by the next one, so the kept rows are gathered at once, on the forward's own
    stream, into memory that nobody else writes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._to_scatter: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """(Where to, int64 rows there, what), once it has arrived."""

    def copy(self, flat: torch.Tensor, batch: Batch, source: torch.Tensor, into: torch.Tensor) -> None:
        """Starts to copy rows `source` (`batch.source`, on the device) of `flat` [B * T, d] to their rows of `into`
        [rows, d], which is page-locked, in its dtype."""
        taken = flat.index_select(0, source).to(into.dtype)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if len(taken) < FEW_ROWS_PER_SPAN * len(batch.spans):
                arrived = torch.empty(taken.shape, dtype=taken.dtype, pin_memory=into.is_pinned())
                arrived.copy_(taken, non_blocking=True)
                self._to_scatter.append((into, torch.from_numpy(batch.rows), arrived))
            else:
                at = 0
                for _, row, count in batch.spans:
                    into[row : row + count].copy_(taken[at : at + count], non_blocking=True)
                    at += count
        taken.record_stream(self._stream)  # its memory is not given to others before it has been read

    def wait(self) -> None:
        """Returns once everything has arrived."""
        self._stream.synchronize()
        for into, rows, arrived in self._to_scatter:
            into.index_copy_(0, rows, arrived)
        self._to_scatter.clear()
