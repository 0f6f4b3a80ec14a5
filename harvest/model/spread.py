"""Models that accelerate has spread over devices, memory and disk: where a forward begins, and what it must leave.

accelerate wraps the forward of every module whose weights are elsewhere: they are fetched before it and put away
after it. Nothing of accelerate is imported here; a model that it has not touched has no such wrappers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from harvest.errors import RequestError


def input_device(runs: nn.Module) -> torch.device:
    """Where the ids of a forward go: to the first weights, or to where these are fetched when they are needed."""
    device = next(runs.parameters()).device
    if device.type != "meta":
        return device
    fetched = (hook.execution_device for module in runs.modules() for hook in _hooks(module))
    return torch.device(next((device for device in fetched if device is not None), "cpu"))


def fetching(runs: nn.Module) -> list[nn.Module]:
    """The modules that fetch weights for the time of their forward."""
    return [module for module in runs.modules() if any(hook.offload for hook in _hooks(module))]


def put_away(modules: Sequence[nn.Module]) -> None:
    """Ends the forward of those of `fetching` whose forward was ended from within, so that they hold no weights."""
    for module in modules:
        for hook in _hooks(module):
            held = module.parameters(recurse=hook.place_submodules)
            if hook.offload and any(parameter.device.type != "meta" for parameter in held):
                hook.post_forward(module, None)


def weight_of(model: nn.Module, name: str) -> torch.Tensor:
    """The value of an entry of the model's `state_dict()` that is put away, and so is on the meta device there."""
    path, _, rest = name.rpartition(".")
    while True:
        for hook in _hooks(model.get_submodule(path)):
            if hook.weights_map is not None and rest in hook.weights_map:
                value: torch.Tensor = hook.weights_map[rest]
                return value
        if not path:
            raise RequestError(f"model: {name} is on the meta device, and nothing tells its values")
        path, _, above = path.rpartition(".")
        rest = f"{above}.{rest}"


def _hooks(module: nn.Module) -> Iterator[Any]:
    """accelerate's hooks on a module that place weights and inputs."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        if hasattr(one, "execution_device") and hasattr(one, "offload"):
            yield one
