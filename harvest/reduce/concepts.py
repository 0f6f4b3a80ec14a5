"""Sums that concept directions come from: weighted means of two groups, and of what is left of A along its partner B.

One state serves `mean_difference`, `single_group` and `paired_rejection`. A pair counts once both members are there,
whatever blocks they come in: until then a member waits in the state under its pair's key. A pair with a member that
cannot be used (a NaN, an infinity, a wrong answer) is left out whole. Nothing depends on arrival: merged in shard
order, the bits are the same for any number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from harvest.reduce.labels import UNKNOWN, A, B, Labels, twice
from harvest.reduce.weighted import NOTHING, WeightedRows, blocks, merge, norms, usable, weighted, weighted_block

TINY = float(np.finfo(np.float64).eps)
COARSEST = float(np.finfo(np.float32).eps)
"""Models compute about as finely even where they store less, so that no state counts as coarser."""
PARALLEL = 4.0
"""A is parallel to its partner when what is left of it is below so many rounding steps of its dtype."""
COUNTS = ("unknown", "dropped", "degenerate", "parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One member of a pair whose partner has not been seen."""

    group: int
    weight: float
    row: np.ndarray | None
    """float32 or float64 [d]; None for a row that cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConceptState:
    """Of one direction at one name."""

    a: WeightedRows = NOTHING
    """Usable rows of A; those in pairs once the pair is complete."""
    b: WeightedRows = NOTHING
    rest: WeightedRows = NOTHING
    """Of every complete pair a - (a.b / b.b) b, which weighs (w_a + w_b) / 2."""
    excluded: tuple[int, int] = (0, 0)
    """Rows of A and B with a NaN or an infinity."""
    wrong: tuple[int, int] = (0, 0)
    """Rows of A and B left out because the model's own answer is wrong there."""
    unknown: int = 0
    """Examples of neither group."""
    dropped: int = 0
    """Pairs left out for a member that could not be used."""
    degenerate: int = 0
    """Pairs left out of `rest` because b is zero, or so small beside a that it is rounding."""
    parallel: int = 0
    """Pairs of which nothing is left but rounding."""
    resolution: float = 0.0
    """Rounding step of the coarsest states seen, relative to 1."""
    waiting: Mapping[str, Waiting] = field(default_factory=dict)
    """Pair key -> the member that waits for its partner."""
    done: frozenset[str] = frozenset()
    """Keys of the pairs that are complete or dropped: none may come again."""


class Concepts:
    """The sums `directions`; zero, update, merge as in base.py, over blocks that have labels."""

    kind = "directions"
    version = 2

    def zero(self) -> ConceptState:
        """The state of no rows."""
        return ConceptState()

    def update(self, state: ConceptState, rows: torch.Tensor, labels: Labels, resolution: float = 0.0) -> ConceptState:
        """A new state with read states [n, d] of any float dtype added, on whatever device they are.

        `resolution`: rounding step of what the rows were made from, where that is coarser than theirs. Raises
        RequestError for a pair's third row.
        """
        return self.merge(state, block_state(rows.detach().cpu(), labels, resolution)) if len(labels) else state

    def merge(self, first: ConceptState, second: ConceptState) -> ConceptState:
        """The state of both; pairs that come together now are added. Raises RequestError for a pair's third row."""
        total = ConceptTotal(first)
        total.add(second)
        return total.state()

    def merge_all(self, states: Iterable[ConceptState]) -> ConceptState:
        """The bits of merging one state after the other; each is read once and may then be forgotten."""
        total = ConceptTotal()
        for state in states:
            total.add(state)
        return total.state()

    def arrays(self, state: ConceptState) -> dict[str, np.ndarray]:
        """`means` float64 [3, d] of a, b and rest, `sums` float64 [10], `counts` int64 [11]; where pairs are used also
        `keys` (their text, those that wait first, behind one another), `ends` int64 [pairs], `waiting` float64 [m, 3]
        (group, weight, usable) and `rows` float32 or float64 [usable of m, d]."""
        parts = (state.a, state.b, state.rest)
        width = max(len(part.mean) for part in parts)
        arrays = {
            "means": np.stack([part.mean if len(part.mean) else np.zeros(width) for part in parts]),
            "sums": np.array([v for p in parts for v in (p.weight, p.squares, p.spread)] + [state.resolution]),
            "counts": np.array(
                [
                    *(part.rows for part in parts),
                    *state.excluded,
                    *state.wrong,
                    *(getattr(state, name) for name in COUNTS),
                ],
                np.int64,
            ),
        }
        if state.waiting or state.done:
            # Surrogates as they are: keys are the data's, and only compared
            keys = [key.encode("utf-8", "surrogatepass") for key in (*state.waiting, *sorted(state.done))]
            members = list(state.waiting.values())
            rows = [member.row for member in members if member.row is not None]
            arrays["keys"] = np.frombuffer(b"".join(keys), np.uint8)
            arrays["ends"] = np.cumsum([len(key) for key in keys], dtype=np.int64)
            arrays["waiting"] = np.array([(m.group, m.weight, m.row is not None) for m in members], np.float64).reshape(
                -1, 3
            )
            arrays["rows"] = np.stack(rows) if rows else np.zeros((0, width), np.float32)
        return arrays

    def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> ConceptState:
        """The inverse of `arrays`."""
        sums, counts = arrays["sums"].tolist(), arrays["counts"].tolist()
        a, b, rest = (
            WeightedRows(rows=n, weight=w, squares=q, mean=mean, spread=spread) if n else NOTHING
            for n, mean, (w, q, spread) in zip(counts[:3], arrays["means"], np.reshape(sums[:9], (3, 3)).tolist())
        )
        waiting, done = _pairs_of(arrays) if "keys" in arrays else ({}, frozenset[str]())
        return ConceptState(
            a=a,
            b=b,
            rest=rest,
            excluded=(counts[3], counts[4]),
            wrong=(counts[5], counts[6]),
            resolution=sums[9],
            waiting=waiting,
            done=done,
            **dict(zip(COUNTS, counts[7:], strict=True)),
        )


