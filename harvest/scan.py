"""One bounded pass over the stored rows of a name: its sums anew, and which rows look like no activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from harvest.activations import as_tensor
from harvest.reduce.base import Block, Reduction, StateFile
from harvest.reduce.health import Health
from harvest.reduce.moments import Moments
from harvest.store.arrays import StoredArray

SCAN_BYTES = 8 << 20
"""Of an array, at a time."""
REDUCTIONS: dict[str, Reduction[Any]] = {"moments": Moments(), "health": Health()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What one pass over n rows found."""

    kind: str
    """The reduction whose state `sums` is."""
    sums: Any
    non_finite: int
    """NaN and infinite values."""
    zero: np.ndarray
    """bool [n]: the row is zero throughout."""
    same: np.ndarray
    """bool [n]: the row has the bits of the one before."""
    flat: np.ndarray
    """bool [n]: every value of the row is the same, and there is more than one."""

    @property
    def zero_rows(self) -> int:
        """Rows that are zero throughout."""
        return int(self.zero.sum())


def scan_rows(array: StoredArray, special: np.ndarray | None, kind: str | None) -> Scan:
    """Reads the array once, a few MiB at a time.

    `special` bool [n], None where it is not known; `kind` of the sums to make again, `health` where they cannot be.
    """
    kind = kind if kind is not None and special is not None else "health"
    reduction = REDUCTIONS[kind]
    n, width = array.shape
    flags = np.zeros(n, bool) if special is None else special
    sums = reduction.zero()
    zero, same, flat = np.zeros(n, bool), np.zeros(n, bool), np.zeros(n, bool)
    step = max(1, SCAN_BYTES // (width * array.numpy_dtype.itemsize))
    last = None
    for start in range(0, n, step):
        stop = min(start + step, n)
        raw = array.read(start, stop)
        rows = as_tensor(raw, array.dtype)
        nowhere = np.zeros(stop - start, np.int64)  # these sums do not ask where a row is from
        block = Block(rows=rows, special=flags[start:stop], document=nowhere, position=nowhere.astype(np.int32))
        sums = reduction.update(sums, block)
        zero[start:stop] = (rows == 0).all(dim=1).numpy()
        bits = raw.view(f"u{raw.itemsize}")
        same[start + 1 : stop] = (bits[1:] == bits[:-1]).all(axis=1)
        same[start] = last is not None and np.array_equal(bits[0], last)
        flat[start:stop] = (bits == bits[:, :1]).all(axis=1) & (width > 1)
        last = bits[-1].copy()
    return Scan(kind=kind, sums=sums, non_finite=sums.non_finite_values, zero=zero, same=same, flat=flat)


def same_sums(saved: StateFile, name: str, scan: Scan | None, rows: int) -> str | None:
    """What is wrong with the saved sums of a name in a shard of so many rows; None where they are right."""
    kind = kind_of(saved)
    if name not in saved.names(kind):
        return "no sums are saved"
    reduction = REDUCTIONS[kind]
    state = saved.load(reduction, name)
    counted = state.rows if kind == "health" else _all_rows(state)
    if counted != rows:
        return f"sums over {counted} rows, the shard has {rows}"
    if scan is None or scan.kind != kind:
        return None
    one, two = reduction.arrays(state), reduction.arrays(scan.sums)
    for field, array in one.items():
        if not _agree(field, array, two[field]):
            return f"{field} is not what the stored rows give"
    return None


def kind_of(saved: StateFile) -> str:
    """Which reduction a shard kept."""
    return next((kind for kind in REDUCTIONS if saved.names(kind)), "health")


def _all_rows(state: Any) -> int:
    parts = (state.ordinary, state.special)
    return int(sum(part.rows + part.non_finite_rows for part in parts))


def _agree(field: str, one: np.ndarray, two: np.ndarray) -> bool:
    """Counts exactly, sums up to the rounding of another grouping."""
    if field.endswith((".norms", ".first")):
        return field.endswith(".first") or int(one.sum()) == int(two.sum())  # an ulp may move a norm to the next bin
    if one.shape != two.shape:
        return False
    if one.dtype.kind == "i":
        return bool((one == two).all())
    finite = np.isfinite(two)
    scale = float(np.abs(two[finite]).max(initial=0.0))
    return bool(np.allclose(one, two, rtol=1e-9, atol=1e-9 * scale))
