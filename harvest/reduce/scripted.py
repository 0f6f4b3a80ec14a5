"""Loops over small tensors that leave the interpreter's lock alone, so that several names are reduced side by side."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

_compiling = threading.Lock()


def scripted(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function as TorchScript, which takes the interpreter's lock once a call; on a CPU, for blocks that fit its
    cache take microseconds, and threads that pass the lock on after each of them are slower than one alone.

    The bits are those of the function itself, which stands in on other devices (there operations are large, and
    TorchScript might fuse them) and where TorchScript is no more (Python 3.14 and later).
    """
    if device.type != "cpu" or sys.version_info >= (3, 14):
        return function
    with _compiling:
        return _compile(function)


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled: Callable[..., Any] = torch.jit.script(function)
    return compiled
