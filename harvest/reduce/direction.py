"""A direction: a concept's vector at a name, or one line that says why there is none; never zeros, NaN or noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from harvest import glance
from harvest.errors import RequestError
from harvest.reduce.concepts import TINY, ConceptState, with_waiting
from harvest.reduce.evaluate import Evaluation, Figure
from harvest.reduce.labels import A, B
from harvest.reduce.weighted import WeightedRows, norm

SUMS = ("mean_difference", "single_group", "paired_rejection")
"""Modes that are exact sums over everything."""
EXAMPLES = ("whitened", "pca", "leace", "logistic")
"""Modes that are computed from the examples themselves."""
MODES = (*SUMS, *EXAMPLES)
ROUNDING = 64 * TINY
"""Relative to the rows' norm: what float64 sums may leave of two equal means."""
NOISE = (100.0, 0.01)
"""A difference below so many rounding steps and below this share of its standard error is none: the same texts give
rows that differ by several steps, for a forward rounds by its batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a direction was made from; pairs of numbers are (A, B)."""

    rows: tuple[int, int]
    """Examples in it."""
    weights: tuple[float, float]
    """The sum of their weights."""
    pairs: int = 0
    """Complete pairs of usable members."""
    unmatched: tuple[int, int] = (0, 0)
    """Usable examples whose partner never came."""
    excluded: tuple[int, int] = (0, 0)
    """Examples with a NaN or an infinity."""
    wrong: tuple[int, int] = (0, 0)
    """Examples left out because the model's own answer is wrong there."""
    dropped_pairs: int = 0
    """Pairs left out whole for such a member."""
    degenerate_pairs: int = 0
    """Of the complete ones, those that `paired_rejection` leaves out because b is zero."""
    parallel_pairs: int = 0
    """Of the complete ones, those where a is a multiple of b, up to rounding."""
    unknown: int = 0
    """Examples of neither group."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Eraser:
    """LEACE: x - left @ (right @ (x - mean)) holds nothing of the groups that a linear classifier could find."""

    left: np.ndarray
    """float64 [d, 1]"""
    right: np.ndarray
    """float64 [1, d]"""
    mean: np.ndarray
    """float64 [d]: of all examples it was made from."""

    @property
    def matrix(self) -> np.ndarray:
        """float64 [d, d]: left @ right, an oblique projection of rank 1."""
        product: np.ndarray = self.left @ self.right
        return product

    def __call__(self, states: np.ndarray) -> np.ndarray:
        """The states [n, d] with the concept erased, float64."""
        away = np.asarray(states, np.float64) - self.mean
        erased: np.ndarray = np.asarray(states, np.float64) - (away @ self.right.T) @ self.left.T
        return erased


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Direction:
    """Points from B to A. Without a status of "ok" there is no vector."""

    mode: str
    status: str
    """"ok", or why it is undefined."""
    counts: Counts
    vector: np.ndarray | None = None
    """float64 [d] of length 1."""
    raw: np.ndarray | None = None
    """float64 [d] in the units of the activations: what the mode's formula gives; where that has no scale of its own
    (whitened, pca, logistic) the vector times the distance of the group means along it."""
    norm: float | None = None
    """Length of `raw`; also where that is too short to be told from rounding."""
    standard_error: float | None = None
    """Of `raw` as a length, from the spread of the rows that it is a mean of (or the difference of means)."""
    midpoint: float | None = None
    """Of the group means along `vector`: above it lies A."""
    fit: Mapping[str, float] = field(default_factory=dict)
    """What the mode chose or found: shrinkage, C, share."""
    eraser: Eraser | None = None
    """Of mode `leace`."""
    name: str = ""
    """Of the direction, where it has one."""
    evaluation: Evaluation | None = None
    """On held-out examples."""

    @property
    def auroc(self) -> float | None:
        """Held-out area under the ROC curve; None without enough held-out examples."""
        return self._figure("auroc").value

    @property
    def accuracy(self) -> float | None:
        """Held-out share on the right side of the midpoint."""
        return self._figure("accuracy").value

    @property
    def cohens_d(self) -> float | None:
        """Held-out distance of the group means in pooled standard deviations."""
        return self._figure("cohens_d").value

    @property
    def explained(self) -> float | None:
        """Share of the held-out states' total variance that lies along the vector."""
        return self._figure("explained").value

    def _figure(self, name: str) -> Figure:
        figure: Figure = Figure() if self.evaluation is None else getattr(self.evaluation, name)
        return figure

    def card(self) -> dict[str, Any]:
        """Everything but the arrays, as plain values."""
        return {
            "name": self.name,
            "mode": self.mode,
            "status": self.status,
            "norm": self.norm,
            "standard_error": self.standard_error,
            "midpoint": self.midpoint,
            "fit": dict(self.fit),
            "counts": asdict(self.counts),
            "evaluation": None if self.evaluation is None else asdict(self.evaluation),
        }

    def __repr__(self) -> str:
        about = " ".join(part for part in (self.name, self.mode) if part)
        if self.status != "ok":
            return f"Direction({about}: undefined, {self.status})"
        rows = "A {:,} rows, B {:,}".format(*self.counts.rows)
        judged = f", AUROC {self._figure('auroc')}" if self.auroc is not None else ""
        return f"Direction({about}: norm {self.norm:.4g}, {rows}{judged})"

    def _repr_html_(self) -> str:
        counts = self.counts
        rows = [("mode", self.mode), ("status", self.status)]
        if self.norm is not None:
            error = "" if self.standard_error is None else f" (standard error {glance.figure(self.standard_error)})"
            rows.append(("norm", f"{glance.figure(self.norm)}{error}"))
        rows.append(("examples", "A {:,}, B {:,}".format(*counts.rows)))
        if counts.pairs:
            rows.append(("pairs", f"{counts.pairs:,}"))
        for what, (a, b) in (("unmatched", counts.unmatched), ("left out", counts.excluded), ("wrong", counts.wrong)):
            if a or b:
                rows.append((what, f"A {a:,}, B {b:,}"))
        if self.evaluation is not None:
            for what in ("auroc", "accuracy", "cohens_d", "explained"):
                rows.append((f"held-out {what}", str(self._figure(what))))
            if self.evaluation.reason is not None:
                rows.append(("figures", self.evaluation.reason))
        return glance.html(f"Direction {self.name}".rstrip(), rows)


