"""Counts of what should not be there, NaN, infinities and rows of zeros, for runs that keep no moments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from harvest.reduce.base import Block
from harvest.reduce.scripted import scripted

BLOCK_VALUES = 2**15 - 1
"""Small enough for one core; see moments.py."""
FIELDS = ("rows", "non_finite_values", "non_finite_rows", "zero_rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthState:
    """Counts over all rows of a name, special tokens included."""

    rows: int = 0
    non_finite_values: int = 0
    """NaN and infinite values."""
    non_finite_rows: int = 0
    """Rows with at least one."""
    zero_rows: int = 0
    """Rows that are zero throughout."""


class Health:
    """The reduction `health`: one pass over the norms, a closer look only at rows whose norm is odd."""

    kind = "health"
    version = 1

    def zero(self) -> HealthState:
        """The state of no rows."""
        return HealthState()

    def update(self, state: HealthState, block: Block) -> HealthState:
        """A new state with the block's rows counted."""
        rows = block.rows
        if not rows.numel():
            return state
        step = max(1, BLOCK_VALUES // rows.shape[1]) if rows.device.type == "cpu" else len(rows)
        norms = scripted(row_norms, rows.device)(rows, step)
        # A norm of 0 or inf may also be an under- or overflow: such rows are looked at value by value.
        odd = rows[(norms == 0) | ~torch.isfinite(norms)]
        bad = ~torch.isfinite(odd)
        counted = HealthState(
            rows=len(rows),
            non_finite_values=int(bad.sum()),
            non_finite_rows=int(bad.any(dim=1).sum()),
            zero_rows=int((odd == 0).all(dim=1).sum()),
        )
        return self.merge(state, counted)

    def merge(self, first: HealthState, second: HealthState) -> HealthState:
        """The state of both."""
        return HealthState(**{name: getattr(first, name) + getattr(second, name) for name in FIELDS})

    def finalise(self, state: HealthState) -> HealthState:
        """The counts themselves."""
        return state

    def arrays(self, state: HealthState) -> dict[str, np.ndarray]:
        """`counts` int64 [4]."""
        return {"counts": np.array([getattr(state, name) for name in FIELDS], np.int64)}

    def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> HealthState:
        """The inverse of `arrays`."""
        return HealthState(**dict(zip(FIELDS, arrays["counts"].tolist(), strict=True)))


REDUCTION = Health()


def row_norms(rows: torch.Tensor, step: int) -> torch.Tensor:
    """Lengths [n] of the rows [n, d], `step` rows at a time."""
    norms = torch.empty([rows.size(0)], dtype=rows.dtype, device=rows.device)
    for start in range(0, rows.size(0), step):
        stop = min(rows.size(0), start + step)
        torch.norm(rows[start:stop], 2, [1], False, out=norms[start:stop])
    return norms
