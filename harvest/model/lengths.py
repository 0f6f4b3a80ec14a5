"""Lengths beyond which a model computes every token otherwise: sequences of both sides must not share a forward.

Rotary positions of two kinds look at the longest sequence of a forward and then turn all of them: `longrope` has one
set of frequencies up to the length of its training and another beyond, `dynamic` has one for every length beyond.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


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
