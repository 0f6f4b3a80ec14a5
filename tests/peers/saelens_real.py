"""Run by the interpreter of an environment with sae-lens: one SAE from an export, one from the model itself.

python saelens_real.py MODEL EXPORT HOOK CONTEXT WIDTH
"""

from __future__ import annotations

import json
import sys
import tempfile

import torch
from datasets import Dataset, load_from_disk
from sae_lens import (
    LanguageModelSAERunnerConfig,
    LanguageModelSAETrainingRunner,
    LoggingConfig,
    StandardTrainingSAEConfig,
)

model, export, hook, context, width = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
cached = load_from_disk(export).with_format("torch")
rows = torch.cat([row[hook] for row in cached])
tokens = Dataset.from_dict({"input_ids": [row["token_ids"].tolist() for row in cached]})


def unexplained(sae: torch.nn.Module) -> float:
    """Share of each row's square that is not reconstructed, on average."""
    with torch.no_grad():
        return float(((sae(rows) - rows).square().sum(dim=1) / rows.square().sum(dim=1)).mean())


def train(**source: object) -> tuple[float, float]:
    """Before and after; the same seed, settings and number of steps whatever the source of the rows."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config = LanguageModelSAERunnerConfig(
            sae=StandardTrainingSAEConfig(d_in=width, d_sae=2 * width, l1_coefficient=0.01),
            model_name=model,
            model_class_name="AutoModelForCausalLM",
            dataset_path="unused",
            is_dataset_tokenized=True,
            hook_name=hook,
            context_size=context,
            prepend_bos=False,
            n_batches_in_buffer=8,
            store_batch_size_prompts=4,
            train_batch_size_tokens=128,
            training_tokens=128 * 48,
            lr=3e-3,
            device="cpu",
            dtype="float32",
            n_checkpoints=0,
            checkpoint_path=None,
            output_path=folder,
            logger=LoggingConfig(log_to_wandb=False),
            n_eval_batches=0,
            **source,
        )
        runner = LanguageModelSAETrainingRunner(config, override_dataset=tokens)
        assert (runner.activations_store.cached_activation_dataset is None) == (not source)
        before = unexplained(runner.sae)
        return before, unexplained(runner.run())


from_export = train(use_cached_activations=True, cached_activations_path=export)
from_model = train()
print(json.dumps({"export": from_export, "model": from_model}))
