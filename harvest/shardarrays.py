"""What a shard's arrays are before they are written: one row per stored token, and per sequence with rows."""

from __future__ import annotations

import numpy as np
import torch

from harvest.plan import Plan
from harvest.records import ArraySpec, ShardText
from harvest.store.int8 import DECODING
from harvest.store.layout import pooled_name, scale_name


def array_specs(plan: Plan, text: ShardText) -> dict[str, ArraySpec]:
    """Array -> what it is: of every name its rows, their scales where they are int8, and its pooled rows."""
    specs = {}
    sequences = sum(row.rows > 0 for row in text.documents)
    pools = plan.job.capture.pool or ()
    for name in plan.names:
        about = {"model": plan.job.model.name, "site": name.site, "layer": name.layer, "module": name.module}
        arrays = _arrays_of(str(name), name.width, plan.resolved.store_dtype) if plan.job.capture.store else []
        arrays += [(pooled_name(pool, str(name)), name.width, "float32", {"pool": pool}) for pool in pools]
        for label, width, dtype, more in arrays:
            specs[label] = ArraySpec(
                rows=sequences if "pool" in more else len(text.tokens),
                width=width,
                dtype=dtype,
                compression=plan.job.store.compression,
                attributes={**about, "dtype": dtype, **more},
            )
    return specs


def _arrays_of(name: str, width: int, dtype: str) -> list[tuple[str, int, str, dict[str, str]]]:
    """(name, width, dtype, attributes) of the arrays that hold a name's rows, and how they are decoded."""
    if dtype != "int8":
        return [(name, width, dtype, {})]
    scale = scale_name(name)
    return [
        (name, width, dtype, {"scale": scale, "decoding": DECODING}),
        (scale, 1, "float32", {"scale_of": name}),
    ]


def as_numpy(rows: torch.Tensor) -> np.ndarray:
    """The rows as the store takes them: bfloat16 as its bits (uint16), everything else as it is; no copy."""
    array: np.ndarray = (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()
    return array
