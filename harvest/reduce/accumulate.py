"""`harvest.concept_direction` and `harvest.ConceptAccumulator`: a concept's direction out of states in memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from harvest.errors import RequestError
from harvest.reduce.concepts import Concepts, ConceptState
from harvest.reduce.direction import MODES, SUMS, Direction, of_sums
from harvest.reduce.examples import ready
from harvest.reduce.fitted import fit
from harvest.reduce.labels import POLICIES, Labels, as_rows, join_labels, make_labels, order_pairs

PAIRED = ("paired_rejection",)
_SUMS = Concepts()


@dataclass(frozen=True, slots=True, eq=False)
class ConceptAccumulator:
    """Takes in states block by block, in any order and on any number of workers; every call gives a new one.

    `mean_difference`, `single_group` and `paired_rejection` keep sums; the other modes keep every example. With
    `unknown = "count"` groups other than 0 and 1 are left out and counted; with `unmatched = "count"` so are examples
    without a partner, where pairs are needed. Raises RequestError for a wrong mode, width or policy.
    """

    mode: str
    dim: int
    unknown: str = field(default="error", kw_only=True)
    unmatched: str = field(default="error", kw_only=True)
    state: ConceptState = field(default_factory=_SUMS.zero, kw_only=True, repr=False)
    """The sums so far."""
    examples: tuple[tuple[torch.Tensor, Labels], ...] = field(default=(), kw_only=True, repr=False)
    """The blocks so far, for modes that need them."""

    def __post_init__(self) -> None:
        for setting, value, allowed in (
            ("mode", self.mode, MODES),
            ("unknown", self.unknown, POLICIES),
            ("unmatched", self.unmatched, POLICIES),
        ):
            if value not in allowed:
                raise RequestError(f"{setting} = {value!r}: allowed are {', '.join(allowed)}")
        if isinstance(self.dim, bool) or not isinstance(self.dim, int) or self.dim < 1:
            raise RequestError(f"dim = {self.dim!r}: allowed are whole numbers of at least 1")

    def update(
        self, states: Any, groups: Any, weights: Any = None, pairs: Any = None, *, unknown: str | None = None
    ) -> ConceptAccumulator:
        """One more block: states [n, ...] of any float dtype, groups int [n] (0 is A, 1 is B), weights [n] of at least
        0, pair keys [n] (texts or ints). A block of no rows changes nothing; nor does one that is refused."""
        rows = as_rows(states, self.dim)
        labels = make_labels(groups, weights, pairs, rows=len(rows), unknown=unknown or self.unknown)
        if self.mode in PAIRED and labels.pair is None and len(labels):
            raise RequestError(f"pairs: needed by mode {self.mode!r}; allowed is one key for each row of states")
        if not len(labels):
            return self
        if self.mode in SUMS:
            return replace(self, state=_SUMS.update(self.state, rows, labels))
        return replace(self, examples=(*self.examples, (rows.clone(), labels)))

    def merge(self, other: ConceptAccumulator) -> ConceptAccumulator:
        """Both; the same bits for the same order, in any other order the same up to float64 rounding."""
        if (self.mode, self.dim) != (other.mode, other.dim):
            raise RequestError(
                f"merge: {other.mode} of width {other.dim} does not go with {self.mode} of width {self.dim}"
            )
        state = _SUMS.merge(self.state, other.state)
        return replace(self, state=state, examples=(*self.examples, *other.examples))

    def finalise(self) -> Direction:
        """The direction of all that came in; its status says why where there is none. Pure: it can go on afterwards.

        Raises RequestError where examples lack a partner in a mode of pairs, unless they are to be counted.
        """
        if self.mode in SUMS:
            return of_sums(self.state, self.mode, self.unmatched)
        rows = [rows for rows, _ in self.examples] or [torch.zeros(0, self.dim)]
        labels = join_labels([labels for _, labels in self.examples])
        return fit(ready(torch.cat(rows), labels), self.mode, self.unmatched)


def concept_direction(
    states: Any,
    groups: Any,
    weights: Any = None,
    pairs: Any = None,
    mode: str = "mean_difference",
    *,
    unknown: str = "error",
    unmatched: str = "error",
) -> Direction:
    """The direction from B to A out of states [n, ...] in memory; arguments as in ConceptAccumulator.

    `pairs = "order"` pairs the k-th of A with the k-th of B. Raises RequestError for whatever is in doubt.
    """
    rows = as_rows(states)
    if isinstance(pairs, str) and pairs == "order":
        known = make_labels(groups, rows=len(rows), unknown=unknown)
        pairs = order_pairs(known.group)
    whole = ConceptAccumulator(mode, max(1, rows.shape[1]), unknown=unknown, unmatched=unmatched)
    return whole.update(rows, groups, weights, pairs).finalise()
