"""Runs batches through a model and copies what its modules computed straight to where it is kept.

Hooks sit on the modules themselves, never on `output_hidden_states` (whose last entry is normed). The
forward stops as soon as the last wanted name has been seen, so later blocks and the head never run.
Windows are padded on the right, where a causal model never looks: only the others get an attention mask.
Legend: B windows of a batch, T their padded length, d width of a name, n kept tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch

from harvest.errors import DocumentError
from harvest.model.architectures import architecture_of, needs_mask, unwrapped
from harvest.model.aside import FEW_ROWS_PER_SPAN, SideCopies, sent
from harvest.model.head import Head
from harvest.model.modules import runs_of
from harvest.model.points import Name
from harvest.model.spread import input_device
from harvest.model.watch import Watch, one_row_per_token, takes
from harvest.records import Batch


class Capture:
    """The wanted names of one model, taken batch by batch; a context manager that leaves the model as found.

    Training mode is switched off inside and restored after; only our own hooks are removed.
    """

    def __init__(self, model: Any, names: Sequence[Name], answers: Sequence[int] = ()) -> None:
        """`answers`: tokens whose logits are asked for at some places."""
        self.names = tuple(names)
        self._head = Head(model, answers) if answers else None
        runs: Any = runs_of(model, names) if self._head is None else unwrapped(model)
        self._watch = Watch(model, names, self._take, runs)
        self._device = input_device(runs)
        self._aside: dict[torch.device, SideCopies] = {}
        """By device: several where a model is spread over GPUs."""
        self._sources: dict[torch.device, torch.Tensor] = {}
        """The batch's kept tokens, on each of them."""
        self.copy_seconds = 0.0
        """That went into copies on a CPU. An accelerator's run beside its forward, and count as part of it."""
        self._masked = needs_mask(model) and takes(runs, "attention_mask", catch_all=True)
        self._known = architecture_of(model) is not None
        self._uncached = {"use_cache": False} if takes(runs, "use_cache", catch_all=True) else {}
        self._batch: Batch | None = None
        self._into: Mapping[str, torch.Tensor] = {}

    def __enter__(self) -> Capture:
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.__exit__(kind, error, trace)

    def __call__(
        self, batch: Batch, into: Mapping[str, torch.Tensor], places: np.ndarray | None = None
    ) -> np.ndarray | None:
        """One forward; the kept rows of every name are copied to their rows of `into[name]` [rows, d].

        The copies convert to the dtype of `into`; on an accelerator they may still be under way on return
        (see `wait`). Raises DocumentError for a finite value that the dtype cannot hold. `places` int64 [k]: of the
        kept tokens, those whose answers are asked for; their logits come back as float64 [k, answers]. Without any
        the forward ends as soon as the names have been seen; with very many it runs more than once.
        """
        if self._head is None or places is None or not len(places):
            self._forward(batch, into, None)
            return None
        parts = self._head.parts(batch.source[places])
        return np.concatenate([self._head.logits(self._forward(batch, into, part), len(part)) for part in parts])

    def _forward(self, batch: Batch, into: Mapping[str, torch.Tensor], source: np.ndarray | None) -> Any:
        """What the model gives where its head is asked at some places, int64 [k] of the batch's tokens; else None."""
        self._batch, self._into = batch, into
        self._sources.clear()
        inputs = {"input_ids": sent(batch.input_ids, self._device), **self._apart(batch), **self._uncached}
        if self._head is None or source is None:
            return self._watch.run(inputs)
        with self._head.at(source):
            return self._watch.run(inputs, to_the_end=True)

    def _apart(self, batch: Batch) -> dict[str, torch.Tensor]:
        """What keeps the windows of a batch from one another and from the padding.

        Of packed windows the positions alone: transformers makes the block-diagonal mask from them, but only where
        it is given no mask and keeps no cache.
        """
        if batch.position_ids is not None:
            return {"position_ids": sent(batch.position_ids, self._device)}
        length = batch.input_ids.shape[1]
        full = int(batch.lengths.min()) == length
        if not self._masked or (full and self._known):  # elsewhere a model without a mask may make one from the ids
            return {}
        real_BT = np.arange(length)[None] < batch.lengths[:, None]
        return {"attention_mask": sent(real_BT.astype(np.int64), self._device)}

    def wait(self) -> None:
        """Returns once every copy has arrived."""
        for copies in self._aside.values():
            copies.wait()

    def _take(self, name: Name, hidden: torch.Tensor) -> None:
        assert self._batch is not None
        begin = time.perf_counter()
        flat = one_row_per_token(hidden, self._batch.input_ids.shape, name).reshape(-1, name.width)
        into = self._into[str(name)]
        if _narrows(flat.dtype, into.dtype):
            _refuse_overflow(flat, self._batch, into.dtype, str(name))
        if flat.is_cuda:
            self._copy_aside(flat, self._batch, into)
            return
        copy_rows(flat, self._batch, into)
        self.copy_seconds += time.perf_counter() - begin

    def _copy_aside(self, flat: torch.Tensor, batch: Batch, into: torch.Tensor) -> None:
        device = flat.device
        if device not in self._aside:
            self._aside[device] = SideCopies(device)
        if device not in self._sources:
            self._sources[device] = sent(batch.source, device)
        self._aside[device].copy(flat, batch, self._sources[device], into)


def copy_rows(flat: torch.Tensor, batch: Batch, into: torch.Tensor) -> None:
    """Copies the kept tokens of a batch [B * T, d] to their rows of `into` [rows, d], converting to its dtype."""
    if len(batch.source) < FEW_ROWS_PER_SPAN * len(batch.spans):
        source = torch.from_numpy(batch.source).to(flat.device)
        taken = flat.index_select(0, source).to(into.dtype)
        into.index_copy_(0, torch.from_numpy(batch.rows), taken.to(into.device))
    else:
        for source_row, row, count in batch.spans:
            into[row : row + count].copy_(flat[source_row : source_row + count])


def _narrows(captured: torch.dtype, stored: torch.dtype) -> bool:
    return torch.finfo(captured).max > torch.finfo(stored).max


def _refuse_overflow(flat: torch.Tensor, batch: Batch, stored: torch.dtype, name: str) -> None:
    """A finite value that became infinite is an error, never an Inf in the store."""
    low, high = torch.aminmax(flat)
    limit = torch.finfo(stored).max
    if -limit <= float(low) and float(high) <= limit:  # false where NaN is about: then the rows are looked at
        return
    kept = flat.index_select(0, torch.from_numpy(batch.source).to(flat.device))
    lost = (kept.isfinite() & ~kept.to(stored).isfinite()).any(dim=1).nonzero()
    if len(lost):
        first = int(lost[0])
        document = int(batch.documents[first])
        value = float(kept[first].abs().nan_to_num(posinf=0.0).max())
        dtype = str(stored).removeprefix("torch.")
        raise DocumentError(
            document, f"{name} holds {value:.6g}, which store.dtype = {dtype!r} cannot (at most {limit:.6g})"
        )
