"""Models that accelerate has spread: the same rows as the whole model gives, and everything left where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import attach_align_device_hook
from oracle import alone, rows_of, worst_error
from tiny import byte_tokenizer, tiny_gpt2, tiny_llama

import harvest
from harvest.model.fingerprint import of_model
from harvest.model.load import load_config, load_model
from harvest.settings.model import ModelSettings

TEXTS = ["ab", "the second document is longer", "c", "and a fourth one"]
BLOCKS = {"llama": "model.layers", "gpt2": "transformer.h"}
MODELS: dict[str, Callable[[], Any]] = {"llama": lambda: tiny_llama(vocab=300), "gpt2": lambda: tiny_gpt2(vocab=300)}
IDS = torch.tensor([[5, 8, 13, 21, 34, 55, 89], [9, 9, 2, 3, 5, 7, 11]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]])
SPEC = harvest.CaptureSpec(sites=("residual", "attn", "mlp_input", "attn_heads", "embedding", "final_norm"))


def device_map(model: Any) -> dict[str, str]:
    """Every leaf in memory, but for the second block, which is on the disk."""
    blocks = BLOCKS[model.config.model_type]
    leaves = [name for name, module in model.named_modules() if name and not list(module.children())]
    places = {name: "cpu" for name in leaves if not name.startswith(f"{blocks}.")}
    return {**places, **{f"{blocks}.{layer}": "disk" if layer == 1 else "cpu" for layer in range(3)}}


def spread(model: Any, how: str, folder: Path) -> Any:
    if how == "cpu":
        cpu_offload(model)
    elif how == "disk":
        disk_offload(model, str(folder))
    elif how == "mixed":
        dispatch_model(model, device_map(model), main_device="cpu", offload_dir=str(folder))
    else:  # whole blocks are fetched at once, so that a forward which ends within one has them in hand
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        blocks = ["LlamaDecoderLayer", "GPT2Block"]
        attach_align_device_hook(
            model, execution_device="cpu", offload=True, weights_map=weights, preload_module_classes=blocks
        )
    return model


def left(model: Any) -> dict[str, Any]:
    """What must not change: where every tensor is, accelerate's hooks and the forwards that it wrapped."""
    tensors = {name: tensor.device for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    hooks = {name: (getattr(m, "_hf_hook", None), m.__dict__.get("forward")) for name, m in model.named_modules()}
    return {"tensors": tensors, "hooks": hooks, "ours": [len(m._forward_hooks) for m in model.modules()]}


@pytest.mark.parametrize("how", ["cpu", "disk", "mixed", "blocks"])
@pytest.mark.parametrize("family", MODELS)
def test_a_spread_model_gives_the_same_bits_and_is_left_as_found(family: str, how: str, tmp_path: Path) -> None:
    whole, model = MODELS[family](), spread(MODELS[family](), how, tmp_path)
    before = left(model)
    assert torch.device("meta") in before["tensors"].values()
    expected = harvest.capture_activations(whole, IDS, SPEC, MASK)
    found = harvest.capture_activations(model, IDS, SPEC, MASK)
    assert [site[:2] for site in found] == [site[:2] for site in expected]
    for ours, theirs in zip(found, expected):
        assert torch.equal(ours.tensor, theirs.tensor)
        assert ours.tensor.device.type == "cpu"
    assert left(model) == before


@pytest.mark.parametrize("how", ["cpu", "blocks"])
@pytest.mark.parametrize("site", ["attn.1", "attn_heads.1", "module:{}.1.mlp", "module_input:{}.1.mlp"])
def test_a_forward_that_ends_within_a_block_puts_its_weights_away(how: str, site: str, tmp_path: Path) -> None:
    whole, model = MODELS["llama"](), spread(MODELS["llama"](), how, tmp_path)
    before, spec = left(model), harvest.CaptureSpec(sites=(site.format(BLOCKS["llama"]),))
    (expected,) = harvest.capture_activations(whole, IDS, spec, MASK)
    (found,) = harvest.capture_activations(model, IDS, spec, MASK)
    assert torch.equal(found.tensor, expected.tensor)
    assert left(model) == before


def test_weights_are_put_away_after_an_error_of_the_callers_hook_too(tmp_path: Path) -> None:
    model = spread(MODELS["llama"](), "blocks", tmp_path)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    before = left(model)
    with pytest.raises(ZeroDivisionError):
        harvest.capture_activations(model, IDS, SPEC, MASK)
    assert left(model) == before
    handle.remove()


@pytest.mark.parametrize("how", ["cpu", "disk", "mixed", "blocks"])
def test_the_fingerprint_is_that_of_the_values_wherever_they_are(how: str, tmp_path: Path) -> None:
    assert of_model(spread(MODELS["llama"](), how, tmp_path)) == of_model(MODELS["llama"]())
    assert of_model(spread(tiny_llama(vocab=300, seed=1), how, tmp_path / "other")) != of_model(MODELS["llama"]())


# ---- whole runs --------------------------------------------------------------------------------------------------


@pytest.fixture(params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    """A folder with a model, and the model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = MODELS[request.param]()
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model", model


def run(folder: Path, tmp_path: Path, name: str = "run", **settings: Any) -> Any:
    job = {
        "model": {"name": str(folder), **settings},
        "capture": {"sites": ["residual", "attn", "mlp"]},
        "data": {"path": "texts"},
        "run": {"path": str(tmp_path / name), "threads": 1},
    }
    return harvest.run(job, data=TEXTS)


def checked(run: Any, model: Any) -> None:
    """Every row equals a hook on the whole model for its document alone, and the self-check passed."""
    for document, text in enumerate(TEXTS):
        expected = alone(model, byte_tokenizer()(text)["input_ids"], run.names)
        for name in run.names:
            assert worst_error(run[name][rows_of(run, document)], expected[name]) < 1e-5
    (record,) = [json.loads(path.read_text()) for path in Path(run.path, "ledger").glob("f*.json")]
    assert set(record["self_check"]) == set(run.names)
    assert max(record["self_check"].values()) < 1e-5


def of_run(loaded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes every model that a run loads."""

    def noting(*given: Any) -> Any:
        loaded.append(load_model(*given))
        return loaded[-1]

    monkeypatch.setattr("harvest.model.load.load_model", noting)


@pytest.mark.parametrize(
    "spreading",
    [
        {"device_map": "auto"},
        {"device_map": "auto", "options": {"max_memory": {"cpu": "12KB"}}},
        {"device_map": {"": "disk"}},
        {"device_map": "mixed"},
    ],
    ids=["auto", "auto-limited", "disk", "mixed"],
)
def test_a_run_over_a_spread_model_stores_what_the_whole_model_computes(
    checkpoint: tuple[Path, Any], spreading: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = checkpoint
    if spreading["device_map"] == "mixed":
        spreading = {"device_map": device_map(model)}
    if spreading["device_map"] != "auto":
        spreading = {**spreading, "options": {"offload_folder": str(tmp_path / "away")}}
    loaded: list[Any] = []
    of_run(loaded, monkeypatch)
    checked(run(folder, tmp_path, **spreading), model)
    on_disk = [name for name, parameter in loaded[0].named_parameters() if parameter.is_meta]
    assert bool(on_disk) == (spreading != {"device_map": "auto"})


def test_the_memory_of_a_device_is_limited_by_its_number(
    checkpoint: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TOML has no keys that are numbers, and accelerate takes no others for devices."""
    limits = {"0": "1GiB", "11": "2GiB", "cpu": "3GiB"}
    settings = ModelSettings(name=str(checkpoint[0]), device_map="auto", options={"max_memory": limits})
    seen: dict[str, Any] = {}

    def from_pretrained(*_: Any, **given: Any) -> Any:
        seen.update(given)
        return checkpoint[1], {"missing_keys": []}

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    load_model(settings, load_config(settings), "float32", "cpu")
    assert seen["max_memory"] == {0: "1GiB", 11: "2GiB", "cpu": "3GiB"}
    assert seen["device_map"] == "auto"


def test_a_run_over_an_object_that_accelerate_spread_goes_on_as_one_over_the_whole(tmp_path: Path) -> None:
    model = spread(MODELS["llama"](), "cpu", tmp_path)
    job = {"capture": {"sites": ["residual"]}, "run": {"path": str(tmp_path / "run"), "threads": 1}}
    before = left(model)
    first = harvest.run(job, model=model, tokenizer=byte_tokenizer(), data=TEXTS)
    assert left(model) == before
    again = harvest.run(job, model=MODELS["llama"](), tokenizer=byte_tokenizer(), data=TEXTS)
    assert torch.equal(first["residual.2"][:], again["residual.2"][:])
