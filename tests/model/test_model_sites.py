"""Every site of every family: what it is, by identities between sites, and what a batch may not change about it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import CONFIGS, DOCUMENTS, ENCODERS, EXPERTS, FAMILIES, HAVE, HIDDEN, LAYERS, POST_NORM, tiny_family
from oracle import at_names, worst_error

from harvest.errors import RequestError
from harvest.model.architectures import ARCHITECTURES, WRAPPERS, decoder_layers
from harvest.model.capture import Capture
from harvest.model.points import SITES, Name
from harvest.model.sites import resolve_names
from harvest.records import Window
from harvest.text.batch import sort_windows

TOLERANCE = 1e-5
"""Relative to the row: other shapes of a product round by 1e-6 here, a wrong neighbour or layer is off by 0.1 to 1."""

BLOCKS = {
    **dict.fromkeys(FAMILIES, "model.layers"),
    **dict.fromkeys(["gpt2", "gpt_neo", "gptj", "bloom", "bloom_post_norm"], "transformer.h"),
    **dict.fromkeys(["falcon", "falcon_serial", "falcon_new"], "transformer.h"),
    **dict.fromkeys(["gpt_neox", "gpt_neox_serial"], "gpt_neox.layers"),
    **dict.fromkeys(["opt", "opt_350m"], "model.decoder.layers"),
    **dict.fromkeys(["llava", "qwen2_vl", "qwen2_5_vl"], "language_model.layers"),
    **dict.fromkeys(["bert", "roberta", "xlm-roberta"], "encoder.layer"),
    "gemma3": "model.language_model.layers",
    "mpt": "transformer.blocks",
    "mamba": "backbone.layers",
    "modernbert": "layers",
}


class Tiny:
    """A family's model with every name of it, and what hooks saw of each document alone."""

    def __init__(self, family: str) -> None:
        self.family, self.model = family, tiny_family(family)
        self.names = resolve_names(self.model, [site for site in SITES if site in HAVE[family]], "all")
        self.alone = [at_names(self.model, ids, self.names) for ids in DOCUMENTS]

    def rows(self, name: str, document: int = 2) -> torch.Tensor:
        return self.alone[document][name]

    def module(self, name: str) -> Any:
        return self.model.get_submodule(next(found.module for found in self.names if str(found) == name))

    def layers(self, site: str) -> list[int]:
        return [name.layer for name in self.names if name.site == site and name.layer is not None]


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return Tiny(request.param)


def captured(model: Any, names: tuple[Name, ...], documents: list[list[int]], tokens: int) -> dict[str, torch.Tensor]:
    windows, row = [], 0
    for number, ids in enumerate(documents):
        keep = np.arange(len(ids), dtype=np.int32)
        windows.append(Window(ids=np.array(ids, dtype=np.int32), keep=keep, row=row, document=number))
        row += len(ids)
    (window,) = sort_windows(windows, tokens_per_batch=tokens, rows_per_window=10_000)
    into = {str(name): torch.full((row, name.width), float("nan")) for name in names}
    with Capture(model, names) as take:
        for batch in window.batches:
            take(batch, into)
    return into


# ---- batches -----------------------------------------------------------------------------------------------------


def test_each_name_alone_equals_all_together(tiny: Tiny) -> None:
    """Where the forward stops depends on the names; what they hold does not."""
    together = captured(tiny.model, tiny.names, DOCUMENTS[:4], 1000)
    for name in tiny.names:
        assert torch.equal(captured(tiny.model, (name,), DOCUMENTS[:4], 1000)[str(name)], together[str(name)]), name


def test_nothing_begins_after_the_last_module_that_is_needed(tiny: Tiny) -> None:
    begun: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda _m, _a, path=path: begun.append(path))
        for path, module in tiny.model.named_modules()
    ]
    for name in tiny.names:
        begun.clear()
        captured(tiny.model, (name,), DOCUMENTS[:1], 1000)
        last = begun[-1]
        assert last == name.module or (name.reads == "output" and last.startswith(f"{name.module}.")), (str(name), last)
    for handle in handles:
        handle.remove()


# ---- what the sites are ------------------------------------------------------------------------------------------


def test_a_family_has_these_sites_and_refuses_the_others_with_the_list(tiny: Tiny) -> None:
    for site in SITES:
        if site in HAVE[tiny.family]:
            assert any(name.site == site for name in tiny.names)
        else:
            with pytest.raises(
                RequestError, match=f"capture.sites = '{site}': .* has none: .*; this model has residual, "
            ):
                resolve_names(tiny.model, [site], "all")


def test_the_blocks_are_those_of_the_text_model_and_residual_is_their_output(tiny: Tiny) -> None:  # E04, E08
    assert decoder_layers(tiny.model) is tiny.model.get_submodule(BLOCKS[tiny.family])
    assert tiny.layers("residual") == list(range(LAYERS))
    for name in tiny.names:
        if name.site == "residual":
            assert name.module == f"{BLOCKS[tiny.family]}.{name.layer}"
            assert (name.reads, name.width) == ("output", HIDDEN)
    with pytest.raises(RequestError, match="3 layers; allowed are 0 to 2"):  # E16
        resolve_names(tiny.model, ["residual"], [LAYERS])


