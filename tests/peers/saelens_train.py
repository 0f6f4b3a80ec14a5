"""Run by the interpreter of an environment with sae-lens: trains on an export, prints what it saw and learned.

python saelens_train.py MODEL EXPORT HOOK CONTEXT WIDTH
"""

from __future__ import annotations

import json
import sys
import tempfile

import torch
from datasets import Dataset
from sae_lens import (
    LanguageModelSAERunnerConfig,
    LanguageModelSAETrainingRunner,
    LoggingConfig,
    StandardTrainingSAEConfig,
)
from sae_lens.training.activations_store import ActivationsStore

model, export, hook, context, width = sys.argv[1:4] + [int(word) for word in sys.argv[4:]]  # type: ignore[assignment]
store = ActivationsStore(
    model=None,
    dataset=None,
    cached_activations_path=export,
    streaming=False,
    hook_name=hook,
    hook_head_index=None,
    context_size=context,
    d_in=width,
    n_batches_in_buffer=64,
    total_training_tokens=4096,
    store_batch_size_prompts=1,
    train_batch_size_tokens=16,
    prepend_bos=False,
    normalize_activations="none",
    device=torch.device("cpu"),
    dtype="float32",
)
rows, tokens = [], []
while True:
    try:
        values, ids = store.get_raw_llm_batch(raise_on_epoch_end=True)
    except StopIteration:
        break
    rows.append(values.reshape(-1, width))
    tokens.append(ids)

with tempfile.TemporaryDirectory() as folder:
    config = LanguageModelSAERunnerConfig(
        sae=StandardTrainingSAEConfig(d_in=width, d_sae=4 * width, l1_coefficient=0.01),
        model_name=model,
        model_class_name="AutoModelForCausalLM",
        dataset_path="unused",
        hook_name=hook,
        use_cached_activations=True,
        cached_activations_path=export,
        context_size=context,
        n_batches_in_buffer=64,
        store_batch_size_prompts=max(1, 16 // context),
        train_batch_size_tokens=16,
        training_tokens=16 * 400,
        lr=3e-3,
        device="cpu",
        dtype="float32",
        n_checkpoints=0,
        checkpoint_path=None,
        output_path=folder,
        logger=LoggingConfig(log_to_wandb=False),
        n_eval_batches=0,
    )
    texts = Dataset.from_dict({"text": ["a text that the evaluation may read"] * 8})
    sae = LanguageModelSAETrainingRunner(config, override_dataset=texts).run()

seen = torch.cat(rows)
with torch.no_grad():
    error = (sae(seen.float()) - seen).square().sum() / (seen - seen.mean(dim=0)).square().sum()
print(json.dumps({"rows": seen.tolist(), "tokens": torch.cat(tokens).tolist(), "unexplained": float(error)}))
