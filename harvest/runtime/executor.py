"""Where the shards are worked on, this process or a cluster, and what does not go with either."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from harvest.config import Job
from harvest.errors import RequestError
from harvest.store.files import Files


def uses_cluster(job: Job) -> bool:
    """Whether workers in processes of their own do the work, which is Ray's part."""
    run = job.run
    if run.executor != "auto":
        return run.executor == "ray"
    if cluster_address(job):
        return True
    return _several_gpus(job) if run.workers == "auto" else run.workers > 1


def cluster_address(job: Job) -> str | None:
    """Of a cluster that is there already: the job's, or that of the Ray job which this process is."""
    return job.run.address or os.environ.get("RAY_ADDRESS") or None


def _several_gpus(job: Job) -> bool:
    """This machine has more GPUs than one replica takes."""
    import torch

    each = job.run.gpus_per_worker if job.run.gpus_per_worker != "auto" else 1
    return job.model.device in ("auto", "cuda") and torch.cuda.device_count() >= 2 * each > 0


def refuse_executor(job: Job, files: Files, on_cluster: bool, brought: list[Any]) -> None:
    """Raises RequestError for workers, a store, or objects of the caller's (`brought`) that do not go with it."""
    run = job.run
    if not on_cluster:
        if run.workers not in ("auto", 1):
            raise RequestError(
                f"run.workers = {run.workers}: run.executor = 'inline' is one worker; allowed are 'auto' and 'ray'"
            )
        return
    setting = f"run.executor = {run.executor!r} with run.workers = {run.workers!r}"
    if any(one is not None for one in brought):
        raise RequestError(
            f"{setting}: a model, tokenizer or data handed over as objects stay in this process; "
            "allowed is run.executor = 'inline'"
        )
    if not files.exclusive:
        raise RequestError(
            f"{setting}: {files.url} cannot keep two writers apart, so it takes one worker; "
            "allowed are run.executor = 'inline', a folder, and s3://"
        )


@contextlib.contextmanager
def device_elsewhere(job: Job) -> Iterator[str | None]:
    """The device of a cluster's workers, which this machine need not have; None where the work is done on this one."""
    address = cluster_address(job)
    if not (uses_cluster(job) and address):
        yield None
        return
    from harvest.runtime import cluster

    with cluster.connected(job, address):
        yield cluster.device(job)
