"""The same examples at many names: their sums in a few calls for all names instead of a few for each, bit for bit.

A forward gives a direction some dozen rows at every layer; one by one it is the interpreter that takes the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from harvest.reduce.concepts import (
    PARALLEL,
    TINY,
    Concepts,
    ConceptState,
    block_state,
    of_groups,
    resolution_of,
    waiting_of,
)
from harvest.reduce.labels import UNKNOWN, A, B, Labels
from harvest.reduce.weighted import BLOCK_VALUES, NOTHING, WeightedRows, norms, weighted_stack

STACK_VALUES = 2**17
"""Values of a stack: its float64 copy (1 MiB) stays in one core's cache."""
_SUMS = Concepts()


def update_all(
    states: Mapping[str, ConceptState], rows: Mapping[str, torch.Tensor], labels: Labels, resolution: float = 0.0
) -> dict[str, ConceptState]:
    """Of every name what `Concepts.update` makes of its state and its rows [n, d], which lie on the CPU."""
    if not len(labels):
        return dict(states)
    found: dict[str, ConceptState] = {}
    for names in _stacks(rows):
        stack = {name: rows[name] for name in names}
        for name, state in zip(names, _states(stack, labels, resolution)):
            block = block_state(rows[name], labels, resolution) if state is None else state
            found[name] = _SUMS.merge(states[name], block)
    return {name: found[name] for name in states}


def _stacks(rows: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Names whose rows have one shape and dtype, as many as a stack takes."""
    alike: dict[tuple[torch.Size, torch.dtype], list[str]] = {}
    for name, block in rows.items():
        alike.setdefault((block.shape, block.dtype), []).append(name)
    for (shape, _), names in alike.items():
        step = max(1, STACK_VALUES // max(1, shape.numel()))
        for start in range(0, len(names), step):
            yield names[start : start + step]


def _states(rows: Mapping[str, torch.Tensor], labels: Labels, coarser: float) -> Sequence[ConceptState | None]:
    """Of each name what `block_state` makes of it; None where a look at its rows one by one is needed."""
    first = next(iter(rows.values()))
    if len(rows) == 1 or first.numel() > BLOCK_VALUES:  # more than block_state sums in one go
        return [None] * len(rows)
    x = torch.stack(list(rows.values())).to(torch.float64).numpy()
    good = np.ones(len(labels), bool) if labels.right is None else labels.right
    group, weight, pair = labels.group, labels.weight, labels.pair
    if pair is None:
        complete, a, b = np.zeros(0, bool), np.flatnonzero(good & (group == A)), np.flatnonzero(good & (group == B))
        ina, inb = a[:0], b[:0]
    else:
        complete = good[labels.a] & good[labels.b]
        a, b = ina, inb = labels.a[complete], labels.b[complete]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # rows that are not finite give no state
        usable = np.isfinite(np.einsum("kij->ki", x)).all(axis=1)
        resolution = resolution_of(first.dtype, coarser)
        # take and no indexing, whose result may lie in memory in another order: that would show in the bits
        of_a, of_b = x.take(a, axis=1), x.take(b, axis=1)
        first_of, second_of = (of_a, of_b) if pair is not None else (of_a[:, :0], of_b[:, :0])
        rest, alright, parallel = _rejections(first_of, second_of, (weight[ina] + weight[inb]) / 2, resolution)
        sums_a, sums_b = _sums(of_a, weight[a]), _sums(of_b, weight[b])
    alike = ConceptState(
        wrong=of_groups(~good, group),
        unknown=int((group == UNKNOWN).sum()),
        dropped=int((~complete).sum()),
        resolution=resolution,
        done=frozenset() if pair is None else frozenset(pair[row] for row in labels.a.tolist()),
    )
    return [
        replace(
            alike,
            a=sums_a[k],
            b=sums_b[k],
            rest=rest[k],
            parallel=int(parallel[k]),
            waiting=waiting_of(block, labels, good),
        )
        if usable[k] and alright[k]
        else None
        for k, block in enumerate(rows.values())
    ]


def _sums(x: np.ndarray, weight: np.ndarray) -> list[WeightedRows]:
    return weighted_stack(x, weight) if x.shape[1] else [NOTHING] * len(x)


def _rejections(
    x: np.ndarray, y: np.ndarray, weight: np.ndarray, resolution: float
) -> tuple[list[WeightedRows], np.ndarray, np.ndarray]:
    """At each of k names: sums of a - (a.b / b.b) b over the pairs a in x, b in y [k, n, d], whether none of them is
    degenerate, and how many are parallel."""
    length, partner = norms(x), norms(y)
    unit = y / partner[..., None]
    rest = x - np.einsum("kij,kij->ki", x, unit)[..., None] * unit
    alright: np.ndarray = np.all(partner > TINY * length, axis=1)
    parallel: np.ndarray = np.sum(norms(rest) <= PARALLEL * resolution * length, axis=1)
    return _sums(rest, weight), alright, parallel
