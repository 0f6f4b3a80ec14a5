"""What a part of a job, measured on this machine, says of the whole with so many workers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from harvest.plan import Plan
from harvest.planning.scale import Costs, Limits, Prediction, predict
from harvest.runtime.executor import cluster_address
from harvest.stages import Stages, in_words

UNKNOWN_TOKENS = 1e9
"""Stands for how many there are where nobody knows: rates and limits do not depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A part of a job, harvested and thrown away."""

    tokens: int
    """That the model read."""
    shards: int
    bytes: int
    cores: float | None
    """Seconds of processor time, of all threads. None of a crew, whose workers were measured while they shared what
    there is, so that the seconds of their stages have it in them."""
    stages: Stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What was measured, and what it comes to for the whole job."""

    measured: Measured
    workers: int
    per_node: int
    elsewhere: bool
    """The workers are a cluster's, whose nodes are taken to be like this machine."""
    tokens: int | None
    """Of the whole job; None where only reading to its end can tell."""
    start: float
    """Until the first forward, as here."""
    end: float
    """Merging sums, finding directions and writing the report, as here."""
    costs: Costs
    found: Prediction

    @property
    def seconds(self) -> float | None:
        """Of the whole command."""
        return None if self.tokens is None else self.start + self.found.seconds + self.end

    @property
    def text(self) -> str:
        """For people."""
        measured, found = self.measured, self.found
        where = "on nodes like this machine" if self.elsewhere else "on this machine"
        where += ", measured together" if measured.cores is None else ""
        node = f"{found.bytes_per_second_per_node / 1e6:,.1f} MB/s a node, {found.bytes_per_second / 1e6:,.1f} in all"
        lines = sorted(found.lines.items(), key=lambda line: -line[1])
        others = ", ".join(f"{line} {seconds / found.seconds:.2f}" for line, seconds in lines[1:4] if seconds)
        rows = [
            (
                "calibrated",
                f"{measured.tokens:,} tokens in {in_words(measured.stages.worker_seconds)}; nothing is kept",
            ),
            ("workers", f"{self.workers}, {where}"),
            ("speed", f"{found.tokens_per_second:,.0f} tokens/s, {node}"),
            ("time", self._time()),
            ("limit", f"{found.limit} limits" + (f"; of its time: {others}" if others else "")),
        ]
        return "\n".join([*measured.stages.table, "", *(f"{key:<10}  {value}" for key, value in rows)])

    def _time(self) -> str:
        if self.seconds is None:
            return "unknown: only reading to the end of the data can tell how much there is"
        parts = f"start {in_words(self.start)}, end {in_words(self.end)}"
        ray = "; Ray's own start comes on top" if self.workers > 1 and self.measured.cores is not None else ""
        return f"about {_long(self.seconds)} for {self.tokens:,} tokens ({parts}{ray})"

    def data(self) -> dict[str, Any]:
        """For programs."""
        found = self.found
        return {
            "workers": self.workers,
            "workers_per_node": self.per_node,
            "nodes": found.nodes,
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "start_seconds": round(self.start, 3),
            "end_seconds": round(self.end, 3),
            "tokens": self.tokens,
            "tokens_per_second": round(found.tokens_per_second, 3),
            "bytes_per_second": round(found.bytes_per_second, 3),
            "bytes_per_second_per_node": round(found.bytes_per_second_per_node, 3),
            "limit": found.limit,
            "shares": {line: round(seconds / found.seconds, 6) for line, seconds in found.lines.items()},
            "measured": {
                "tokens": self.measured.tokens,
                "shards": self.measured.shards,
                "bytes": self.measured.bytes,
                "cores_seconds": None if self.measured.cores is None else round(self.measured.cores, 3),
                **self.measured.stages.data(),
            },
        }


def forecast(plan: Plan, measured: Measured, workers: int | None, *, start: float, end: float) -> Forecast:
    """The whole job by `workers`, or as many as it says."""
    costs, count = _costs(measured), _workers(plan, workers)
    per_node, elsewhere = _per_node(plan, count)
    tokens = plan.estimate.tokens
    whole = tokens or UNKNOWN_TOKENS
    shards = plan.estimate.shards or max(1, round(whole * measured.shards / measured.tokens))
    limits = Limits(workers_per_node=per_node, cores=cores())
    return Forecast(
        measured=measured,
        workers=count,
        per_node=per_node,
        elsewhere=elsewhere,
        tokens=tokens,
        start=start,
        end=end,
        costs=costs,
        found=predict(costs, limits, workers=count, tokens=whole, shards=shards),
    )


def _costs(measured: Measured) -> Costs:
    """Of a token and of a shard; what happens once in a worker's life is neither."""
    stages = {name: stage.busy for name, stage in measured.stages.stages.items()}
    tokens, shards = measured.tokens, measured.shards
    processor = 0.0 if measured.cores is None else max(0.0, measured.cores - measured.stages.check)
    return Costs(
        model=(sum(stages[name] for name in ("forward", "copy", "reduce")) - measured.stages.reduced_beside) / tokens,
        reduce=measured.stages.reduced_beside / tokens,
        read=stages["read"] / tokens,
        write=(stages["write"] + stages.get("pool", 0.0)) / tokens,
        cores=processor / tokens,
        model_shard=(measured.stages.other + stages["commit"]) / shards,
        write_shard=stages["finish"] / shards,
        bytes=measured.bytes / tokens,
    )


def _workers(plan: Plan, asked: int | None) -> int:
    """The job's own number; `auto` is one for each replica's share of this machine's GPUs, or one."""
    if asked is not None:
        return asked
    if plan.job.run.workers != "auto":
        return plan.job.run.workers
    return _gpu_room(plan) or 1


def _per_node(plan: Plan, workers: int) -> tuple[int, bool]:
    """Workers of one node, and whether they are a cluster's: without an address all are on this machine."""
    if cluster_address(plan.job) is None:
        return workers, False
    each = plan.job.run.cpus_per_worker
    return _gpu_room(plan) or max(1, int(cores() // (1 if each == "auto" else max(each, 1e-9)))), True


def _gpu_room(plan: Plan) -> int:
    """Workers that this machine's GPUs are enough for; 0 without."""
    if plan.resolved.device != "cuda":
        return 0
    each = plan.job.run.gpus_per_worker
    return int(torch.cuda.device_count() // (1 if each == "auto" or not each else each))


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _long(seconds: float) -> str:
    """`45.6 s`, `12 min`, `3 h 20 min`."""
    if seconds < 120:
        return in_words(seconds)
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
