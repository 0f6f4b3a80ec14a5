"""Hooks at named points of a model for the time of a few forwards; the model is left as it was found, errors or not."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from harvest.errors import WorkError
from harvest.model.architectures import unwrapped
from harvest.model.lengths import growing, ungrown
from harvest.model.modules import runs_of
from harvest.model.points import Name
from harvest.model.probe import first_tensor, received
from harvest.model.spread import fetching, put_away


class _Enough(BaseException):
    """Ends a forward from within: everything wanted has been seen. Not an error, so no handler should see it."""


class Watch:
    """A context manager in which `run` hands what the model computes at each of `names` to `take(name, tensor)`.

    Training mode is off inside and restored module by module; only our own hooks are removed. They are the last on
    their modules, so that what other hooks make of an output is what is taken.
    """

    def __init__(self, model: Any, names: Sequence[Name], take: Callable[[Name, torch.Tensor], None]) -> None:
        self.runs: nn.Module = runs_of(model, names)
        self._fetching, self._growing = fetching(self.runs), growing(self.runs)
        self._model, self._names, self._take = model, tuple(names), take
        self._handles: list[Any] = []
        self._training: list[nn.Module] = []
        self._wanted: set[str] = set()
        self._calls: Counter[str] = Counter()

    def __enter__(self) -> Watch:
        self._training = [module for module in self._model.modules() if module.training]
        try:
            for module in self._training:
                module.training = False
            for name in self._names:
                self._handles.append(self._hook(unwrapped(self._model).get_submodule(name.module), name))
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

    def run(self, **inputs: torch.Tensor) -> None:
        """One forward, which ends as soon as every name has been seen; WorkError if one never was."""
        self._wanted = {str(name) for name in self._names}
        self._calls.clear()
        try:
            with contextlib.suppress(_Enough), ungrown(self._growing):
                self.runs(**inputs, **({"use_cache": False} if takes(self.runs, "use_cache") else {}))
        finally:
            put_away(self._fetching)
        if self._wanted:
            never = ", ".join(sorted(self._wanted))
            raise WorkError(f"modules that never ran: {never}; this model's forward goes without them: leave them out")

    def _hook(self, module: nn.Module, name: Name) -> Any:
        if name.reads == "output":
            return module.register_forward_hook(lambda _module, _args, output: self._see(name, output))
        return module.register_forward_pre_hook(
            lambda _module, args, kwargs: self._see(name, received(args, kwargs)), with_kwargs=True
        )

    def _see(self, name: Name, value: Any) -> None:
        if str(name) not in self._wanted:  # a module that a block calls twice: the first time counts
            return
        self._calls[str(name)] += 1
        if self._calls[str(name)] <= name.earlier:
            return
        tensor = first_tensor(value)
        self._take(name, tensor if name.scale == 1.0 else tensor * name.scale)
        self._wanted.discard(str(name))
        if not self._wanted:
            raise _Enough


def takes(module: nn.Module, argument: str) -> bool:
    """Whether the forward of a module names this argument; a catch-all does not count, for it may ignore it."""
    return argument in inspect.signature(module.forward).parameters
