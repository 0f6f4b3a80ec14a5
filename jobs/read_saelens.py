"""Run by an interpreter that has sae-lens: how fast its reader of cached activations makes shuffled batches.

    python jobs/read_saelens.py EXPORT HOOK CONTEXT WIDTH BATCH BATCHES

EXPORT is what `harvest export saelens` wrote. Prints rows/s; the export is read once before, so that it is in memory.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from sae_lens.training.activations_store import ActivationsStore

export, hook = sys.argv[1:3]
context, width, batch, batches = map(int, sys.argv[3:])
for path in Path(export).glob("*.arrow"):
    path.read_bytes()
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
began = time.perf_counter()
rows = sum(len(next(store)) for _ in range(batches))
print(json.dumps({"rows_per_second": rows / (time.perf_counter() - began)}))
