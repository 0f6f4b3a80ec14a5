"""Hooks at named points of a model for the time of a few forwards; the model is left as it was found, errors or not."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from harvest.errors import WorkError
from harvest.model.architectures import unwrapped
from harvest.model.lengths import growing, ungrown
from harvest.model.modules import runs_of
from harvest.model.points import Name
from harvest.model.probe import first_tensor, hooked
from harvest.model.spread import fetching, put_away


class _Enough(BaseException):
    """Ends a forward from within: everything wanted has been seen. Not an error, so no handler should see it."""


class Watch:
    """A context manager in which `run` hands what the model computes at each of `names` to `take(name, tensor)`.

    Training mode is off inside and restored module by module; only our own hooks are removed. They are the last on
    their modules, so that what other hooks make of an output is what is taken.
    """

    def __init__(
        self, model: Any, names: Sequence[Name], take: Callable[[Name, torch.Tensor], None], runs: Any = None
    ) -> None:
        """`runs`: the part of the model that is called, by default the smallest that has all of `names`."""
        self.runs: Any = runs_of(model, names) if runs is None else runs
        self._fetching, self._growing = fetching(self.runs), growing(self.runs)
        self._model, self._names, self._take = model, tuple(names), take
        self._handles: list[RemovableHandle] = []
        self._training: list[nn.Module] = []
        self._wanted: set[str] = set()
        self._calls: Counter[str] = Counter()
        self._to_the_end = False

    def __enter__(self) -> Watch:
        self._training = [module for module in self._model.modules() if module.training]
        try:
            for module in self._training:
                module.training = False
            for name in self._names:
                module = unwrapped(self._model).get_submodule(name.module)
                self._handles.append(hooked(module, name.reads, functools.partial(self._see, name)))
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

    def run(self, inputs: Mapping[str, Any], *, to_the_end: bool = False) -> Any:
        """One forward without gradients; it ends as soon as every name has been seen, or goes on `to_the_end`.

        Returns what the model gave, None where it ended early. Raises WorkError for a name that never was seen.
        """
        self._wanted, self._to_the_end, output = {str(name) for name in self._names}, to_the_end, None
        self._calls.clear()
        try:
            # Not inference mode: what a model keeps for later (rotary tables that grew) must stay fit for training.
            with contextlib.suppress(_Enough), torch.no_grad(), ungrown(self._growing):
                output = self.runs(**inputs)
        finally:
            put_away(self._fetching)
        if self._wanted:
            never = ", ".join(sorted(self._wanted))
            raise WorkError(f"modules that never ran: {never}; this model's forward goes without them: leave them out")
        return output

    def _see(self, name: Name, value: Any) -> None:
        if str(name) not in self._wanted:  # a module that a block calls twice: the first time counts
            return
        self._calls[str(name)] += 1
        if self._calls[str(name)] <= name.earlier:
            return
        tensor = first_tensor(value)
        self._take(name, tensor if name.scale == 1.0 else tensor * name.scale)
        self._wanted.discard(str(name))
        if not self._wanted and not self._to_the_end:
            raise _Enough


def takes(module: nn.Module, argument: str, *, catch_all: bool = False) -> bool:
    """Whether the forward of a module names this argument, or has a `catch_all`, which may ignore it."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(one.name == argument or (catch_all and one.kind == one.VAR_KEYWORD) for one in parameters)


def one_row_per_token(computed: torch.Tensor, shape: tuple[int, ...], name: Name) -> torch.Tensor:
    """[B, T, d] of what a module gave as [B, T, ...] or, as in a mixture of experts, as [B * T, ...]; `shape`: (B, T).

    Raises WorkError for anything else.
    """
    tokens = math.prod(shape)
    if (tuple(computed.shape[:2]) == shape or len(computed) == tokens) and computed.numel() == tokens * name.width:
        return computed.reshape(*shape, name.width)
    raise WorkError(
        f"{name}: the module gave {tuple(computed.shape)} for {shape} tokens; "
        f"expected is one vector of {name.width} values per token"
    )
