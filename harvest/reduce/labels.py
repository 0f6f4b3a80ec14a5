"""Which group, weight and pair each example has, checked once for all names; a row in doubt is refused, not guessed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harvest.errors import RequestError

A, B, UNKNOWN = 0, 1, -1
LETTERS = ("A", "B")
POLICIES = ("error", "count")


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Of n examples in dataset order; `make_labels` makes it."""

    group: np.ndarray
    """int8 [n]: 0 is A (positive), 1 is B (negative), -1 is neither."""
    weight: np.ndarray
    """float64 [n], finite and not negative."""
    pair: tuple[str, ...] | None
    """Key of each example's pair; None where nothing is paired."""
    right: np.ndarray | None
    """bool [n]: the others are left out, and what is paired with them, too; None where all are in."""
    a: np.ndarray
    """int64 [k]: the A of every pair that is complete here, by the first member's place."""
    b: np.ndarray
    """int64 [k]: its B."""
    alone: np.ndarray
    """int64 [m], rising: paired examples of A and B whose partner is not among these n."""

    def __len__(self) -> int:
        return len(self.group)


def make_labels(
    groups: Any,
    weights: Any = None,
    pairs: Any = None,
    *,
    rows: int,
    unknown: str = "error",
    right: np.ndarray | None = None,
) -> Labels:
    """Labels of `rows` examples out of lists, arrays or tensors.

    `groups` [n] ints, 0 for A and 1 for B; others are refused, or with `unknown = "count"` left out and counted.
    `weights` [n] numbers; `pairs` [n] texts or ints, compared as text; `right` bool [n]: those that are not are left
    out. Raises RequestError naming the row.
    """
    _check_choice("unknown", unknown, POLICIES)
    group = _groups(groups, rows, unknown)
    weight = _weights(weights, rows)
    if pairs is None:
        nothing = np.zeros(0, np.int64)
        return Labels(group=group, weight=weight, pair=None, right=right, a=nothing, b=nothing, alone=nothing)
    keys = _keys(pairs, group, rows)
    a, b, alone = _partners(group, keys)
    return Labels(group=group, weight=weight, pair=keys, right=right, a=a, b=b, alone=alone)


def join_labels(parts: Sequence[Labels]) -> Labels:
    """The labels of all parts behind one another, pairs across them included."""
    kinds = {part.pair is None for part in parts if len(part)}
    if len(kinds) > 1:
        raise RequestError("pairs: given for some of the examples only; allowed is for all or for none")
    pairs = None if kinds != {False} else [key for part in parts for key in part.pair or ()]
    group = np.concatenate([np.zeros(0, np.int8), *(part.group for part in parts)])
    weight = np.concatenate([np.zeros(0), *(part.weight for part in parts)])
    right = None
    if any(part.right is not None for part in parts):
        right = np.concatenate([np.ones(len(part), bool) if part.right is None else part.right for part in parts])
    return make_labels(group, weight, pairs, rows=len(group), unknown="count", right=right)


def order_pairs(groups: np.ndarray, before: tuple[int, int] = (0, 0)) -> tuple[str, ...]:
    """Pair keys by dataset order: the k-th of A and the k-th of B get key k; examples of neither get "".

    `groups` int [n] of consecutive examples; `before`: how many of A and of B the dataset holds before them.
    """
    count = list(before)
    keys = []
    for group in np.asarray(groups).tolist():
        if group not in (A, B):
            keys.append("")
            continue
        keys.append(str(count[group]))
        count[group] += 1
    return tuple(keys)


