"""PEFT adapters: rows are those of the adapted model alone, and an adapter that is none for the model is refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import TOLERANCE_TINY, alone, rows_of, worst_error
from safetensors.torch import load_file, save_file
from tiny import byte_tokenizer, tiny_gpt2, tiny_llama
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM

import harvest
from harvest.errors import RequestError
from harvest.model.adapter import adapter_folder, refuse_adapter
from harvest.model.fingerprint import of_model
from harvest.model.load import load_config, load_model, skeleton
from harvest.settings.model import ModelSettings

peft = pytest.importorskip("peft", reason="the extra harvest[adapter] is not installed")

TEXTS = ["ab", "the second document is longer", "c", "and a fourth one"]
BLOCKS = {"llama": "model.layers", "gpt2": "transformer.h"}
SITES = ["residual", "attn_heads", "mlp_neurons", "module:{}.1.mlp.{}", "module_input:{}.1.mlp.{}", "final_norm"]
LAST = harvest.CaptureSpec(sites=("residual",), layers=-1)
DOWN = {"llama": "down_proj", "gpt2": "c_proj"}
MODELS: dict[str, Callable[..., Any]] = {"llama": tiny_llama, "gpt2": tiny_gpt2}
ATTENTION_AND_MLP = ["q_proj", "o_proj", "gate_proj", "down_proj"]
KINDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "lora": ("llama", lambda: peft.LoraConfig(r=4, lora_alpha=3, target_modules=ATTENTION_AND_MLP)),
    "lora-gpt2": ("gpt2", lambda: peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)),
    "dora": ("llama", lambda: peft.LoraConfig(r=2, use_dora=True, target_modules=ATTENTION_AND_MLP)),
    "rank-stable": ("llama", lambda: peft.LoraConfig(r=4, use_rslora=True, target_modules="all-linear")),
    "saved": ("llama", lambda: peft.LoraConfig(r=2, target_modules=["v_proj"], modules_to_save=["norm"])),
    "one-layer": ("llama", lambda: peft.LoraConfig(r=2, target_modules=["v_proj"], layers_to_transform=[1])),
    "ia3": ("llama", lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "loha": ("llama", lambda: peft.LoHaConfig(r=2, target_modules=ATTENTION_AND_MLP)),
    "lokr": ("llama", lambda: peft.LoKrConfig(r=2, target_modules=ATTENTION_AND_MLP)),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def base(folder: Path, family: str, **more: Any) -> Path:
    MODELS[family](vocab=300, **more).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def trained(folder: Path, family: str, config: Any, *, seed: int = 0, scale: float = 0.3) -> Path:
    """An adapter as peft saves it, none of whose weights is what it begins with."""
    model = peft.get_peft_model(MODELS[family](vocab=300), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    model.save_pretrained(folder)
    return folder


def lora(folder: Path, family: str = "llama", **more: Any) -> Path:
    return trained(folder, family, KINDS["lora" if family == "llama" else "lora-gpt2"][1](), **more)


def job(model: Path, run: Path, **settings: Any) -> dict[str, Any]:
    return {
        "model": {"name": str(model), **settings},
        "data": {"path": "texts"},
        "run": {"path": str(run), "threads": 1},
    }


def by_hand(model: Any, ids: list[int], names: list[str]) -> dict[str, torch.Tensor]:
    """What plain hooks see while the adapted model, as peft gives it, reads one document."""
    family = model.config.model_type
    points = {
        "residual": ("", False),
        "attn_heads": (".self_attn.o_proj", True),
        "mlp_neurons": (".mlp.down_proj", True),
    }
    if family == "gpt2":
        points |= {"attn_heads": (".attn.c_proj", True), "mlp_neurons": (".mlp.c_proj", True)}
    seen: dict[str, torch.Tensor] = {}
    handles = []
    for name in names:
        if ":" in name:
            kind, _, path = name.partition(":")
            before = kind == "module_input"
        elif name == "final_norm":
            path, before = {"llama": "model.norm", "gpt2": "transformer.ln_f"}[family], False
        else:
            site, layer = name.split(".")
            path, before = f"{BLOCKS[family]}.{layer}{points[site][0]}", points[site][1]

        def take(_m: Any, args: Any, *out: Any, name: str = name) -> None:
            value = out[0] if out else args[0]
            seen[name] = (value[0] if isinstance(value, tuple) else value).detach().clone()[0]

        module = model.base_model.model.get_submodule(path)
        handles.append((module.register_forward_pre_hook if before else module.register_forward_hook)(take))
    with torch.no_grad():
        model.eval()(input_ids=torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_adapted_model_for_each_document_alone(kind: str, tmp_path: Path) -> None:
    family, config = KINDS[kind]
    folder, adapter = base(tmp_path / "model", family), trained(tmp_path / "adapter", family, config())
    settings = job(folder, tmp_path / "run", adapter=str(adapter))
    settings["capture"] = {"sites": [site.format(BLOCKS[family], DOWN[family]) for site in SITES]}
    run = harvest.run(settings, data=TEXTS)
    plain = MODELS[family](vocab=300)
    model = peft.PeftModel.from_pretrained(MODELS[family](vocab=300), str(adapter))
    for document, text in enumerate(TEXTS):
        ids = byte_tokenizer()(text)["input_ids"]
        expected = by_hand(model, ids, run.names)
        for name in run.names:
            assert worst_error(run[name][rows_of(run, document)], expected[name]) < TOLERANCE_TINY, name
    unadapted = alone(plain, byte_tokenizer()(TEXTS[1])["input_ids"], ["residual.2"])["residual.2"]
    assert worst_error(run["residual.2"][rows_of(run, 1)], unadapted) > 1e-2, "these are the rows of the base model"
    assert [name for name in run.names if "lora" in name or "base_layer" in name] == []


def test_an_adapter_that_was_made_for_the_trunk_goes_there(tmp_path: Path) -> None:
    """As for embedding models, which have no head."""
    folder, trunk = base(tmp_path / "model", "llama"), tiny_llama(vocab=300).model
    config = peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False)
    model = peft.get_peft_model(trunk, config)
    model.save_pretrained(tmp_path / "adapter")
    run = harvest.run(job(folder, tmp_path / "run", adapter=str(tmp_path / "adapter")), data=TEXTS)
    (site,) = harvest.capture_activations(model, byte_tokenizer()(TEXTS[1])["input_ids"], LAST)
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([byte_tokenizer()(TEXTS[1])["input_ids"]]), output_hidden_states=True)
    assert worst_error(run["residual.1"][rows_of(run, 1)], hidden.hidden_states[2][0]) < TOLERANCE_TINY
    assert worst_error(run["residual.2"][rows_of(run, 1)], site.tensor) < TOLERANCE_TINY


def test_in_bfloat16_the_bits_are_those_of_the_adapted_model_and_not_of_merged_weights(tmp_path: Path) -> None:
    folder, adapter = base(tmp_path / "model", "llama"), lora(tmp_path / "adapter")
    asked = ModelSettings(name=str(folder), adapter=str(adapter), dtype="bfloat16")
    ours = load_model(asked, load_config(asked), "bfloat16", "cpu")
    theirs = peft.PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), str(adapter)
    )
    ids = torch.tensor([[5, 8, 13, 21]])
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
        assert not torch.equal(ours(ids).logits, theirs.merge_and_unload()(ids).logits)
    assert not ours.training


def test_a_run_goes_on_with_the_same_adapter_and_no_other(tmp_path: Path) -> None:
    folder, adapter = base(tmp_path / "model", "llama"), lora(tmp_path / "adapter")
    settings = job(folder, tmp_path / "run", adapter=str(adapter))
    harvest.run({**settings, "data": {**settings["data"], "limit": 2}}, data=TEXTS)
    assert len(harvest.run(settings, data=TEXTS).documents()) == 4
    for other, told in (
        (str(lora(tmp_path / "other", seed=1)), r"model\.adapter: '.*adapter' -> '.*other'"),
        (None, r"model\.adapter: '.*adapter' -> None"),
    ):
        with pytest.raises(RequestError, match=told):
            harvest.run(job(folder, tmp_path / "run", adapter=other), data=TEXTS)
    weights = load_file(adapter / "adapter_model.safetensors")
    next(iter(weights.values()))[0, 0] += 1e-3
    save_file(weights, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RequestError, match=r"content of the adapter: checksum \w+ -> checksum \w+"):
        harvest.run(settings, data=TEXTS)


def test_an_adapter_whose_settings_changed_is_another_adapter(tmp_path: Path) -> None:
    folder, adapter = base(tmp_path / "model", "llama"), lora(tmp_path / "adapter")
    settings = job(folder, tmp_path / "run", adapter=str(adapter))
    harvest.run(settings, data=TEXTS)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 99}))
    with pytest.raises(RequestError, match=r"content of the adapter"):
        harvest.run(settings, data=TEXTS)


# ---- what is refused ---------------------------------------------------------------------------------------------


def edited(**changes: Any) -> Callable[[Path], None]:
    def edit(adapter: Path) -> None:
        config = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps({**config, **changes}))

    return edit


def lacking(adapter: Path) -> None:
    weights = load_file(adapter / "adapter_model.safetensors")
    weights.pop(sorted(weights)[3])
    save_file(weights, adapter / "adapter_model.safetensors")


def beyond(adapter: Path) -> None:
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({**weights, "base_model.model.model.layers.9.x": torch.ones(1)}, adapter / "adapter_model.safetensors")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda a: (a / "adapter_config.json").unlink(), "the folder has no adapter_config.json"),
    "no weights": (lambda a: (a / "adapter_model.safetensors").unlink(), "the folder has no adapter_model.safetensors"),
    "pickle": (
        lambda a: (a / "adapter_model.safetensors").rename(a / "adapter_model.bin"),
        "no PEFT adapter with safe weights",
    ),
    "torn config": (lambda a: (a / "adapter_config.json").write_text("{"), "cannot be loaded"),
    "torn weights": (lambda a: (a / "adapter_model.safetensors").write_bytes(b"torn"), "cannot be read"),
    "prompts": (edited(peft_type="PROMPT_TUNING"), "its kind is PROMPT_TUNING; allowed are IA3, LOHA, LOKR, LORA"),
    "activated": (edited(alora_invocation_tokens=[3, 4]), "alora_invocation_tokens"),
    "no such module": (edited(target_modules=["w_x"]), "it is not for this model: Target modules"),
    "other modules": (edited(target_modules=["v_proj"]), "of its weights do not fit, the first is base_model"),
    "other rank": (edited(r=5), r"\[4, 32\] in the adapter, \[5, 32\] in the model"),
    "lacking": (lacking, "1 of its weights do not fit, .* none in the adapter"),
    "beyond": (beyond, r"1 of its weights do not fit, .*layers\.9\.x: \[1\] in the adapter, none in the model"),
}


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harvest.model.load.load_model", lambda *_: pytest.fail("the model was loaded"))


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_no_adapter_is_refused_before_anything_is_loaded(what: str, tmp_path: Path) -> None:
    folder, adapter = base(tmp_path / "model", "llama"), lora(tmp_path / "adapter")
    damage, told = DAMAGE[what]
    damage(adapter)
    with pytest.raises(RequestError, match=rf"^model\.adapter = '.*adapter': .*{told}") as caught:
        harvest.run(job(folder, tmp_path / "run", adapter=str(adapter)), data=TEXTS)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("family", "more", "told"),
    [
        ("gpt2", {}, "it is not for this model: Target modules"),
        ("llama", {"hidden_size": 32}, r"of its weights do not fit, .*16.* in the adapter, .*32.* in the model"),
        ("llama", {"layers": 2}, r"of its weights do not fit, .*layers\.2.* none in the model"),
    ],
)
def test_an_adapter_of_another_model_is_refused_before_anything_is_loaded(
    family: str, more: dict[str, Any], told: str, tmp_path: Path
) -> None:
    folder, adapter = base(tmp_path / "model", family, **more), lora(tmp_path / "adapter")
    with pytest.raises(RequestError, match=rf"^model\.adapter = '.*adapter': .*{told}"):
        harvest.run(job(folder, tmp_path / "run", adapter=str(adapter)), data=TEXTS)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("unloaded")
def test_without_the_extra_the_request_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, adapter = base(tmp_path / "model", "llama"), lora(tmp_path / "adapter")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "peft" else find(name, *more))
    with pytest.raises(RequestError, match=r"peft is not installed; pip install 'harvest\[adapter\]'$"):
        harvest.run(job(folder, tmp_path / "run", adapter=str(adapter)), data=TEXTS)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("name", ["no/such/folder", "a b", "some/adapter", "package:no_such_package/adapter"])
def test_an_adapter_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    folder = base(tmp_path / "model", "llama")
    with pytest.raises(RequestError, match=rf"^model\.adapter = '{name}': ") as caught:
        harvest.run(job(folder, tmp_path / "run", adapter=name), data=TEXTS)
    assert "\n" not in str(caught.value)


def test_an_adapter_of_the_hub_is_used_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, cached = "0123456789abcdef0123456789abcdef01234567", tmp_path / "hub" / "models--some--adapter"
    adapter = lora(tmp_path / "adapter")
    shutil.copytree(adapter, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert adapter_folder("some/adapter") == cached / "snapshots" / commit


def test_an_adapter_as_model_name_is_told_where_it_belongs(tmp_path: Path) -> None:
    adapter = lora(tmp_path / "adapter")
    with pytest.raises(RequestError, match=r"^model\.name = .*an adapter goes into model\.adapter"):
        load_config(ModelSettings(name=str(adapter)))


def put_on(asked: ModelSettings, config: Any) -> None:
    refuse_adapter(asked, skeleton(config, asked))
    load_model(asked, config, "float32", "cpu")  # only now it is known what `auto` comes to


def test_weights_beside_other_devices_or_on_the_disk_take_no_adapter(tmp_path: Path) -> None:
    folder, adapter = base(tmp_path / "model", "llama"), lora(tmp_path / "adapter")
    limits = {"max_memory": {"cpu": "12KB"}, "offload_folder": str(tmp_path / "away")}
    for spreading, more in (({"": "disk"}, {}), ({"model": 0, "lm_head": "cpu"}, {}), ("auto", limits)):
        asked = ModelSettings(name=str(folder), adapter=str(adapter), device_map=spreading, options=more)
        config = load_config(asked)
        with pytest.raises(RequestError, match=r"^model\.adapter = .*model\.device_map puts modules in memory beside"):
            put_on(asked, config)


def test_an_adapter_goes_onto_packed_weights(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra harvest[quantization] is not installed")
    config = tiny_llama(vocab=300, hidden_size=64).config
    config.intermediate_size = 64
    torch.manual_seed(0)  # of some draws a row nearly cancels, and shows the rounding of everything else
    whole = type(tiny_llama())(config)
    whole.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    peft.get_peft_model(
        whole, peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False)
    ).save_pretrained(tmp_path / "adapter")
    settings = job(tmp_path / "model", tmp_path / "run", adapter=str(tmp_path / "adapter"), quantization="nf4")
    run = harvest.run(settings, data=TEXTS)
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    packed = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=how, device_map={"": "cpu"}, dtype=torch.float32
    )
    model = peft.PeftModel.from_pretrained(packed, str(tmp_path / "adapter"))
    for document, text in enumerate(TEXTS):
        expected = by_hand(model, byte_tokenizer()(text)["input_ids"], run.names)
        for name in run.names:
            assert worst_error(run[name][rows_of(run, document)], expected[name]) < TOLERANCE_TINY


# ---- objects of the caller's -------------------------------------------------------------------------------------


def test_an_adapted_object_is_captured_with_its_adapter_and_told_from_others(tmp_path: Path) -> None:
    adapter = lora(tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(tiny_llama(vocab=300), str(adapter))
    settings = {"run": {"path": str(tmp_path / "run"), "threads": 1}}
    run = harvest.run(settings, model=model, tokenizer=byte_tokenizer(), data=TEXTS)
    expected = by_hand(model, byte_tokenizer()(TEXTS[1])["input_ids"], run.names)
    for name in run.names:
        assert worst_error(run[name][rows_of(run, 1)], expected[name]) < TOLERANCE_TINY
    again = peft.PeftModel.from_pretrained(tiny_llama(vocab=300), str(adapter))
    assert of_model(again) == of_model(model)
    again.peft_config["default"].lora_alpha = 99  # its weights are the same, what it computes is not
    assert of_model(again) != of_model(model)
    with pytest.raises(RequestError, match=r"^model\.adapter = 'x': a model object is given"):
        harvest.run({**settings, "model": {"name": "m", "adapter": "x"}}, model=model, data=TEXTS)


@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_an_adapter_of_virtual_tokens_is_refused_and_not_left_out(kind: Any, tmp_path: Path) -> None:
    model = peft.get_peft_model(tiny_llama(vocab=300), kind(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(RequestError, match=r"its adapter 'default' is P.*_TUNING, whose virtual tokens .* as LoRA"):
        harvest.capture_activations(model, [1, 2, 3], harvest.CaptureSpec())
    with pytest.raises(RequestError, match=r"virtual tokens"):
        harvest.run({"run": {"path": str(tmp_path / "run")}}, model=model, tokenizer=byte_tokenizer(), data=TEXTS)
    assert not (tmp_path / "run").exists()