def undefined(mode: str, why: str, counts: Counts, length: float | None = None) -> Direction:
    """A direction that is none, and why."""
    return Direction(mode=mode, status=why, counts=counts, norm=length)


def defined(
    mode: str, raw: np.ndarray, counts: Counts, *, a: WeightedRows, b: WeightedRows, error: float | None = None
) -> Direction:
    """A direction of length above 0 along `raw` float64 [d]; a and b are the groups' means."""
    length = norm(raw)
    vector = raw / length
    vector /= norm(vector)
    middle = float(vector @ (a.mean + b.mean)) / 2 if a.weight and b.weight else None
    for array in (vector, raw):
        array.setflags(write=False)
    return Direction(
        mode=mode,
        status="ok",
        counts=counts,
        vector=vector,
        raw=raw,
        norm=length,
        standard_error=error,
        midpoint=middle,
    )


def of_sums(state: ConceptState, mode: str, unmatched: str = "error") -> Direction:
    """The direction of one of SUMS. Pure: the state can go on afterwards.

    Pairs whose partner never came are refused in `paired_rejection` (RequestError), or with `unmatched = "count"` left
    out and counted; the other two modes count them in.
    """
    assert mode in SUMS, mode
    a, b = (state.a, state.b) if mode == "paired_rejection" else with_waiting(state)
    counts = _counts(state, a, b)
    if mode == "paired_rejection":
        for letter, group, waiting in zip("AB", (a, b), counts.unmatched):
            if not group.rows and not waiting and not state.dropped:
                return undefined(mode, lack(letter, group, counts), counts)
        refuse_unmatched(mode, counts.unmatched, unmatched)
        return _of_pairs(state, counts)
    for letter, group in zip("AB" if mode == "mean_difference" else "A", (a, b)):
        if not group.weight:
            return undefined(mode, lack(letter, group, counts), counts)
    if mode == "single_group":
        length = norm(a.mean)
        if length <= ROUNDING * a.rows_norm:
            return undefined(mode, f"the mean of A is zero (norm {length:.3g})", counts, length)
        return defined(mode, a.mean.copy(), counts, a=a, b=b, error=a.error)
    why = same(a, b, state.resolution)
    if why is not None:
        return undefined(mode, why, counts, norm(a.mean - b.mean))
    return defined(mode, a.mean - b.mean, counts, a=a, b=b, error=float(np.hypot(a.error, b.error)))


