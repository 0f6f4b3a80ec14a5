"""Weights packed by bitsandbytes: rows are those of the packed model alone, and what cannot be packed is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import alone, rows_of, worst_error
from plainrun import first_difference, read_plain
from tiny import BOS, EOS, amplify, byte_tokenizer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import harvest
from harvest.errors import RequestError
from harvest.model import quantization
from harvest.model.load import load_config, load_model, skeleton, weight_bytes
from harvest.settings.model import ModelSettings

pytest.importorskip("bitsandbytes", reason="the extra harvest[quantization] is not installed")

TEXTS = ["ab", "the second document is longer", "c", "and a fourth one"]
BY_HAND = {
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
}
"""What users write for transformers itself."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose layers are whole blocks of 64, which bitsandbytes asks for on a CPU."""
    path = tmp_path_factory.mktemp("quantized") / "model"
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    amplify(LlamaForCausalLM(config)).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def job(folder: Path, run: Path, **model: Any) -> dict[str, Any]:
    return {
        "model": {"name": str(folder), **model},
        "capture": {"sites": ["residual", "attn", "mlp"]},
        "data": {"path": "texts"},
        "run": {"path": str(run), "threads": 1},
    }


def by_hand(folder: Path, how: str) -> Any:
    given = {"quantization_config": BY_HAND[how], "device_map": {"": "cpu"}, "dtype": torch.float32}
    return AutoModelForCausalLM.from_pretrained(folder, **given).eval()


@pytest.mark.parametrize("how", BY_HAND)
def test_rows_are_those_of_the_packed_model_for_each_document_alone(how: str, folder: Path, tmp_path: Path) -> None:
    run = harvest.run(job(folder, tmp_path / "run", quantization=how), data=TEXTS)
    packed, plain = by_hand(folder, how), LlamaForCausalLM.from_pretrained(folder)
    assert "bit" in type(packed.model.layers[0].mlp.down_proj).__name__
    for document, text in enumerate(TEXTS):
        ids = byte_tokenizer()(text)["input_ids"]
        expected, whole = alone(packed, ids, run.names), alone(plain, ids, run.names)
        for name in run.names:
            stored = run[name][rows_of(run, document)]
            assert worst_error(stored, expected[name]) < 1e-5
            assert worst_error(stored, whole[name]) > 1e-3, "these are the rows of the model as it was"
    (path,) = Path(run.path, "ledger").glob("f*.json")
    record = json.loads(path.read_text())
    assert set(record["self_check"]) == set(run.names)
    assert max(record["self_check"].values()) < 1e-5
    assert "bitsandbytes" in record["environment"]


