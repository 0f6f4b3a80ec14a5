"""A peer's side of a benchmark: for each line that it is sent, it does its work once and says how long that took.

Runs in the peer's own environment, where Harvest is not; `jobs/bench_peers.py` has the other side.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


def given() -> argparse.Namespace:
    """What the peer is started with; `windows` [windows, tokens] as a tensor of ids."""
    options = argparse.ArgumentParser()
    options.add_argument("model")
    options.add_argument("windows")
    options.add_argument("--batch", type=int, required=True)
    options.add_argument("--layer", type=int, required=True)
    options.add_argument("--width", type=int, required=True)
    options.add_argument("--threads", type=int, required=True)
    options.add_argument("--sites", nargs="+", default=["residual"])
    work = options.parse_args()
    torch.set_num_threads(work.threads)
    with open(work.windows, encoding="utf-8") as file:
        work.windows = torch.tensor(json.load(file))
    return work


def answer(once: Callable[[], tuple[float, Sequence[float]]]) -> None:
    """Says "ready", then does `once` for every line: (seconds, a total of each site's rows: all do the same)."""
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        seconds, totals = once()
        print(json.dumps({"seconds": seconds, "totals": totals}), flush=True)


def capturing(capture: Callable[[torch.Tensor], torch.Tensor], batches: Iterable[torch.Tensor]) -> None:
    """Answers with rows of one site, batch by batch, kept in memory."""

    def once() -> tuple[float, list[float]]:
        begin = time.perf_counter()
        rows = [capture(batch) for batch in batches]
        return time.perf_counter() - begin, [sum(total(one) for one in rows)]

    answer(once)


def total(rows: Any) -> float:
    """Of absolute values."""
    return float(torch.as_tensor(rows).double().abs().sum())
