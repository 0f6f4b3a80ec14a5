"""Where a direction tells its groups apart best, by folds of the training examples; held-out ones only judge it."""

from __future__ import annotations

from dataclasses import dataclass

from harvest.concepts.directions import Result
from harvest.errors import RequestError
from harvest.reduce.direction import Direction
from harvest.reduce.evaluate import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """Where a mode of a direction tells its groups apart best, by folds of the training examples alone."""

    mode: str
    at: str
    """Name of the activations, `residual.22`, or with its read, `residual.22@-3`."""
    direction: Direction
    in_folds: float
    """AUROC in those folds, which it was chosen by."""
    shuffled: float | None
    """Held-out AUROC of directions from shuffled labels; None where that says nothing."""

    @property
    def auroc(self) -> Figure:
        """On held-out examples, which nothing was chosen by: `value`, and its 95 % interval from `low` to `high`."""
        return Figure() if self.direction.evaluation is None else self.direction.evaluation.auroc

    @property
    def text(self) -> str:
        """For people: what it is and what it is worth, on held-out examples."""
        shuffled = "" if self.shuffled is None else f", {self.shuffled:.2f} with shuffled labels"
        return f"{self.direction.name}: {self.mode} at {self.at}, held-out AUROC {self.auroc}{shuffled}"

    def __repr__(self) -> str:
        return f"Best({self.text}, {self.in_folds:.2f} in folds)"


def bests(result: Result) -> list[Best]:
    """Of each mode for which there was something to choose by, in the job's order."""
    told = {(entry["mode"], entry["at"]): entry for entry in result.card["directions"]}
    return [
        Best(
            mode=mode,
            at=at,
            direction=result.found[mode][at],
            in_folds=told[mode, at]["cross_validated_auroc"],
            shuffled=(result.card["control"][mode] or {}).get("auroc"),
        )
        for mode, at in result.card["best"].items()
        if at is not None
    ]


def best_of(result: Result, mode: str | None = None) -> Best:
    """The one with the highest AUROC in folds; of several the first in the job."""
    if mode is not None and mode not in result.found:
        raise RequestError(f"mode = {mode!r}: direction {result.name!r} has {', '.join(result.found)}")
    asked = [one for one in bests(result) if mode in (None, one.mode)]
    if not asked:
        of = result.name if mode is None else f"{result.name}, {mode}"
        why = "too few training examples, or none are kept, or no direction is defined"
        raise RequestError(f"best({of}): there was nothing to choose by ({why}); directions() has all that there are")
    return max(asked, key=lambda one: one.in_folds)