class ConceptTotal:
    """Merges states one by one, without copying each time what waits: one for every name, in a single pass over shards.

    Holds one state's means, the keys of all pairs and the members that still wait for their partner.
    """

    def __init__(self, start: ConceptState | None = None) -> None:
        start = start or ConceptState()
        self._sums = replace(start, waiting={}, done=frozenset())
        self._waiting, self._done = dict(start.waiting), set(start.done)

    def add(self, state: ConceptState) -> None:
        """The next state. Raises RequestError for a pair's third row."""
        _refuse_repeats(state, self._waiting, self._done)
        met = [(key, member) for key, member in state.waiting.items() if key in self._waiting]
        self._sums = _added(self._sums, state)
        if met:
            pairs = [(self._waiting.pop(key), member) for key, member in met]
            self._sums = _added(self._sums, _met(pairs, self._sums.resolution))
        self._done.update(state.done, (key for key, _ in met))
        self._waiting.update((key, member) for key, member in state.waiting.items() if key not in self._done)

    def state(self) -> ConceptState:
        """The sum of all so far."""
        return replace(self._sums, waiting=dict(self._waiting), done=frozenset(self._done))


def resolution_of(dtype: torch.dtype, coarser: float = 0.0) -> float:
    """Rounding step of states of a dtype, relative to 1; `coarser` where they were made from something coarser."""
    return max(coarser, min(torch.finfo(dtype).eps, COARSEST))


def block_state(rows: torch.Tensor, labels: Labels, coarser: float) -> ConceptState:
    """The state of rows [n, d] alone; `coarser` as in `Concepts.update`."""
    finite, group, weight = usable(rows), labels.group, labels.weight
    good = finite if labels.right is None else finite & labels.right
    if labels.pair is None:
        a, b = np.flatnonzero(good & (group == A)), np.flatnonzero(good & (group == B))
        complete = np.zeros(0, bool)
        ina, inb = a[:0], b[:0]
    else:
        complete = good[labels.a] & good[labels.b]
        a = ina = labels.a[complete]
        b = inb = labels.b[complete]
    resolution = resolution_of(rows.dtype, coarser)
    rest, degenerate, parallel = _rejections(rows, ina, inb, (weight[ina] + weight[inb]) / 2, resolution)
    return ConceptState(
        a=weighted(rows, a, weight[a]),
        b=weighted(rows, b, weight[b]),
        rest=rest,
        excluded=of_groups(~finite, group),
        wrong=of_groups(finite & ~good, group),
        unknown=int((group == UNKNOWN).sum()),
        dropped=int((~complete).sum()),
        degenerate=degenerate,
        parallel=parallel,
        resolution=resolution,
        waiting=waiting_of(rows, labels, good),
        done=frozenset(labels.pair[row] for row in labels.a.tolist()) if labels.pair is not None else frozenset(),
    )


def of_groups(which: np.ndarray, group: np.ndarray) -> tuple[int, int]:
    """How many of A and of B."""
    return int((which & (group == A)).sum()), int((which & (group == B)).sum())