SUBLAYERS = {
    "llama": ("self_attn", "mlp"),
    "gpt2": ("attn", "mlp"),
    "gpt_neox": ("attention", "mlp"),
    "falcon": ("self_attention", "mlp"),
    "gptj": ("attn", "mlp"),
    "opt": ("self_attn", "fc2"),
    "bloom": ("self_attention.dense", "mlp.dense_4h_to_h"),  # Bloom's modules add the residual
    "mixtral": ("self_attn", "mlp"),
    "olmoe": ("self_attn", "mlp"),
    "gpt_oss": ("self_attn", "mlp"),
    "deepseek_v3": ("self_attn", "mlp"),
}
"""Family -> where in a block its attention's and its MLP's outputs are, written down apart from the package's table."""


def test_the_sublayers_outputs_are_those_of_these_modules() -> None:  # E06, E07
    for family, paths in SUBLAYERS.items():
        model = tiny_family(family)
        for site, path in zip(("attn", "mlp"), paths):
            for name in resolve_names(model, [site], "all"):
                assert name.module == f"{BLOCKS[family]}.{name.layer}.{path}"
                assert (name.reads, name.width, name.scale) == ("output", HIDDEN, 1.0)


def test_the_input_of_a_block_is_the_output_of_the_one_before(tiny: Tiny) -> None:
    for layer in range(1, LAYERS):
        assert torch.equal(tiny.rows(f"residual_pre.{layer}"), tiny.rows(f"residual.{layer - 1}"))
    assert torch.equal(tiny.rows("residual_pre.0"), tiny.rows("embedding"))


def test_the_residual_is_the_sum_of_what_the_sublayers_add(tiny: Tiny) -> None:  # E06
    if "attn_contribution" not in HAVE[tiny.family]:
        pytest.skip("a norm follows the sum, or there are no sublayers")
    for layer in range(LAYERS):
        pre, after = tiny.rows(f"residual_pre.{layer}"), tiny.rows(f"residual.{layer}")
        attn, mlp = tiny.rows(f"attn_contribution.{layer}"), tiny.rows(f"mlp_contribution.{layer}")
        assert worst_error(pre + attn + mlp, after) < TOLERANCE
        if "residual_mid" in HAVE[tiny.family]:
            assert worst_error(tiny.rows(f"residual_mid.{layer}"), pre + attn) < TOLERANCE
            assert worst_error(tiny.rows(f"residual_mid.{layer}") + mlp, after) < TOLERANCE


def test_the_projections_lead_from_heads_and_neurons_to_the_sublayers_outputs(tiny: Tiny) -> None:
    for inner, outer in (("attn_heads", "attn"), ("mlp_neurons", "mlp")):
        for layer in tiny.layers(inner):
            projection = tiny.module(f"{inner}.{layer}")
            with torch.no_grad():
                projected = projection(tiny.rows(f"{inner}.{layer}"))
            assert worst_error(projected, tiny.rows(f"{outer}.{layer}")) < TOLERANCE


NORMED_OUTSIDE = {
    "gemma2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma3_text": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma3_both_ways": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma3": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "olmo3": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "glm4": ("post_self_attn_layernorm", "post_mlp_layernorm"),
}


def test_contributions_differ_from_outputs_only_by_the_norm_or_factor_between(tiny: Tiny) -> None:
    if "attn_contribution" not in HAVE[tiny.family]:
        pytest.skip("no contributions")
    for layer, block in enumerate(decoder_layers(tiny.model)):
        for site, index in (("attn", 0), ("mlp", 1)):
            between: Any = {"granite": lambda rows: rows * 0.22}.get(tiny.family, lambda rows: rows)
            if tiny.family in NORMED_OUTSIDE:
                between = block.get_submodule(NORMED_OUTSIDE[tiny.family][index])
            with torch.no_grad():
                expected = between(tiny.rows(f"{site}.{layer}"))
            assert worst_error(tiny.rows(f"{site}_contribution.{layer}"), expected) < TOLERANCE
            if tiny.family in (*NORMED_OUTSIDE, "granite"):
                assert worst_error(tiny.rows(f"{site}.{layer}"), expected) > 0.1


