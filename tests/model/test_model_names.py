"""Which names a model has: layers, spellings, modules of the user's, architectures that are not in the table."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import CONFIGS, tiny_family
from oracle import TOLERANCE_TINY, worst_error
from test_model_capture import DOCUMENTS, capture
from tiny import TINY, tiny_gpt2, tiny_llama

from harvest.errors import RequestError
from harvest.model.architectures import ARCHITECTURES
from harvest.model.interface import CaptureSpec, capture_activations
from harvest.model.sites import decoder_layers, resolve_names


@pytest.mark.parametrize("layers", [[3], [-4], [0, 99]])
def test_a_layer_beyond_the_ends_is_refused_with_the_range(layers: list[int]) -> None:  # E16
    with pytest.raises(RequestError, match=r"capture\.layers = .*3 layers; allowed are 0 to 2"):
        resolve_names(tiny_llama(), ["residual"], layers)


def test_layers_may_count_from_the_end_and_repeat() -> None:
    names = resolve_names(tiny_llama(), ["mlp", "residual", "blocks.1.hook_resid_post", "attn.-1"], [-1, 0, 2])
    assert [str(n) for n in names] == ["mlp.0", "mlp.2", "residual.0", "residual.2", "residual.1", "attn.2"]


def test_a_layer_of_one_site_may_be_asked_for_by_name() -> None:
    names = resolve_names(tiny_llama(), ["attn.0", "attn.-1", "blocks.1.attn.hook_z"], [1])
    assert [str(n) for n in names] == ["attn.0", "attn.2", "attn_heads.1"]
    with pytest.raises(RequestError, match=r"capture\.sites = 'attn\.3': the model has 3 layers; allowed are 0 to 2"):
        resolve_names(tiny_llama(), ["attn.3"], "all")


LENS = {
    "hook_resid_pre": "residual_pre",
    "hook_resid_mid": "residual_mid",
    "hook_resid_post": "residual",
    "hook_attn_out": "attn_contribution",
    "hook_mlp_out": "mlp_contribution",
    "attn.hook_z": "attn_heads",
    "mlp.hook_post": "mlp_neurons",
}


@pytest.mark.parametrize("hook", LENS)
def test_names_of_transformer_lens_are_the_same_names(hook: str) -> None:
    theirs, ours = (resolve_names(tiny_llama(), [site], [1]) for site in (f"blocks.1.{hook}", LENS[hook]))
    assert theirs == ours


@pytest.mark.parametrize(
    ("site", "why"),
    [
        ("resid", "no such site; this model has residual, residual_pre, residual_mid, attn, mlp, "),
        ("blocks.0.hook_mlp_in", "differs between versions of TransformerLens; use residual_mid or mlp_input"),
        ("blocks.0.hook_in", "no such site; this model has residual, "),
        ("blocks.3.hook_resid_post", "3 layers; allowed are 0 to 2"),
        ("ln_final.hook_normalized", "lies before the norm's gain, .* use final_norm"),
        ("embedding.0", "no such site; this model has .*embedding, final_norm, module:PATH, module_input:PATH"),
        ("router", "'llama' has none: it has no such part; this model has residual, "),
        ("module:", "the model has no module ''"),
        ("modul:model.norm", "no such site"),
    ],
)
def test_what_is_no_site_is_refused_with_those_there_are(site: str, why: str) -> None:
    with pytest.raises(RequestError, match=rf"capture\.sites = '{site}'.*{why}"):
        resolve_names(tiny_llama(), [site], "all")


# ---- modules of the user's ---------------------------------------------------------------------------------------


def seen_at(model: Any, path: str, ids: list[int], side: str = "output") -> torch.Tensor:
    """[T, values] by a plain hook, one document alone."""
    seen: list[torch.Tensor] = []
    module = model.get_submodule(path)
    if side == "output":
        handle = module.register_forward_hook(
            lambda _m, _a, out: seen.append(out[0] if isinstance(out, tuple) else out)
        )
    else:
        handle = module.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    with torch.no_grad():
        model(torch.tensor([ids]))
    handle.remove()
    return seen[0].reshape(len(ids), -1)


MODULE_PATHS = {
    "llama": ("model.layers.1.mlp.up_proj", "model.embed_tokens", "model.layers.0.self_attn", "lm_head", "model.norm"),
    "gpt2": (
        "transformer.h.1.attn.c_attn",
        "transformer.wpe",
        "transformer.h.2.mlp.act",
        "transformer.drop",
        "lm_head",
    ),
    "neox": ("gpt_neox.layers.0.attention.query_key_value", "gpt_neox.embed_in", "lm_head"),
}


@pytest.mark.parametrize("family", MODULE_PATHS)
def test_a_module_of_the_users_is_captured_as_a_hook_on_it_sees_it(family: str) -> None:
    model = TINY[family]()
    paths = [path for path in MODULE_PATHS[family] if path != "transformer.wpe"]
    names = resolve_names(model, [f"module:{path}" for path in paths] + ["module_input:" + paths[0]], "all")
    assert [str(name) for name in names] == [f"module:{path}" for path in paths] + [f"module_input:{paths[0]}"]
    found, row = capture(model, names, DOCUMENTS), 0
    for ids in DOCUMENTS:
        for name in names:
            expected = seen_at(model, name.module, ids, name.reads)
            assert name.width == expected.shape[1]
            assert worst_error(found[str(name)][row : row + len(ids)], expected) < TOLERANCE_TINY, name
        row += len(ids)


def test_a_path_with_layer_stands_for_every_layer_asked_for() -> None:
    model = tiny_llama()
    names = resolve_names(model, ["module:model.layers.{layer}.mlp.gate_proj"], [0, -1])
    assert [(str(n), n.layer, n.width) for n in names] == [
        ("module:model.layers.0.mlp.gate_proj", 0, 32),
        ("module:model.layers.2.mlp.gate_proj", 2, 32),
    ]
    assert [n.layer for n in resolve_names(model, ["module_input:model.layers.{layer}.mlp"], "all")] == [0, 1, 2]
    with pytest.raises(
        RequestError, match=r"has no module 'model\.layers\.0\.ml'; the nearest are model\.layers\.0\.mlp"
    ):
        resolve_names(model, ["module:model.layers.{layer}.ml"], "all")


@pytest.mark.parametrize("shared", ["", ".self_attn"])
def test_layers_that_share_a_module_are_told_apart(shared: str) -> None:
    """Against a model in which every layer has a copy of its own."""
    model = tiny_llama()
    if shared:
        model.model.layers[2].self_attn = model.model.layers[0].self_attn
    else:
        model.model.layers[2] = model.model.layers[0]
    copies = tiny_llama()
    for layer, block in enumerate(model.model.layers):
        copies.model.layers[layer] = copy.deepcopy(block)
    sites = ["residual", "attn", "attn_heads", "mlp_input", "module:model.layers.{layer}.self_attn.q_proj"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = resolve_names(model, sites, "all")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())  # the probe put all back
    found, expected = capture(model, names, DOCUMENTS), capture(copies, resolve_names(copies, sites, "all"), DOCUMENTS)
    for name in map(str, names):
        assert worst_error(found[name], expected[name]) < TOLERANCE_TINY, name
    for layer, site, tensor in capture_activations(model, DOCUMENTS[0], CaptureSpec(sites=sites)):
        name = site if ":" in site else f"{site}.{layer}"
        assert worst_error(tensor, expected[name][: len(DOCUMENTS[0])]) < TOLERANCE_TINY, name


def test_a_module_without_one_vector_per_token_is_refused_before_anything_runs() -> None:
    with pytest.raises(RequestError, match=r"'module:transformer\.wpe': its output is not one vector per token"):
        resolve_names(tiny_gpt2(), ["module:transformer.wpe"], "all")
    with pytest.raises(RequestError, match=r"'module:model\.rotary_emb': its output is not one vector per token"):
        resolve_names(tiny_llama(), ["module:model.rotary_emb"], "all")
    with pytest.raises(RequestError, match="its input is not one vector per token"):  # ids
        resolve_names(tiny_llama(), ["module_input:model.embed_tokens"], "all")


def test_a_module_that_text_never_reaches_is_refused() -> None:
    model = tiny_llama()
    model.model.spare = torch.nn.Linear(3, 5)
    with pytest.raises(RequestError, match=r"'module:model\.spare': it does not run when text is read"):
        resolve_names(model, ["module:model.spare"], "all")


def test_heads_kept_apart_are_one_row_per_token() -> None:
    model = tiny_family("qwen3")
    names = resolve_names(model, ["module:model.layers.{layer}.self_attn.q_norm"], [1])
    assert names[0].width == 24
    found = capture(model, names, DOCUMENTS)[str(names[0])]
    expected = seen_at(model, names[0].module, DOCUMENTS[0])
    assert worst_error(found[: len(DOCUMENTS[0])], expected) < TOLERANCE_TINY


def test_a_mixtures_flattened_tokens_come_back_to_their_documents() -> None:
    model = tiny_family("mixtral")
    names = resolve_names(model, ["module:model.layers.1.mlp.experts", "module_input:model.layers.1.mlp.gate"], "all")
    found, row = capture(model, names, DOCUMENTS), 0
    for ids in DOCUMENTS:
        for name in names:
            expected = seen_at(model, name.module, ids, name.reads)
            assert worst_error(found[str(name)][row : row + len(ids)], expected) < TOLERANCE_TINY
        row += len(ids)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "gpt_oss", "deepseek_v3", "bert", "mamba", "bloom"])
def test_widths_are_told_from_the_config_without_weights(family: str) -> None:
    model, shapes = tiny_family(family), {}

    def see(path: str, output: Any) -> None:
        while not isinstance(output, torch.Tensor):
            output = next(iter(output.values() if hasattr(output, "values") else output))
        if output.is_floating_point():
            shapes.setdefault(path, output.shape)

    handles = [
        module.register_forward_hook(lambda _m, _a, out, path=path: see(path, out))
        for path, module in model.named_modules()
    ]
    with torch.no_grad():
        model(torch.arange(2, 24).reshape(2, 11))
    for handle in handles:
        handle.remove()
    widths = {path: shape[2:].numel() for path, shape in shapes.items() if path and shape[:2] == (2, 11)}
    widths |= {path: shape[1:].numel() for path, shape in shapes.items() if shape[0] == 22}
    assert len(widths) > 10
    with torch.device("meta"):
        skeleton = type(model)(model.config)
    names = resolve_names(skeleton, [f"module:{path}" for path in widths], "all")
    assert {name.module: name.width for name in names} == widths


# ---- architectures that are not in the table ---------------------------------------------------------------------


@pytest.mark.parametrize("family", ["helium", "qwen2_moe"])
def test_an_unknown_architecture_with_one_stack_of_blocks_has_residual_and_modules(family: str) -> None:
    model = tiny_family(family)
    sites = ["residual", "module:model.layers.{layer}.self_attn", "module:model.norm"]
    names = resolve_names(model, sites, "all")
    found, row = capture(model, names, DOCUMENTS), 0
    for ids in DOCUMENTS:
        for name in names:
            path = name.module if name.site == "module" else f"model.layers.{name.layer}"
            assert worst_error(found[str(name)][row : row + len(ids)], seen_at(model, path, ids)) < TOLERANCE_TINY
        row += len(ids)
    with pytest.raises(
        RequestError, match=f"'mlp': '{family}' has none: .*not in the table.*; this model has residual, mod"
    ):
        resolve_names(model, ["mlp"], "all")


def test_a_model_that_hands_out_no_hidden_states_is_captured_all_the_same() -> None:  # E05
    class Silent(type(tiny_llama().model)):  # type: ignore[misc]
        def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
            hidden = self.embed_tokens(input_ids)
            turn = self.rotary_emb(hidden, torch.arange(input_ids.shape[1])[None])
            for block in self.layers:
                hidden = block(hidden, position_embeddings=turn)
            return (self.norm(hidden),)

    model = tiny_llama()
    model.model.__class__ = Silent
    model.config.model_type = "mystery"
    names = resolve_names(model, ["residual", "module:model.norm"], "all")
    found, row = capture(model, names, DOCUMENTS), 0
    for ids in DOCUMENTS:
        expected = seen_at(tiny_llama(), "model.layers.2", ids)
        assert worst_error(found["residual.2"][row : row + len(ids)], expected) < TOLERANCE_TINY
        row += len(ids)


def test_an_unknown_architecture_that_looks_to_the_right_sees_no_padding() -> None:  # the mask is always passed
    model = tiny_family("bert")
    model.config.model_type = "mystery"
    found, row = capture(model, resolve_names(model, ["residual"], [2]), DOCUMENTS), 0
    for ids in DOCUMENTS:
        expected = seen_at(model, "encoder.layer.2", ids)
        assert worst_error(found["residual.2"][row : row + len(ids)], expected) < TOLERANCE_TINY
        row += len(ids)


def test_blocks_that_return_two_states_are_no_stream_unless_the_table_says_so() -> None:
    model = tiny_llama()
    model.config.model_type = "mystery"
    for block in model.model.layers:
        block.forward = lambda hidden, *_, **__: (hidden * 0.5, hidden * 0.5)  # as where the next block adds them
    model.model.forward = lambda input_ids, **_: run_pairs(model.model, input_ids)
    with pytest.raises(
        RequestError, match=r"'residual': 'mystery' has none: its blocks do not return one state per token.*module:PATH"
    ):
        resolve_names(model, ["residual"], "all")
    assert [name.width for name in resolve_names(model, ["module:model.layers.{layer}"], "all")] == [16, 16, 16]


def run_pairs(trunk: Any, input_ids: torch.Tensor) -> torch.Tensor:
    hidden = trunk.embed_tokens(input_ids)
    for block in trunk.layers:
        first, second = block(hidden)
        hidden = first + second
    return hidden


def test_a_wrapper_that_is_not_in_the_table_is_unknown_though_its_text_model_is_known() -> None:
    model = tiny_family("llava", vision_config={**CONFIGS["llava"][1]["vision_config"], "num_hidden_layers": 2})
    known = resolve_names(model, ["residual"], "all")
    model.config.model_type = "mystery"
    assert resolve_names(model, ["residual"], "all") == known
    with pytest.raises(RequestError, match="'mlp': 'mystery' has none: its architecture is not in the table"):
        resolve_names(model, ["mlp"], "all")


def test_an_architecture_whose_blocks_cannot_be_told_is_refused_by_name() -> None:
    model = tiny_llama()
    model.config.model_type = "mystery"
    assert decoder_layers(model) is model.model.layers
    model.config.num_hidden_layers = 5
    with pytest.raises(RequestError, match=f"'mystery' is not supported.*supported are {', '.join(ARCHITECTURES)}"):
        decoder_layers(model)
    with pytest.raises(RequestError, match="Linear has no transformers config"):
        decoder_layers(torch.nn.Linear(2, 2))


def test_an_encoder_decoder_is_refused_by_name() -> None:  # E09
    with pytest.raises(
        RequestError, match=r"'t5' is an encoder-decoder model, .*; allowed are decoder-only models and enc"
    ):
        resolve_names(tiny_family("t5"), ["residual"], "all")