def waiting_of(rows: torch.Tensor, labels: Labels, good: np.ndarray) -> dict[str, Waiting]:
    """Members of pairs whose partner is not among the rows; `good` bool [n] can be used."""
    if labels.pair is None or not len(labels.alone):
        return {}
    # Every smaller dtype fits into float32 exactly
    kept = rows[torch.from_numpy(labels.alone)]
    values = (kept if kept.dtype == torch.float64 else kept.to(torch.float32)).numpy()
    return {
        labels.pair[row]: Waiting(
            group=int(labels.group[row]), weight=float(labels.weight[row]), row=value.copy() if good[row] else None
        )
        for row, value in zip(labels.alone.tolist(), values)
    }


def _rejections(
    rows: torch.Tensor, a: np.ndarray, b: np.ndarray, weight: np.ndarray, resolution: float
) -> tuple[WeightedRows, int, int]:
    """Sums of a - (a.b / b.b) b over pairs at the indices a, b [k], and how many are degenerate and parallel."""
    total, degenerate, parallel = NOTHING, 0, 0
    for (at, x), (_, y) in zip(blocks(rows, a), blocks(rows, b)):
        length, partner = norms(x), norms(y)
        good = partner > TINY * length
        x, length, unit = x[good], length[good], y[good] / partner[good][:, None]
        rest = x - np.einsum("ij,ij->i", x, unit)[:, None] * unit
        degenerate += int((~good).sum())
        parallel += int((norms(rest) <= PARALLEL * resolution * length).sum())
        if len(rest):
            total = merge(total, weighted_block(rest, weight[at][good]))
    return total, degenerate, parallel


def _met(pairs: list[tuple[Waiting, Waiting]], resolution: float) -> ConceptState:
    """Pairs of members that waited in different states."""
    if not pairs:
        return ConceptState()
    rows, weights, dropped = [], [], 0
    for pair in pairs:
        first, second = sorted(pair, key=lambda member: member.group)
        if first.row is None or second.row is None:
            dropped += 1
            continue
        rows += [first.row, second.row]
        weights += [first.weight, second.weight]
    if not rows:
        return ConceptState(dropped=dropped)
    tensor, weight = torch.from_numpy(np.stack(rows)), np.array(weights)
    a, b = np.arange(0, len(rows), 2), np.arange(1, len(rows), 2)
    rest, degenerate, parallel = _rejections(tensor, a, b, (weight[a] + weight[b]) / 2, resolution)
    return ConceptState(
        a=weighted(tensor, a, weight[a]),
        b=weighted(tensor, b, weight[b]),
        rest=rest,
        dropped=dropped,
        degenerate=degenerate,
        parallel=parallel,
    )


def with_waiting(state: ConceptState) -> tuple[WeightedRows, WeightedRows]:
    """A and B with the usable rows that never met a partner, by key."""
    sums = [state.a, state.b]
    for group in (A, B):
        members = [m for _, m in sorted(state.waiting.items()) if m.group == group and m.row is not None]
        if members:
            tensor = torch.from_numpy(np.stack([m.row for m in members if m.row is not None]))
            weights = np.array([m.weight for m in members])
            sums[group] = merge(sums[group], weighted(tensor, np.arange(len(members)), weights))
    return sums[A], sums[B]


def _added(total: ConceptState, state: ConceptState) -> ConceptState:
    """The sums of both; what waits and what is done is the caller's."""
    return ConceptState(
        a=merge(total.a, state.a),
        b=merge(total.b, state.b),
        rest=merge(total.rest, state.rest),
        excluded=(total.excluded[A] + state.excluded[A], total.excluded[B] + state.excluded[B]),
        wrong=(total.wrong[A] + state.wrong[A], total.wrong[B] + state.wrong[B]),
        resolution=max(total.resolution, state.resolution),
        **{name: getattr(total, name) + getattr(state, name) for name in COUNTS},
    )


def _refuse_repeats(state: ConceptState, waiting: Mapping[str, Waiting], done: set[str]) -> None:
    for key in state.done:
        if key in done or key in waiting:
            raise twice(key, waiting[key].group if key in waiting else A)
    for key, member in state.waiting.items():
        if key in done or (key in waiting and waiting[key].group == member.group):
            raise twice(key, member.group)


def _pairs_of(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, Waiting], frozenset[str]]:
    text, ends = arrays["keys"].tobytes(), arrays["ends"].tolist()
    keys = [text[a:b].decode("utf-8", "surrogatepass") for a, b in zip([0, *ends], ends)]
    rows = iter(arrays["rows"])  # copied: a member that waits must not hold its shard's sums in memory
    members = [
        Waiting(group=int(group), weight=weight, row=next(rows).copy() if good else None)
        for group, weight, good in arrays["waiting"].tolist()
    ]
    return dict(zip(keys, members)), frozenset(keys[len(members) :])