@pytest.mark.parametrize("how", BY_HAND)
def test_a_packed_run_has_the_same_bits_again_and_resumes_in_no_other_way(
    how: str, folder: Path, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        harvest.run(job(folder, tmp_path / name, quantization=how), data=TEXTS)
    assert first_difference(read_plain(tmp_path / "first"), read_plain(tmp_path / "second")) is None
    other = {"nf4": "int8", "int8": None}[how]
    with pytest.raises(RequestError, match=f"model.quantization: '{how}' -> {other!r}"):
        harvest.run(job(folder, tmp_path / "first", quantization=other), data=TEXTS)


def test_int8_rounds_by_the_whole_batch_so_that_windows_run_one_by_one(folder: Path, tmp_path: Path) -> None:
    packed = by_hand(folder, "int8")
    ids = torch.tensor([[5, 8, 13, 21], [9, 200, 3, 7]])
    spec = harvest.CaptureSpec(sites=("residual",), layers=[1])
    with torch.no_grad():
        together = packed.model(ids).last_hidden_state[:1]
        assert worst_error(together, packed.model(ids[:1]).last_hidden_state) > 1e-3, "else this is not needed any more"
    with pytest.raises(RequestError, match="int8 rounds a token by the largest values of all tokens"):
        harvest.capture_activations(packed, ids, spec)
    with pytest.raises(RequestError, match="allowed is one, unpadded"):
        harvest.capture_activations(packed, ids[0], spec, attention_mask=[0, 1, 1, 1])
    (found,) = harvest.capture_activations(packed, ids[0], spec)
    assert torch.equal(found.tensor, alone(packed, ids[0], ["residual.1"])["residual.1"])
    for batching in ("sorted", "packed", "concatenated"):
        settings = {**job(folder, tmp_path / "run", quantization="int8"), "tokens": {"batching": batching}}
        with pytest.raises(RequestError, match=rf"^tokens\.batching = '{batching}': .*allowed is 'auto'"):
            harvest.run(settings, data=TEXTS)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_was_stored_packed_runs_as_it_is(folder: Path, tmp_path: Path) -> None:
    packed = by_hand(folder, "int8")
    packed.save_pretrained(tmp_path / "packed")
    byte_tokenizer().save_pretrained(tmp_path / "packed")
    run = harvest.run(job(tmp_path / "packed", tmp_path / "run"), data=TEXTS)
    for document, text in enumerate(TEXTS):
        expected = alone(packed, byte_tokenizer()(text)["input_ids"], run.names)
        for name in run.names:
            assert worst_error(run[name][rows_of(run, document)], expected[name]) < 1e-5
    with pytest.raises(
        RequestError, match=r"^model\.quantization = 'nf4': the checkpoint is quantized already \(bitsa"
    ):
        harvest.run(job(tmp_path / "packed", tmp_path / "other", quantization="nf4"), data=TEXTS)


@pytest.mark.parametrize("how", BY_HAND)
def test_modules_inside_a_packed_model_are_found_with_their_widths(how: str, folder: Path) -> None:
    packed = by_hand(folder, how)
    sites = ("mlp_neurons.1", "module:model.layers.1.mlp.down_proj", "module_input:model.layers.1.mlp.down_proj")
    neurons, out, into = harvest.capture_activations(packed, [5, 8, 13], harvest.CaptureSpec(sites=sites))
    assert torch.equal(neurons.tensor, into.tensor)
    assert (into.tensor.shape, out.tensor.shape) == ((3, 128), (3, 64))


@pytest.mark.parametrize(
    ("settings", "device", "told"),
    [
        ({}, "mps", "not on model.device = 'mps'; allowed are cpu, cuda"),
        ({"device_map": {"model": "cpu", "lm_head": "disk"}}, "cuda", "puts modules in memory or on the disk"),
        ({"device_map": {"model": 0, "lm_head": "cpu"}}, "cuda", "puts modules in memory or on the disk"),
    ],
)
def test_places_that_cannot_hold_packed_weights_are_refused(
    settings: dict[str, Any], device: str, told: str, folder: Path
) -> None:
    asked = ModelSettings(name=str(folder), quantization="int8", **settings)
    with pytest.raises(RequestError, match=rf"^model\.quantization = 'int8': .*{told}"):
        quantization.refuse_quantization(asked, load_config(asked), device)


def test_a_gguf_file_is_quantized_already(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(RequestError, match=r"^model\.quantization = 'nf4': the weights of a \.gguf file are"):
        quantization.refuse_quantization(ModelSettings(name=str(tmp_path / "m.gguf"), quantization="nf4"), None, "cpu")


def test_without_the_extra_the_request_is_refused_with_the_way_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(RequestError, match=r"bitsandbytes is not installed; pip install 'harvest\[quantization\]'$"):
        harvest.run(job(folder, tmp_path / "run", quantization="nf4"), data=TEXTS)
    assert not (tmp_path / "run").exists()


def test_an_object_of_the_callers_is_not_packed_behind_its_back(folder: Path, tmp_path: Path) -> None:
    settings = job(folder, tmp_path / "run", quantization="nf4")
    with pytest.raises(RequestError, match=r"^model\.quantization = 'nf4': a model object is given"):
        harvest.run(settings, model=by_hand(folder, "nf4"), tokenizer=byte_tokenizer(), data=TEXTS)


@pytest.mark.parametrize("how", BY_HAND)
def test_the_plan_prices_packed_weights_as_they_are_held(how: str, folder: Path) -> None:
    asked = ModelSettings(name=str(folder), quantization=how)
    config = load_config(asked)
    packed = load_model(asked, config, "float32", "cpu")
    held = sum(parameter.numel() * parameter.itemsize for parameter in packed.parameters())
    priced = weight_bytes(skeleton(config, asked), "float32", how)
    assert held <= priced <= 1.1 * held
