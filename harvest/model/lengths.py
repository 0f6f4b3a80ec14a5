"""Lengths beyond which a model computes every token otherwise: sequences of both sides must not share a forward.

Rotary positions of two kinds look at the longest sequence of a forward and then turn all of them: `longrope` has one
set of frequencies up to the length of its training and another beyond, `dynamic` has one for every length beyond.
Those of the second kind are kept for the forwards that follow, so what a model computed before counts as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

Growing = tuple[nn.Module, str]
"""A module with `dynamic` frequencies, and what the names of its attributes begin with."""


def switches(config: Any, longest: int) -> Sequence[int]:
    """Lengths below `longest`, rising, each the last one of its side; `config` is that of the text model."""
    found: set[int] = set()
    for rope in _ropes(config):
        kind = rope.get("rope_type") or rope.get("type")
        if kind == "longrope":
            found.add(int(rope["original_max_position_embeddings"]))
        elif kind == "dynamic":
            found.update(range(int(config.max_position_embeddings), longest))
    return tuple(sorted(length for length in found if length < longest))


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """The rotary parameters of a config: one set, or one for each kind of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    yield from [given] if "rope_type" in given else [part for part in given.values() if isinstance(part, Mapping)]


def growing(runs: nn.Module) -> list[Growing]:
    """The `dynamic` frequencies of a model, which a long sequence lets grow for those after it."""
    found: list[Growing] = []
    for module in runs.modules():
        kinds = getattr(module, "rope_type", None)
        of_layers = kinds if isinstance(kinds, Mapping) else {"": kinds}
        for layers, kind in of_layers.items():
            prefix = f"{layers}_" if layers else ""
            if isinstance(kind, str) and "dynamic" in kind and hasattr(module, f"{prefix}original_inv_freq"):
                found.append((module, prefix))
    return found


@contextlib.contextmanager
def ungrown(found: Sequence[Growing]) -> Iterator[None]:
    """For one forward: its own sequences alone let these frequencies grow; then they are as they were before."""
    before = []
    for module, prefix in found:
        frequencies, longest = f"{prefix}inv_freq", f"{prefix}max_seq_len_cached"
        grown, original = getattr(module, frequencies), getattr(module, f"{prefix}original_inv_freq")
        before.append((module, {frequencies: grown, longest: getattr(module, longest, module.max_seq_len_cached)}))
        setattr(module, frequencies, original.to(grown.device))
        setattr(module, longest, module.original_max_seq_len)
    try:
        yield
    finally:
        for module, attributes in before:
            for name, value in attributes.items():
                setattr(module, name, value)