_TWO = ("input_layernorm", "post_attention_layernorm")
INPUT_NORMS: dict[str, tuple[str | None, str | None]] = {
    **dict.fromkeys(FAMILIES, _TWO),
    **dict.fromkeys(
        ["gemma2", "gemma3_text", "gemma3", "gemma3_both_ways"], ("input_layernorm", "pre_feedforward_layernorm")
    ),
    **dict.fromkeys(
        ["phi", "cohere", "cohere2", "falcon", "stablelm_parallel"], ("input_layernorm", "input_layernorm")
    ),
    **dict.fromkeys(["gpt2", "gpt_neo"], ("ln_1", "ln_2")),
    **dict.fromkeys(["bert", "roberta", "xlm-roberta"], (None, "attention.output.LayerNorm")),
    "gptj": ("ln_1", "ln_1"),
    "olmo2": (None, None),
    "olmo3": (None, None),
    "falcon_new": ("ln_attn", "ln_mlp"),
    "opt": ("self_attn_layer_norm", "final_layer_norm"),
    "opt_350m": (None, "self_attn_layer_norm"),
    "mpt": ("norm_1", "norm_2"),
    "modernbert": ("attn_norm", "mlp_norm"),
}
"""Family -> the norms that the sublayers' inputs come from; None where they read the stream itself."""


def test_sublayers_receive_the_stream_through_their_own_norm(tiny: Tiny) -> None:
    if "mlp_input" not in HAVE[tiny.family]:
        pytest.skip("no sublayers")
    for layer, block in enumerate(decoder_layers(tiny.model)):
        attn, mlp = INPUT_NORMS[tiny.family]
        stream = tiny.rows(f"residual_pre.{layer}")
        with torch.no_grad():
            expected = block.get_submodule(attn)(stream) if attn else stream
            if tiny.family == "bloom_post_norm":
                stream = expected
            assert worst_error(tiny.rows(f"attn_input.{layer}"), expected) < TOLERANCE
            if "residual_mid" in HAVE[tiny.family]:
                stream = tiny.rows(f"residual_mid.{layer}")
            elif HAVE[tiny.family] <= POST_NORM:
                stream = stream + tiny.rows(f"attn.{layer}")
            expected = block.get_submodule(mlp)(stream) if mlp else stream
            assert worst_error(tiny.rows(f"mlp_input.{layer}"), expected) < TOLERANCE


def test_the_final_norm_is_the_norm_of_the_last_residual_and_what_the_head_reads(tiny: Tiny) -> None:  # E01
    last = tiny.rows(f"residual.{LAYERS - 1}")
    if "final_norm" not in HAVE[tiny.family]:
        assert tiny.family == "opt_350m" or worst_error(last, tiny.rows("last")) < TOLERANCE
        return
    with torch.no_grad():
        assert worst_error(tiny.module("final_norm")(last), tiny.rows("final_norm")) < TOLERANCE
    assert worst_error(tiny.rows("final_norm"), tiny.rows("last")) < TOLERANCE
    assert worst_error(last, tiny.rows("last")) > 0.1


def test_router_logits_are_the_gates_product_with_what_the_mlp_receives(tiny: Tiny) -> None:  # E07
    for layer in tiny.layers("router"):
        gate, logits = tiny.module(f"router.{layer}"), tiny.rows(f"router.{layer}")
        expected = tiny.rows(f"mlp_input.{layer}") @ gate.weight.T + getattr(gate, "bias", 0.0)
        assert logits.shape[1] == EXPERTS
        assert worst_error(logits, expected.detach()) < TOLERANCE


def test_a_mixture_has_its_router_where_it_is_one_and_neurons_where_it_is_not() -> None:
    for family, routers, neurons in (("qwen3_moe", [0, 2], [1]), ("deepseek_v3", [1, 2], [0])):
        model = tiny_family(family)
        assert [name.layer for name in resolve_names(model, ["router"], "all")] == routers
        assert [name.layer for name in resolve_names(model, ["mlp_neurons"], "all")] == neurons
        with pytest.raises(RequestError, match=rf"'router'.*layers {neurons[0]} have none; allowed are {routers[0]}, "):
            resolve_names(model, ["router"], [0, 1, 2])
        with pytest.raises(RequestError, match=rf"'mlp_neurons.{routers[0]}'.*allowed are {neurons[0]}"):
            resolve_names(model, [f"mlp_neurons.{routers[0]}"], "all")


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gemmas_embedding_is_scaled_once(family: str, dtype: torch.dtype) -> None:  # E10
    model = tiny_family(family).to(dtype)
    names = resolve_names(model, ["embedding"], "all")
    rows = captured(model, names, [[5, 9, 17]], 8)["embedding"]
    weight = model.get_input_embeddings().weight[[5, 9, 17]].detach()
    assert torch.equal(rows, (weight * torch.tensor(HIDDEN**0.5, dtype=dtype)).float())


def test_the_table_holds_what_is_tested_here_and_nothing_else() -> None:
    tested = {CONFIGS[family][0] for family in FAMILIES}
    text_parts = {"qwen2_vl_text", "qwen2_5_vl_text"}
    assert tested | text_parts == {*ARCHITECTURES, *WRAPPERS}
    assert {
        family for family in FAMILIES if not ARCHITECTURES.get(CONFIGS[family][0], ARCHITECTURES["llama"]).causal
    } == {*ENCODERS}
