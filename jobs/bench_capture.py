"""Harvesting against the bare forward: how much of the model's own speed is left with everything stored.

    python jobs/bench_capture.py [--pairs 5] [--only "one name"] [--out jobs/results]

On the common work (`jobs/work.py`), each row's harvest and its limit in turn: time of the bare forward over time of the
harvest. For a row of all layers the limit is the bare trunk.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from measuring import Found, Row, in_turn, main, ratios
from work import LAYER, LAYERS, Work, common

EVERY = list(range(LAYERS))
CASES: list[tuple[str, list[str], list[int], str, bool, float]] = [
    ("one name (residual.15), float32 / limit", ["residual"], [LAYER], "float32", False, 0.97),
    ("one name with moments / limit", ["residual"], [LAYER], "float32", True, 0.97),
    ("residual at all 30 layers, bfloat16 / trunk", ["residual"], EVERY, "bfloat16", False, 0.92),
    ("the same with moments / trunk", ["residual"], EVERY, "bfloat16", True, 0.92),
    (
        "residual, attn, mlp at all layers, bfloat16 / trunk",
        ["residual", "attn", "mlp"],
        EVERY,
        "bfloat16",
        False,
        0.85,
    ),
]
"""What, sites, layers, stored dtype, moments, goal."""


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    work = common(asked)
    for what, sites, layers, dtype, moments, goal in CASES:
        tables = {
            "capture": {"sites": sites, "layers": layers},
            "store": {"dtype": dtype},
            "statistics": {"moments": moments},
        }
        yield Row(what=what, goal=goal, measure=partial(measure, work, layers[-1], tables, asked.pairs))


def measure(work: Work, last: int, tables: dict[str, Any], count: int) -> Found:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pipeline = work.pipeline(work.plan(folder, **tables), folder)
        timings = in_turn(partial(work.bare, last), partial(work.harvest, pipeline, folder), count)
    speed = work.tokens / statistics.median(seconds for _, seconds in timings)
    return Found(figures=ratios(timings), remark=f"{speed:,.0f} tokens/s")


if __name__ == "__main__":
    main(__doc__, rows)
