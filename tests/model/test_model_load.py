"""Loading: what cannot be loaded is named, nothing is made up, and the fingerprint follows the content."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import byte_tokenizer, tiny_gpt2, tiny_llama
from transformers import dynamic_module_utils

import harvest
from harvest.errors import RequestError, WorkError
from harvest.model.fingerprint import of_checkpoint, of_model, of_tokenizer
from harvest.model.load import (
    checkpoint_dtype,
    context_limit,
    load_config,
    load_model,
    load_tokenizer,
    skeleton,
)
from harvest.settings.model import ModelSettings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_llama(vocab=300).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def settings(folder: Path, **more: Any) -> ModelSettings:
    return ModelSettings(name=str(folder), **more)


def load(folder: Path, dtype: str = "float32") -> Any:
    return load_model(settings(folder), load_config(settings(folder)), dtype, "cpu")


def test_a_folder_gives_its_own_weights_in_the_dtype_asked_for(folder: Path) -> None:
    model = load(folder)
    expected = load_file(folder / "model.safetensors")
    assert torch.equal(
        model.state_dict()["model.layers.1.mlp.down_proj.weight"], expected["model.layers.1.mlp.down_proj.weight"]
    )
    assert load(folder, "bfloat16").dtype == torch.bfloat16
    assert not model.training


@pytest.mark.parametrize(
    "key", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_a_checkpoint_that_lacks_a_weight_is_refused_and_not_filled_with_noise(folder: Path, key: str) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[key]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RequestError, match=f"lacks 1 weights of the model, the first is {key}"):
        load(folder)


def test_a_checkpoint_without_its_head_is_enough(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(folder).model.layers[0] is not None


def test_a_run_whose_weights_cannot_be_loaded_ends_as_failed_work(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"torn")
    job = {"model": {"name": str(folder)}, "data": {"path": "texts"}, "run": {"path": tmp_path / "run"}}
    with pytest.raises(WorkError, match=r"model\.name = .*cannot be loaded"):
        harvest.run(job, data=["ab"])


def test_the_skeleton_has_the_modules_and_no_memory(folder: Path) -> None:
    model = skeleton(load_config(settings(folder)), settings(folder))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert len(model.model.layers) == 3


def test_an_attention_that_does_not_exist_is_named_as_such(folder: Path) -> None:
    wrong = settings(folder, attention="telepathy")
    with pytest.raises(RequestError, match=r"^model\.attention = 'telepathy'"):
        skeleton(load_config(wrong), wrong)


@pytest.mark.parametrize(
    "name", ["no/such/folder", "missing.gguf", "x" * 5000, "package:no_such_package/m.gguf", "a b c", "/"]
)
def test_a_model_that_is_not_there_is_named_in_one_line(name: str) -> None:
    with pytest.raises(RequestError, match=r"^model\.name = ") as caught:
        load_config(ModelSettings(name=name))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_folder_without_a_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"has no config\.json, so it is no checkpoint"):
        load_config(settings(tmp_path))


def test_a_model_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    assert load_tokenizer(settings(tmp_path), None) is None


def test_the_fingerprint_changes_with_any_weight_and_with_nothing_else(folder: Path) -> None:
    first = of_checkpoint(settings(folder))
    os.utime(folder / "model.safetensors", ns=(1, 1))
    (folder / "README.md").write_text("a note")
    assert of_checkpoint(settings(folder)) == first
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-6
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert of_checkpoint(settings(folder)) != first


def test_the_fingerprint_of_an_object_follows_its_values_names_and_dtype() -> None:
    assert of_model(tiny_llama()) == of_model(tiny_llama())
    others = [tiny_llama(seed=1), tiny_llama(layers=2), tiny_gpt2(), tiny_llama().to(torch.bfloat16)]
    assert len({of_model(model) for model in [tiny_llama(), *others]}) == 5


def test_the_fingerprint_of_a_tokenizer_ignores_earlier_use_and_sees_any_change() -> None:
    tokenizer = byte_tokenizer()
    first = of_tokenizer(tokenizer)
    tokenizer("some text", truncation=True, max_length=3)
    assert of_tokenizer(tokenizer) == first
    others = [byte_tokenizer(bos=False), byte_tokenizer(eos_at_end=True), byte_tokenizer(chat_template="{{ 1 }}")]
    assert len({first, *map(of_tokenizer, others)}) == 4


def test_dtype_and_context_come_from_the_checkpoint(folder: Path) -> None:
    config = load_config(settings(folder))
    assert (checkpoint_dtype(config, settings(folder)), context_limit(config)) == ("float32", 64)
    tiny_llama().to(torch.bfloat16).save_pretrained(folder)
    assert checkpoint_dtype(load_config(settings(folder)), settings(folder)) == "bfloat16"
    assert checkpoint_dtype(config, settings(folder, dtype="float16")) == "float16"


REMOTE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class OurConfig(PretrainedConfig):
    model_type = "llama"  # as other code calls itself

    def __init__(self, vocab_size=64, hidden_size=8, num_hidden_layers=2, **more):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        super().__init__(**more)


class OurBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, states):
        return states + self.mix(states.cumsum(1)).tanh()


class OurModel(PreTrainedModel):
    config_class, base_model_prefix = OurConfig, "trunk"

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([OurBlock(config.hidden_size) for _ in range(config.num_hidden_layers)])
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids):
        states = self.words(input_ids)
        for block in self.layers:
            states = block(states)
        return (states,)


class OurLM(PreTrainedModel):
    config_class, base_model_prefix = OurConfig, "trunk"

    def __init__(self, config):
        super().__init__(config)
        self.trunk, self.head = OurModel(config), nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.trunk.words

    def forward(self, input_ids):
        return (self.head(self.trunk(input_ids)[0]),)
"""


def test_remote_code_with_a_language_model_alone_is_loaded_with_its_head_and_is_not_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "ours.py").write_text(REMOTE)
    code: dict[str, Any] = {"__name__": "ours"}
    exec(REMOTE, code)  # the same code, as the oracle
    torch.manual_seed(0)
    model = code["OurLM"](code["OurConfig"](dtype="float32"))
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    named = {"AutoConfig": "ours.OurConfig", "AutoModelForCausalLM": "ours.OurLM"}
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), "auto_map": named}))
    asked = {"name": str(folder), "trust_remote_code": True}
    job = {"model": asked, "data": {"ids": "i"}, "run": {"path": str(tmp_path / "run"), "threads": 1}}
    sites = ["residual", "module:head", "module:trunk.layers.{layer}.mix"]
    documents = [[5, 9, 3, 3], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
    run = harvest.run({**job, "capture": {"sites": sites}}, data=[{"i": ids} for ids in documents])
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([ids]))[0][0] for ids in documents])
    assert torch.allclose(run["module:head"][:], expected, atol=1e-5)
    assert run.names[:2] == ["residual.0", "residual.1"]
    with pytest.raises(RequestError, match=r"'mlp_input': 'llama' has none: .* not in the table of sites"):
        harvest.run(
            {**job, "capture": {"sites": ["mlp_input"]}, "run": {"path": str(tmp_path / "b")}}, data=[{"i": [1]}]
        )
