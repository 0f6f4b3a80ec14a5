"""SAELens: `CacheActivationsRunner`, which stores one hook a run; a run for each site, one after another."""

from __future__ import annotations

import tempfile
import time

from answering import answer, given, total
from datasets import Dataset
from sae_lens import CacheActivationsRunner, CacheActivationsRunnerConfig

MODULES = {"residual": "", "attn": ".self_attn", "mlp": ".mlp", "mlp_input": ".post_attention_layernorm"}
"""Site -> where a Llama block has it."""

work = given()
windows, tokens = work.windows.shape
dataset = Dataset.from_dict({"input_ids": work.windows.tolist()})


def cache(site: str) -> tuple[float, float]:
    """(seconds of the run, loading the model in none of them; total of what is on disk)"""
    with tempfile.TemporaryDirectory() as folder:
        hook = f"model.layers.{work.layer}{MODULES[site]}"
        config = CacheActivationsRunnerConfig(
            dataset_path="unused",
            model_name=work.model,
            model_class_name="AutoModelForCausalLM",
            model_batch_size=work.batch,
            hook_name=hook,
            d_in=work.width,
            training_tokens=windows * tokens,
            context_size=tokens,
            new_cached_activations_path=f"{folder}/cached",
            shuffle=False,
            buffer_size_gb=windows * tokens * work.width * 4 / 1e9,  # all in one shard
            prepend_bos=False,
            device="cpu",
        )
        runner = CacheActivationsRunner(config, override_dataset=dataset)
        begin = time.perf_counter()
        cached = runner.run()
        seconds = time.perf_counter() - begin
        return seconds, total(cached.with_format("numpy")[hook])


def once() -> tuple[float, list[float]]:
    found = [cache(site) for site in work.sites]
    return sum(seconds for seconds, _ in found), [rows for _, rows in found]


answer(once)
