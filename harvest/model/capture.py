"""Runs batches through a model and copies what its modules computed straight to where it is kept.

Hooks sit on the modules themselves, never on `output_hidden_states` (whose last entry is normed). The
forward stops as soon as the last wanted name has been seen, so later blocks and the head never run.
No attention mask is passed: windows are padded on the right, where a causal model never looks.
Legend: B windows of a batch, T their padded length, d width of a name, n kept tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from harvest.errors import DocumentError
from harvest.model.sites import Name, trunk_of
from harvest.records import Batch

FEW_ROWS_PER_SPAN = 8
"""Below this mean length of a run, one gather is cheaper than a copy per run."""


class _Enough(BaseException):
    """Ends a forward from within: everything wanted has been seen. Not an error, so no handler should see it."""


class Capture:
    """The wanted names of one model, taken batch by batch; a context manager that leaves the model as found.

    Training mode is switched off inside and restored after; only our own hooks are removed.
    """

    def __init__(self, model: Any, names: Sequence[Name]) -> None:
        self.names = tuple(names)
        self._model, self._trunk = model, trunk_of(model)
        self._device = next(self._trunk.parameters()).device
        self._handles: list[Any] = []
        self._training: list[torch.nn.Module] = []
        self._wanted: set[str] = set()
        self._batch: Batch | None = None
        self._into: Mapping[str, torch.Tensor] = {}

    def __enter__(self) -> Capture:
        self._training = [module for module in self._model.modules() if module.training]
        self._model.eval()
        try:
            for name in self.names:
                module = self._trunk.get_submodule(name.module)
                self._handles.append(module.register_forward_hook(self._hook(str(name))))
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._training:
            module.training = True
        self._training.clear()

    def __call__(self, batch: Batch, into: Mapping[str, torch.Tensor]) -> None:
        """One forward; the kept rows of every name are copied to their rows of `into[name]` [rows, d].

        The copies convert to the dtype of `into`; on an accelerator they may still be under way on return
        (see `wait`). Raises DocumentError for a finite value that the dtype cannot hold.
        """
        self._batch, self._into, self._wanted = batch, into, {str(name) for name in self.names}
        input_ids = torch.from_numpy(batch.input_ids).to(self._device, non_blocking=True)
        try:
            with torch.inference_mode():
                self._trunk(input_ids=input_ids, use_cache=False)
        except _Enough:
            pass
        assert not self._wanted, f"modules that never ran: {sorted(self._wanted)}"

    def wait(self) -> None:
        """Returns once every copy has arrived."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _hook(self, name: str) -> Any:
        def take(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            if name not in self._wanted:  # a module that a block calls twice: the first output counts
                return
            hidden_BTd = output[0] if isinstance(output, tuple) else output
            copy_rows(hidden_BTd, self._batch, self._into[name], name)
            self._wanted.discard(name)
            if not self._wanted:
                raise _Enough

        return take


def copy_rows(hidden_BTd: torch.Tensor, batch: Batch | None, into: torch.Tensor, name: str) -> None:
    """Copies the kept tokens of a batch to their rows of `into` [rows, d], converting to its dtype."""
    assert batch is not None
    flat = hidden_BTd.flatten(0, 1)
    if len(batch.source) < FEW_ROWS_PER_SPAN * len(batch.spans):
        source = torch.from_numpy(batch.source).to(flat.device)
        taken = flat.index_select(0, source).to(into.dtype)
        into.index_copy_(0, torch.from_numpy(batch.rows), taken.to(into.device))
    else:
        for source_row, row, count in batch.spans:
            into[row : row + count].copy_(flat[source_row : source_row + count], non_blocking=True)
    if _narrows(flat.dtype, into.dtype):
        _refuse_overflow(flat, batch, into.dtype, name)


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
        document = int(batch.documents[int(batch.source[first]) // batch.input_ids.shape[1]])
        value = float(kept[first].abs().nan_to_num(posinf=0.0).max())
        dtype = str(stored).removeprefix("torch.")
        raise DocumentError(
            document, f"{name} holds {value:.6g}, which store.dtype = {dtype!r} cannot (at most {limit:.6g})"
        )
