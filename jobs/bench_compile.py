"""What `model.compile` brings: the bare forward of compiled blocks against the same blocks as they are.

    python jobs/bench_compile.py [--pairs 5] [--out jobs/results]

All 30 blocks of the common work's model, on its windows of 128 and on batches of five other shapes. The remark is what
the first forward of each took longer, once in a worker's life.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import measuring
import torch
from measuring import Found, Row
from work import Work, common, now

from harvest.model.compiling import compile_blocks

SHAPES = ((16, 120), (8, 256), (32, 64), (15, 136), (11, 184))
"""Windows and length of batches of about 2,048 tokens."""


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    work = common(asked)
    for dtype in ("float32", "bfloat16"):
        for what, batches in (
            ("windows of 128", None),
            ("five shapes", [torch.ones(at, dtype=torch.long) for at in SHAPES]),
        ):
            measure = partial(compare, work, dtype, batches, asked.pairs)
            yield Row(what=f"compiled blocks / blocks, {dtype}, {what}", goal=None, measure=measure)


def compare(work: Work, dtype: str, batches: Sequence[torch.Tensor] | None, pairs: int) -> Found:
    layers = work.model.to(getattr(torch, dtype)).model.layers
    batches = work.batches if batches is None else batches
    try:
        plain = forward(work, batches)
        compile_blocks(work.model)
        compiled = [layer.forward for layer in layers]
        first = forward(work, batches)

        def side(forwards: Sequence[object] | None) -> float:
            for at, layer in enumerate(layers):
                vars(layer).pop("forward", None)
                if forwards is not None:
                    layer.forward = forwards[at]
            return forward(work, batches)

        timings = measuring.in_turn(partial(side, None), partial(side, compiled), pairs)
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)
        torch._dynamo.reset()
    return Found(figures=measuring.ratios(timings), remark=f"first: {first - plain:.0f} s more")


def forward(work: Work, batches: Sequence[torch.Tensor]) -> float:
    start = now()
    with torch.no_grad():
        for batch in batches:
            work.forward(input_ids=batch)
    return now() - start


if __name__ == "__main__":
    measuring.main(__doc__, rows)
