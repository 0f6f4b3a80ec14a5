"""Models, tokenizers, devices and caches that cannot be used: each is refused by name before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import byte_tokenizer, tiny_llama
from transformers import LlamaConfig, LlamaModel, ViTConfig, ViTModel

import harvest
from harvest.errors import DamageError, RequestError
from harvest.model.architectures import vocabulary_of
from harvest.model.cache import ActivationCache, ActivationRecord
from harvest.model.load import load_tokenizer, resolve_device
from harvest.settings.model import ModelSettings

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def refused(model: Any, folder: Path) -> str:
    with pytest.raises(RequestError) as caught:
        harvest.run({"run": {"path": str(folder / "run")}}, model=model, tokenizer=byte_tokenizer(), data=["abc"])
    assert not (folder / "run").exists()
    return str(caught.value)


def test_a_module_that_is_no_transformers_model_is_named(tmp_path: Path) -> None:
    told = "model: Linear is no transformers model (it has no config)"
    assert refused(torch.nn.Linear(2, 2), tmp_path) == told


def test_weights_of_a_dtype_that_no_forward_takes_here_are_named(tmp_path: Path) -> None:
    told = "model: its weights are float64; allowed are float32, bfloat16, float16"
    assert refused(tiny_llama(vocab=300).double(), tmp_path) == told


def test_a_model_without_values_is_named_by_its_first_weight(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = LlamaModel(LlamaConfig(vocab_size=300, **SIZES)).eval()
    told = refused(model, tmp_path)
    assert told.startswith("model: ")
    assert told.endswith(" is on the meta device, and nothing tells its values")


def test_a_model_of_pictures_is_refused() -> None:
    model = ViTModel(ViTConfig(image_size=8, patch_size=4, **SIZES))
    with pytest.raises(RequestError, match=r"^model\.name: 'vit' reads no token ids; allowed are models of text$"):
        vocabulary_of(model)


def test_a_device_that_is_none_or_not_here_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RequestError, match=r"^model\.device = 'gpu': allowed are 'auto', 'cpu', 'cuda', 'cuda:0'$"):
        resolve_device(ModelSettings(name="m", device="gpu"))
    with pytest.raises(RequestError, match=r"^model\.device = 'cuda:1': this machine has no CUDA device; allowed is"):
        resolve_device(ModelSettings(name="m", device="cuda:1"))
    assert resolve_device(ModelSettings(name="m")) == "cpu"


def test_a_folder_without_a_tokenizer_is_refused_with_the_files_that_would_make_one(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"^tokens\.tokenizer = '.*': no tokenizer; allowed is a folder with one of"):
        load_tokenizer(ModelSettings(name="m"), str(tmp_path))


def test_a_cache_with_other_tensors_than_its_records_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "turns.safetensors"
    record = ActivationRecord(
        participant="a", message_idx=0, layer=1, site="residual", tensor=torch.ones(3, 4), token_span=(0, 3)
    )
    cache = ActivationCache()
    cache.add(record)
    cache.save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file({**load_file(path), "1": torch.ones(2)}, path, metadata)
    with pytest.raises(DamageError, match=r"turns\.safetensors: damaged: the tensors are not those of its 1 records$"):
        ActivationCache.load(path)
