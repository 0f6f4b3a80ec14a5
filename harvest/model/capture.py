"""Runs batches through a model and copies what its modules computed straight to where it is kept.

Hooks sit on the modules themselves, never on `output_hidden_states` (whose last entry is normed). The
forward stops as soon as the last wanted name has been seen, so later blocks and the head never run.
Windows are padded on the right, where a causal model never looks: only the others get an attention mask.
Legend: B windows of a batch, T their padded length, d width of a name, n kept tokens.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch

from harvest.errors import DocumentError, WorkError
from harvest.model.architectures import architecture_of, needs_mask, unwrapped
from harvest.model.head import Head
from harvest.model.lengths import growing, ungrown
from harvest.model.modules import runs_of
from harvest.model.points import Name
from harvest.model.probe import first_tensor, received
from harvest.model.spread import fetching, input_device, put_away
from harvest.records import Batch

FEW_ROWS_PER_SPAN = 8
"""Below this mean length of a run, one gather is cheaper than a copy per run."""


class _Enough(BaseException):
    """Ends a forward from within: everything wanted has been seen. Not an error, so no handler should see it."""


class Capture:
    """The wanted names of one model, taken batch by batch; a context manager that leaves the model as found.

    Training mode is switched off inside and restored after; only our own hooks are removed.
    """

    def __init__(self, model: Any, names: Sequence[Name], answers: Sequence[int] = ()) -> None:
        """`answers`: tokens whose logits are asked for at some places."""
        self.names = tuple(names)
        self._head = Head(model, answers) if answers else None
        self._to_the_end = False
        self._model = model
        self._runs: Any = runs_of(model, names) if self._head is None else unwrapped(model)
        self._device, self._fetching = input_device(self._runs), fetching(self._runs)
        self._growing = growing(self._runs)
        self._copying: set[torch.device] = set()
        self.copy_seconds = 0.0
        """That went into copies on a CPU. An accelerator's run beside its forward, and count as part of it."""
        self._masked = needs_mask(model) and _takes(self._runs, "attention_mask")
        self._known = architecture_of(model) is not None
        self._arguments = {"use_cache": False} if _takes(self._runs, "use_cache") else {}
        self._handles: list[Any] = []
        self._training: list[torch.nn.Module] = []
        self._wanted: set[str] = set()
        self._calls: Counter[str] = Counter()
        self._batch: Batch | None = None
        self._into: Mapping[str, torch.Tensor] = {}

    def __enter__(self) -> Capture:
        self._training = [module for module in self._model.modules() if module.training]
        self._model.eval()
        try:
            for name in self.names:
                self._handles.append(self._register(unwrapped(self._model).get_submodule(name.module), name))
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
        self._to_the_end, output = source is not None, None
        self._batch, self._into, self._wanted = batch, into, {str(name) for name in self.names}
        self._calls.clear()
        input_ids = torch.from_numpy(batch.input_ids).to(self._device, non_blocking=True)
        try:
            # Not inference mode: what a model keeps for later (rotary tables that grew) must stay fit for training.
            only = contextlib.nullcontext() if self._head is None or source is None else self._head.at(source)
            with torch.no_grad(), ungrown(self._growing), only:
                output = self._runs(input_ids=input_ids, **self._apart(batch), **self._arguments)
        except _Enough:
            pass
        finally:
            put_away(self._fetching)
        if self._wanted:
            never = ", ".join(sorted(self._wanted))
            raise WorkError(f"modules that never ran: {never}; this model's forward goes without them: leave them out")
        return output

    def _apart(self, batch: Batch) -> dict[str, torch.Tensor]:
        """What keeps the windows of a batch from one another and from the padding.

        Of packed windows the positions alone: transformers makes the block-diagonal mask from them, but only where
        it is given no mask and keeps no cache.
        """
        if batch.position_ids is not None:
            return {"position_ids": torch.from_numpy(batch.position_ids).to(self._device, non_blocking=True)}
        length = batch.input_ids.shape[1]
        full = int(batch.lengths.min()) == length
        if not self._masked or (full and self._known):  # elsewhere a model without a mask may make one from the ids
            return {}
        real_BT = torch.arange(length)[None] < torch.from_numpy(batch.lengths)[:, None]
        return {"attention_mask": real_BT.long().to(self._device, non_blocking=True)}

    def wait(self) -> None:
        """Returns once every copy has arrived."""
        for device in self._copying:
            torch.cuda.current_stream(device).synchronize()
        self._copying.clear()

    def _register(self, module: torch.nn.Module, name: Name) -> Any:
        if name.reads == "output":
            return module.register_forward_hook(lambda _module, _args, output: self._take(name, output))
        return module.register_forward_pre_hook(
            lambda _module, args, kwargs: self._take(name, received(args, kwargs)), with_kwargs=True
        )

    def _take(self, name: Name, value: Any) -> None:
        key = str(name)
        if key not in self._wanted:  # a module that a block calls twice: the first time counts
            return
        self._calls[key] += 1
        if self._calls[key] <= name.earlier:
            return
        assert self._batch is not None
        hidden_BTd = first_tensor(value)
        if name.scale != 1.0:
            hidden_BTd = hidden_BTd * name.scale
        if hidden_BTd.is_cuda:  # one of several where a model is spread
            self._copying.add(hidden_BTd.device)
        begin = time.perf_counter()
        copy_rows(_one_row_per_token(hidden_BTd, self._batch, name), self._batch, self._into[key], key)
        if not hidden_BTd.is_cuda:
            self.copy_seconds += time.perf_counter() - begin
        self._wanted.discard(key)
        if not self._wanted and not self._to_the_end:
            raise _Enough


def _takes(module: torch.nn.Module, argument: str) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.name == argument or parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)


def _one_row_per_token(hidden: torch.Tensor, batch: Batch, name: Name) -> torch.Tensor:
    """[B * T, d] of what a module gave as [B, T, ...] or, as in a mixture of experts, as [B * T, ...]."""
    tokens = batch.input_ids.size
    if tuple(hidden.shape[:2]) == batch.input_ids.shape or hidden.shape[0] == tokens:
        flat = hidden.reshape(tokens, -1)
        if flat.shape[1] == name.width:
            return flat
    raise WorkError(
        f"{name}: the module gave {tuple(hidden.shape)} for {batch.input_ids.shape} tokens; "
        f"expected is one vector of {name.width} values per token"
    )


def copy_rows(flat: torch.Tensor, batch: Batch, into: torch.Tensor, name: str) -> None:
    """Copies the kept tokens of a batch [B * T, d] to their rows of `into` [rows, d], converting to its dtype."""
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
        document = int(batch.documents[first])
        value = float(kept[first].abs().nan_to_num(posinf=0.0).max())
        dtype = str(stored).removeprefix("torch.")
        raise DocumentError(
            document, f"{name} holds {value:.6g}, which store.dtype = {dtype!r} cannot (at most {limit:.6g})"
        )
