"""Rows in another dtype: what the new one cannot hold is an error that names the row, never an infinity."""

from __future__ import annotations

from collections.abc import Callable

import torch

from harvest.errors import WorkError
from harvest.store.storedrows import TORCH_DTYPES

EXACT = {
    "float32": ("float32",),
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
}
"""Stored dtype -> those that hold every value of it."""


def cast_rows(rows: torch.Tensor, dtype: str, where: Callable[[int], str]) -> torch.Tensor:
    """Rows [n, d] as `dtype`; `where(row)` names one of them in the error.

    NaN and infinities of the model's own pass as they are. Raises WorkError where a finite value would become one.
    """
    target = TORCH_DTYPES[dtype]
    cast = rows.to(target)
    if rows.dtype == target or target == torch.float32 or bool(cast.isfinite().all()):
        return cast
    lost = ~cast.isfinite() & rows.isfinite()
    if bool(lost.any()):
        row, column = (int(index[0]) for index in torch.nonzero(lost, as_tuple=True))
        value = float(rows[row, column])
        raise WorkError(
            f"{where(row)}: {value:g} does not fit into {dtype}, which ends at {torch.finfo(target).max:g}; "
            f"--dtype {_wider(str(rows.dtype).removeprefix('torch.'))} holds every value"
        )
    return cast


def _wider(stored: str) -> str:
    return " or ".join(EXACT[stored])
