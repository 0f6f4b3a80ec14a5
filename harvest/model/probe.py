"""Widths of arbitrary submodules, found by a forward without numbers: shapes alone are computed, no weight is read."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.hooks import RemovableHandle

Side = Literal["input", "output"]
PROBE = (3, 5)
"""Sequences and tokens of the probe: odd enough to be told from heads and widths."""


class _Enough(BaseException):
    """Ends the probe: everything asked for has been seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What a probe saw of the modules it was asked about."""

    shapes: Mapping[tuple[str, Side], tuple[int, ...] | None]
    """(Path, side) -> shape of the first tensor of floats there; None where there is none."""
    several: frozenset[tuple[str, Side]]
    """Points with more than one value of the first one's shape."""
    error: str | None
    """Why the forward ended before all modules had run, if it failed."""


def first_tensor(value: Any) -> Any:
    """What a module returns or receives: the tensor itself, or the first entry of a tuple or of a model's output."""
    while isinstance(value, tuple | list | Mapping) and len(value):
        value = next(iter(value.values())) if isinstance(value, Mapping) else value[0]
    return value


def received(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The first argument of a module's call, passed by position or by name."""
    return first_tensor(args or tuple(value for value in kwargs.values() if isinstance(value, torch.Tensor)))


def hooked(module: nn.Module, side: Side, see: Callable[[Any], None]) -> RemovableHandle:
    """`see` is handed what the module returns or is called with, each time that it runs, until the handle goes."""
    if side == "output":
        return module.register_forward_hook(lambda _module, _args, output: see(output))
    return module.register_forward_pre_hook(lambda _module, args, kwargs: see(received(args, kwargs)), with_kwargs=True)


def probe(runs: nn.Module, model: nn.Module, points: set[tuple[str, Side]]) -> Probed:
    """Shapes at points (path in `model`, side) during a forward of `runs`, a part of `model`, over tokens."""
    shapes: dict[tuple[str, Side], tuple[int, ...] | None] = {}
    several: set[tuple[str, Side]] = set()

    def see(point: tuple[str, Side], value: Any) -> None:
        tensor = first_tensor(value)
        is_row = isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        shapes.setdefault(point, tuple(tensor.shape) if is_row else None)
        if (
            is_row
            and isinstance(value, tuple)
            and [getattr(other, "shape", None) for other in value].count(tensor.shape) > 1
        ):
            several.add(point)
        if len(shapes) == len(points):
            raise _Enough

    error = None
    with contextlib.ExitStack() as stack:
        for point in points:
            handle = hooked(model.get_submodule(point[0]), point[1], functools.partial(see, point))
            stack.callback(handle.remove)
        try:
            _forward(runs)
        except _Enough:
            pass
        except Exception as failed:  # any failure of foreign code: the caller names it, beside what was not seen
            error = f"{type(failed).__name__}: {' '.join(str(failed).split())[:200]}"
    return Probed(shapes=shapes, several=frozenset(several), error=error)


def _forward(runs: nn.Module) -> None:
    with _quiet_torch(), _by_shape_alone(runs), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        state = {
            name: torch.empty(
                tensor.shape, dtype=torch.bfloat16 if tensor.is_floating_point() else tensor.dtype, device="cpu"
            )  # bfloat16: the shape rule of grouped matrix products knows no other; cpu: where code that names none is
            for name, tensor in _each_once(runs)
        }
        ids = torch.zeros(PROBE, dtype=torch.long, device="cpu")
        no_cache = {"use_cache": False} if "use_cache" in inspect.signature(runs.forward).parameters else {}
        torch.func.functional_call(runs, state, (), {"input_ids": ids, **no_cache}, tie_weights=False)


def _each_once(runs: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of every module by one name each.

    What is replaced twice, under both names of a module that two layers share, would be put back as the replacement.
    """
    for path, module in runs.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor


@contextlib.contextmanager
def _by_shape_alone(runs: nn.Module) -> Iterator[None]:
    """Modules that fetch their weights do not, and those with packed weights give zeros of the right shape."""
    replaced: list[tuple[nn.Module, Any]] = []

    def replace(module: nn.Module, forward: Any) -> None:
        replaced.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = forward

    for module in runs.modules():
        weight = module._parameters.get("weight")
        if weight is not None and not weight.is_floating_point() and hasattr(module, "out_features"):
            replace(module, functools.partial(_zeros, int(module.out_features)))  # type: ignore[arg-type]
        elif hasattr(module, "_old_forward"):  # where accelerate keeps the forward that it wraps
            replace(module, module._old_forward)
    try:
        yield
    finally:
        for module, forward in replaced:
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward


def _zeros(width: int, rows: torch.Tensor) -> torch.Tensor:
    return rows.new_zeros(*rows.shape[:-1], width)


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """A shape rule that fails logs its traceback; the caller gets the error."""
    import logging

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled
