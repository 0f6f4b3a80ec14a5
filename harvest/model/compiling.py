"""`model.compile`: every block as torch compiles it, once for all shapes, with the sites at the blocks' borders.

The forward of each block is replaced and not the block, so hooks on blocks see what they always see. Modules inside are
melted into what the compiler makes of the block: a hook on one would be compiled along, or never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from harvest.errors import RequestError
from harvest.model.architectures import decoder_layers, unwrapped
from harvest.model.points import Name
from harvest.settings.model import ModelSettings

NOT_WITH = ("device_map", "quantization")
"""Settings that put code of their own into the forward of modules."""
SHAPES = 64
"""Kinds of input (one window, masked, ...) that a block is compiled for before torch would go on without compiling."""


def refuse_compiling(settings: ModelSettings, model: Any, names: Sequence[Name]) -> None:
    """Raises RequestError where `model.compile` cannot be had together with what else is asked for."""
    if not settings.compile:
        return
    for setting in NOT_WITH:
        if (given := getattr(settings, setting)) is not None:
            raise RequestError(f"model.compile = true: not together with model.{setting} = {given!r}; leave one out")
    inside = {module for block in decoder_layers(model) for module in block.modules() if module is not block}
    for name in names:
        if unwrapped(model).get_submodule(name.module) in inside:  # by whatever path: layers may share a block
            raise RequestError(
                f"model.compile = true: {name} lies inside of a block, which is compiled as a whole; allowed are "
                "residual, residual_pre and what lies outside of the blocks; or leave model.compile out"
            )


def compile_blocks(model: Any) -> None:
    """Compiles the forward of every block; each kind of input is compiled when it first comes.

    Raises RequestError where torch finds no compiler.
    """
    try:
        torch.compile(_two_more)(torch.ones(3, device=next(model.parameters()).device))
    except Exception as error:  # what it raises depends on the device and on what is missing
        if "InductorError" not in type(error).__name__ and "Compiler" not in type(error).__name__:
            raise
        cause = str(error).partition("\n")[0]
        raise RequestError(
            f"model.compile = true: torch cannot compile here ({cause}); install a C++ compiler such as g++, or leave "
            "model.compile out"
        ) from error
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
    for block in dict.fromkeys(decoder_layers(model)):  # layers may share one
        # All sizes dynamic: kernels for one shape would be made anew for each of the lengths that texts come in.
        block.forward = torch.compile(block.forward, dynamic=True)


def _two_more(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 2
