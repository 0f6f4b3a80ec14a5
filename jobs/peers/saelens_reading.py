"""SAELens' reader of cached activations: seconds a row of shuffled batches from what `harvest export saelens` wrote.

    saelens_reading.py EXPORT HOOK CONTEXT WIDTH BATCH BATCHES

The export is read once before, so that it is in memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from answering import answer
from sae_lens.training.activations_store import ActivationsStore

export, hook = sys.argv[1:3]
context, width, batch, batches = map(int, sys.argv[3:])
for path in Path(export).glob("*.arrow"):
    path.read_bytes()


def once() -> tuple[float, Sequence[float]]:
    store = ActivationsStore(
        model=None,
        dataset=None,
        cached_activations_path=export,
        streaming=False,
        hook_name=hook,
        hook_head_index=None,
        context_size=context,
        d_in=width,
        n_batches_in_buffer=4 * batch // context,
        total_training_tokens=batch * batches,
        store_batch_size_prompts=batch // context,
        train_batch_size_tokens=batch,
        prepend_bos=False,
        normalize_activations="none",
        device=torch.device("cpu"),
        dtype="float16",
    )
    next(store)
    begin = time.perf_counter()
    rows = sum(len(next(store)) for _ in range(batches))
    return (time.perf_counter() - begin) / rows, []


answer(once)
