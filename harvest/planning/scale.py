"""How far a run scales: what a token and a shard cost one worker, against what its node, its store and the ledger take.

Every part works beside the others, so the slowest decides: a run takes as long as its longest line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from harvest.buffers import writers_for
from harvest.planning.estimate import SHARD_BYTES, SHARD_TOKENS
from harvest.planning.sizes import row_bytes

COMMITS_PER_SECOND = 500.0
"""Records that one coordinator puts into its ledger; the least that `jobs/bench_schedule.py` accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of one worker, in seconds."""

    model: float
    """Of a token on the model's own line: forward, copies, sums."""
    read: float = 0.0
    """Of a token: reading and tokenising."""
    reduce: float = 0.0
    """Of a token: its sums, where they are made beside an accelerator's forward."""
    write: float = 0.0
    """Of a token: writing its rows."""
    cores: float = 0.0
    """Of a token: processor time of all threads together."""
    model_shard: float = 0.0
    """Of a shard, on the model's own line."""
    write_shard: float = 0.0
    """Of a shard: tables and sums, made durable."""
    bytes: float
    """That are written for a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of what workers share, in bytes per second; infinite where it is not known."""

    workers_per_node: int
    cores: float = math.inf
    """Of a node."""
    disk: float = math.inf
    """Of a node's disks, written to by its workers; of runs in an object store without end."""
    network: float = math.inf
    """Of a node, to the store."""
    store: float = math.inf
    """Of the object store, from all nodes together."""
    commits: float = COMMITS_PER_SECOND
    """Records a second, of the one coordinator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What so many workers come to once they are under way."""

    seconds: float
    tokens_per_second: float
    """Of all workers."""
    bytes_per_second: float
    """Of all nodes."""
    bytes_per_second_per_node: float
    nodes: int
    lines: Mapping[str, float]
    """What takes its time beside the others -> seconds that it would take alone."""

    @property
    def limit(self) -> str:
        """The longest line."""
        return max(self.lines, key=lambda line: self.lines[line])

    @property
    def share(self) -> float:
        """Of its own speed that the model reaches."""
        return self.lines["the model"] / self.seconds


def predict(costs: Costs, limits: Limits, *, workers: int, tokens: float, shards: float) -> Prediction:
    """The lines of a run over so many tokens in so many shards, spread evenly over workers and nodes."""
    nodes = math.ceil(workers / limits.workers_per_node)
    own_tokens, own_shards = tokens / workers, shards / min(workers, max(1.0, shards))
    on_node = min(workers, limits.workers_per_node)
    in_bytes = tokens * costs.bytes
    lines = {
        "the model": own_tokens * costs.model + own_shards * costs.model_shard,
        "reading and tokenising": own_tokens * costs.read,
        "reducing": own_tokens * costs.reduce,
        "writing": own_tokens * costs.write + own_shards * costs.write_shard,
        "the cores of a node": on_node * own_tokens * costs.cores / limits.cores,
        "the disk of a node": in_bytes / nodes / limits.disk,
        "the network of a node": in_bytes / nodes / limits.network,
        "the object store": in_bytes / limits.store,
        "the ledger": shards / limits.commits,
    }
    seconds = max(lines.values())
    return Prediction(
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        bytes_per_second=in_bytes / seconds,
        bytes_per_second_per_node=in_bytes / seconds / nodes,
        nodes=nodes,
        lines=lines,
    )


# ---- on paper ----------------------------------------------------------------------------------------------------

PEAK_FLOPS = 989e12
"""bfloat16 without sparsity of an H100 or H200, as NVIDIA states it."""
UTILISATION = 0.4
"""Of it, that a forward reaches."""
MODELS = {"1B": (1e9, 2048), "8B": (8e9, 4096)}
"""Name -> parameters, values of a row of `residual`."""
GPUS = (1, 64, 1000)
NAMES = (1, 3)
WRITER = 1e9
"""Bytes a second of a name that is written to its node's disk: checksum and copy."""
UPLOAD = 0.1e9
"""Of one that goes to an object store: a stream of 8 MiB parts."""
ON_DISK = Limits(workers_per_node=8, disk=6e9)
IN_STORE = Limits(workers_per_node=8, network=12.5e9, store=50e9)
"""8 GPUs to a node, NVMe disks of 6 GB/s, 100 Gbit/s to the store, and a bucket that takes 50 GB/s in all."""


def on_paper(model: str, names: int, gpus: int, *, in_store: bool) -> tuple[Costs, Prediction]:
    """What the figures above come to for a second's worth of tokens of every GPU, times 1,000."""
    parameters, width = MODELS[model]
    size = names * row_bytes(width, "bfloat16")
    writer = (UPLOAD if in_store else WRITER) * min(names, writers_for("cuda", local=not in_store))
    costs = Costs(model=2 * parameters / (PEAK_FLOPS * UTILISATION), write=size / writer, bytes=size)
    tokens = 1000 * gpus / costs.model
    shards = tokens / min(SHARD_TOKENS, SHARD_BYTES / size)
    limits = replace(IN_STORE if in_store else ON_DISK, workers_per_node=min(8, gpus))
    return costs, predict(costs, limits, workers=gpus, tokens=tokens, shards=shards)


def overview() -> str:
    """The table of the page about scale."""
    columns = (
        "model",
        "names",
        "GPUs",
        "bytes a token",
        "tokens/s",
        "GB/s a node",
        "GB/s in all",
        "to disks",
        "to a store",
    )
    rows = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    for model in MODELS:
        for names in NAMES:
            for gpus in GPUS:
                costs, local = on_paper(model, names, gpus, in_store=False)
                _, remote = on_paper(model, names, gpus, in_store=True)
                speed = gpus / costs.model
                rows.append(
                    f"| {model} | {names} | {gpus:,} | {costs.bytes:,.0f} | {speed:,.0f} "
                    f"| {speed / local.nodes * costs.bytes / 1e9:.2f} | {speed * costs.bytes / 1e9:,.2f} "
                    f"| {_verdict(local)} | {_verdict(remote)} |"
                )
    return "\n".join(rows)


def _verdict(found: Prediction) -> str:
    return "the model" if found.share > 0.995 else f"{found.limit}, {found.share:.2f}"
