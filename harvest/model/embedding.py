"""Rows of a model's embedding tables, as the weights hold them: what stands for a token before and behind all blocks.

A row of the input embedding is not always what enters block 0: Gemma multiplies it by the root of the width, other
models add positions or project it. Rows of tied tables are the same at both ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from harvest.errors import RequestError
from harvest.model.architectures import input_embedding, unwrapped
from harvest.model.spread import weight_of
from harvest.settings.direction import DirectionSettings


def embedding_of(model: Any, which: str, asked: str) -> nn.Module:
    """The module whose `weight` [tokens, width] is the `input` or `output` embedding; works on a skeleton.

    Raises RequestError, beginning with `asked`, for a model without one, or one whose table is no plain weight.
    """
    inner: Any = unwrapped(model)
    module = input_embedding(inner) if which == "input" else inner.get_output_embeddings()
    if module is None:
        others = "input" if which == "output" else "output"
        raise RequestError(f"{asked}: {inner.config.model_type!r} has no {which} embedding; allowed is {others!r}")
    weight = getattr(module, "weight", None)
    if hasattr(module, "base_layer") or hasattr(module, "modules_to_save"):
        raise RequestError(f"{asked}: the adapter changes the {which} embedding; allowed are tables as they are")
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        raise RequestError(f"{asked}: the {which} embedding is no plain table of numbers; allowed are models with one")
    return module


def table_sizes(model: Any, directions: Sequence[DirectionSettings]) -> dict[str, int]:
    """Direction between tokens -> rows of the table that it takes; RequestError as `embedding_of`."""
    found = {}
    for direction in directions:
        if direction.embedding is not None:
            module = embedding_of(model, direction.embedding, f"direction {direction.name!r}")
            found[direction.name] = len(module.weight)  # type: ignore[arg-type]  # a tensor, as embedding_of has seen
    return found


def embedding_rows(model: Any, which: str, ids: Sequence[int], asked: str) -> torch.Tensor:
    """float32 [n, width]: the rows of these tokens, on the CPU, unscaled and exact from every smaller dtype."""
    module = embedding_of(model, which, asked)
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    if weight.is_meta:
        inner = unwrapped(model)
        path = next(path for path, found in inner.named_modules(remove_duplicate=False) if found is module)
        weight = weight_of(inner, f"{path}.weight")
    return weight.detach()[list(ids)].to("cpu", torch.float32)