def as_rows(states: Any, dim: int | None = None) -> torch.Tensor:
    """States [n, ...] of any float dtype as a tensor [n, d] on the CPU, features flattened; lists become float64.

    Raises RequestError for another shape, another width than `dim`, or values that are no floats.
    """
    if isinstance(states, torch.Tensor):
        rows = states.detach().cpu()
    else:
        array = np.asarray(states, np.float64) if isinstance(states, list | tuple) else np.asarray(states)
        if not np.issubdtype(array.dtype, np.floating):
            raise RequestError(f"states: {array.dtype}; allowed are floating-point numbers")
        exact = array.dtype.newbyteorder("=") in (np.float16, np.float32, np.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the array cannot be written to: nobody will
            rows = torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=") if exact else np.float64))
    if not rows.is_floating_point():
        raise RequestError(f"states: {rows.dtype}; allowed are floating-point numbers")
    if rows.ndim == 1 and not len(rows) and dim is not None:
        return rows.reshape(0, dim)
    if rows.ndim < 2:
        raise RequestError(f"states: shape {tuple(rows.shape)}; allowed are [n, d] and [n, ...], one row per example")
    rows = rows.reshape(len(rows), int(np.prod(rows.shape[1:])))
    if dim is not None and rows.shape[1] != dim:
        raise RequestError(f"states: rows of {rows.shape[1]} values; allowed are {dim}")
    return rows


def _check_choice(setting: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise RequestError(f"{setting} = {value!r}: allowed are {', '.join(allowed)}")


def _flat(setting: str, values: Any, rows: int) -> np.ndarray:
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.shape != (rows,):
        raise RequestError(f"{setting}: shape {array.shape}; allowed is ({rows},), one for each row of states")
    return array


def _groups(groups: Any, rows: int, unknown: str) -> np.ndarray:
    array = _flat("groups", groups, rows)
    if rows and not np.issubdtype(array.dtype, np.integer):  # 0.9 would become A, and True would be B
        raise RequestError(f"groups: {array.dtype}; allowed are whole numbers, 0 for A and 1 for B")
    known = (array == A) | (array == B)
    if unknown == "error" and not known.all():
        row = int(np.flatnonzero(~known)[0])
        raise RequestError(f"groups: row {row} has {array[row]}; allowed are 0 for A and 1 for B, or unknown='count'")
    return np.where(known, array, UNKNOWN).astype(np.int8)


def _weights(weights: Any, rows: int) -> np.ndarray:
    if weights is None:
        return np.ones(rows)
    try:
        weight = _flat("weights", weights, rows).astype(np.float64)
    except (TypeError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"weights: {error}; allowed are finite numbers of at least 0") from None
    bad = np.flatnonzero(~(np.isfinite(weight) & (weight >= 0)))
    if len(bad):
        raise RequestError(f"weights: row {bad[0]} has {weight[bad[0]]}; allowed are finite numbers of at least 0")
    return weight


def _keys(pairs: Any, group: np.ndarray, rows: int) -> tuple[str, ...]:
    if isinstance(pairs, str):
        raise RequestError(f"pairs = {pairs!r}: allowed is one key for each row of states")
    given = pairs.tolist() if isinstance(pairs, torch.Tensor | np.ndarray) else list(pairs)
    if len(given) != rows:
        raise RequestError(f"pairs: {len(given)} keys; allowed are {rows}, one for each row of states")
    for row, key in enumerate(given):
        if group[row] != UNKNOWN and (isinstance(key, bool) or not isinstance(key, str | int | np.integer)):
            raise RequestError(f"pairs: row {row} has {key!r}; allowed are texts and whole numbers")
    return tuple(str(key) for key in given)


def _partners(group: np.ndarray, keys: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    found: dict[str, list[int]] = {}
    for row in np.flatnonzero(group != UNKNOWN).tolist():
        members = found.setdefault(keys[row], [])
        if any(group[other] == group[row] for other in members):
            raise twice(keys[row], int(group[row]))
        members.append(row)
    both = np.array([m for m in found.values() if len(m) == 2], np.int64).reshape(-1, 2)
    swapped = group[both[:, 0]] == B
    alone = np.array(sorted(m[0] for m in found.values() if len(m) == 1), np.int64)
    return np.where(swapped, both[:, 1], both[:, 0]), np.where(swapped, both[:, 0], both[:, 1]), alone


def twice(key: str, group: int) -> RequestError:
    """The error for a second example on one side of a pair."""
    return RequestError(f"pair {key!r}: two examples of group {LETTERS[group]}; a pair has one of each group")