def _of_pairs(state: ConceptState, counts: Counts) -> Direction:
    mode, rest = "paired_rejection", state.rest
    if not counts.pairs:
        why = "no complete pair (without a partner: A {}, B {}; dropped for a member that cannot be used: {})"
        return undefined(mode, why.format(*counts.unmatched, state.dropped), counts)
    if not rest.rows:
        return undefined(mode, f"b is zero in every one of {counts.pairs} pairs", counts)
    if not rest.weight:
        return undefined(mode, f"the {rest.rows} pairs weigh nothing", counts)
    length = norm(rest.mean)
    if state.parallel == rest.rows:
        return undefined(mode, f"a is parallel to b in every one of {rest.rows} pairs", counts, length)
    if length <= ROUNDING * max(state.a.rows_norm, rest.rows_norm):
        return undefined(mode, f"what is left of A adds up to nothing (norm {length:.3g})", counts, length)
    return defined(mode, rest.mean.copy(), counts, a=state.a, b=state.b, error=rest.error)


def _counts(state: ConceptState, a: WeightedRows, b: WeightedRows) -> Counts:
    waiting = [m.group for m in state.waiting.values() if m.row is not None]
    return Counts(
        rows=(a.rows, b.rows),
        weights=(a.weight, b.weight),
        pairs=len(state.done) - state.dropped,
        unmatched=(waiting.count(A), waiting.count(B)),
        excluded=state.excluded,
        wrong=state.wrong,
        dropped_pairs=state.dropped,
        degenerate_pairs=state.degenerate,
        parallel_pairs=state.parallel,
        unknown=state.unknown,
    )


def refuse_unmatched(mode: str, unmatched: tuple[int, int], policy: str) -> None:
    """Raises RequestError where members without a partner are not to be counted only."""
    if any(unmatched) and policy != "count":
        raise RequestError(
            f"mode = {mode!r}: {unmatched[A]} rows of A and {unmatched[B]} of B have no partner; "
            "allowed are complete pairs, or unmatched='count'"
        )


def lack(letter: str, group: WeightedRows, counts: Counts) -> str:
    """Why a group without weight gives no mean."""
    if group.rows:
        return f"group {letter} has no weight (its {group.rows} rows weigh 0)"
    left_out = f"; left out for NaN or infinity: A {counts.excluded[A]}, B {counts.excluded[B]}"
    if any(counts.wrong):
        left_out += f"; for a wrong answer: A {counts.wrong[A]}, B {counts.wrong[B]}"
    rows = (counts.rows[A] or counts.unmatched[A], counts.rows[B] or counts.unmatched[B])
    return f"group {letter} is empty (A {rows[A]} rows, B {rows[B]}{left_out})"


def same(a: WeightedRows, b: WeightedRows, resolution: float) -> str | None:
    """Why two means with weight cannot be told apart; None where they can."""
    length, scale = norm(a.mean - b.mean), max(a.rows_norm, b.rows_norm)
    rounding = np.hypot(a.rows_norm / np.sqrt(a.effective), b.rows_norm / np.sqrt(b.effective)) * resolution
    spread = np.hypot(a.error, b.error)
    steps, share = NOISE
    if length <= max(ROUNDING * scale, 2 * rounding) or (
        length <= steps * resolution * scale and length <= share * spread
    ):
        return f"no difference between the groups (norm {length:.3g} beside rows of {scale:.3g})"
    return None
