"""Where captured tensors are kept: `offload`, checked before any work, and copies that own just what they show."""

from __future__ import annotations

from typing import Any

import torch

from harvest.errors import RequestError


def checked_offload(offload: Any, what: str) -> str:
    """`none`, or the name of a device as torch spells it; RequestError for anything else."""
    if isinstance(offload, str) and offload == "none":
        return offload
    try:
        device = torch.device(offload)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type == "meta" or isinstance(offload, int):  # an int would be a CUDA device to torch
        raise RequestError(f"{what} = {offload!r}: allowed are 'cpu', 'none' (left where it was computed) or a device")
    return str(device)


def place_of(offload: str, what: str) -> torch.device | None:
    """The device of a checked `offload`, None for `none`; RequestError for one that this machine does not have."""
    if offload == "none":
        return None
    device = torch.device(offload)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):  # AssertionError: torch built without CUDA
        raise RequestError(f"{what} = {offload!r}: this machine has no such device; allowed is 'cpu'") from None
    return device


def own_copy(tensor: torch.Tensor, place: torch.device | None) -> torch.Tensor:
    """An ordinary copy: contiguous, in memory of its own, free of inference mode and of gradients."""
    with torch.inference_mode(False), torch.no_grad():
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device if place is None else place)
        return copy.copy_(tensor)


def is_own(tensor: torch.Tensor, place: torch.device | None) -> bool:
    """Whether a tensor is already what `own_copy` would make of it."""
    return (
        (place is None or torch.empty(0, device=place).device == tensor.device)  # "cuda" is the current one, cuda:0
        and not tensor.is_inference()
        and not tensor.requires_grad
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


def in_words(tensor: torch.Tensor) -> str:
    """`float32 [10, 576]`, and where it is unless in the machine's memory: its values would fill a page."""
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{where}"
