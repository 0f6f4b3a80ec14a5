"""The call for sequences in hand: against plain hooks on one document at a time, and what it leaves of the model."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from families import EXPERTS, HIDDEN, LAYERS, tiny_family
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import worst_error
from tiny import amplify, tiny_gpt2, tiny_llama
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, xLSTMConfig, xLSTMForCausalLM

import harvest
from harvest.errors import RequestError, WorkError
from harvest.model.cache import ActivationCache
from harvest.model.interface import CapturedSite, CaptureRequest, CaptureSpec, capture_activations

TOLERANCE = 1e-5
DOCUMENTS = [[5, 9, 17, 23, 31, 40, 7], [7], [2, 3, 1, 0, 0], [60, 61, 5, 62, 63, 1, 0, 0, 9, 8, 33]]
"""Some hold the ids that pad, begin and end: they are tokens like others."""
IDS = torch.tensor([DOCUMENTS[0]])


def blocks(model: nn.Module) -> nn.ModuleList:
    """Found by their number, apart from the package's table."""
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == LAYERS]
    return next(m for n, m in lists if "vis" not in n)  # of vision


def first(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


def alone(model: Any, module: nn.Module, ids: list[int], **arguments: Any) -> torch.Tensor:
    """[T, d]: what a plain hook on a module sees of one document."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        arguments["use_cache"] = False
    seen: list[torch.Tensor] = []
    handle = module.register_forward_hook(lambda _m, _a, output: seen.append(first(output).clone()))
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), **arguments)
    handle.remove()
    return seen[0].reshape(len(ids), -1)


def padded(
    documents: list[list[int]], side: str, pad: int = 0, length: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    length = length or max(map(len, documents)) + 2
    ids = torch.full((len(documents), length), pad)
    mask = torch.zeros_like(ids)
    for row, document in enumerate(documents):
        start = {"left": length - len(document), "right": 0, "both": 1}[side]
        ids[row, start : start + len(document)] = torch.tensor(document)
        mask[row, start : start + len(document)] = 1
    return ids, mask


def state_of(model: nn.Module) -> Any:
    """Everything of a model that a capture could leave changed."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()]
    return hooks, [(p.requires_grad, p.grad) for p in model.parameters()]


# ---- true --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["helium", "qwen2_moe"])
def test_every_block_of_an_unknown_architecture_is_what_it_is_for_each_document_alone(family: str) -> None:
    model = tiny_family(family)
    expected = [[alone(model, block, ids) for ids in DOCUMENTS] for block in blocks(model)]
    for side in ("left", "right", "both"):
        ids, mask = padded(DOCUMENTS, side, pad=3)
        found = capture_activations(model, ids, CaptureSpec(), mask)
        assert [(layer, site) for layer, site, _ in found] == [(layer, "residual") for layer in range(LAYERS)]
        for layer, _, tensor in found:
            assert tensor.shape == (*ids.shape, HIDDEN)
            for row, document in enumerate(expected[layer]):
                assert worst_error(tensor[row][mask[row] == 1], document) < TOLERANCE, (side, layer, row)
                assert not tensor[row][mask[row] == 0].any()


LLAMA, GPT2 = tiny_llama(), tiny_gpt2()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([LLAMA, GPT2]),
    st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=9), min_size=1, max_size=4),
    st.data(),
)
def test_any_documents_with_any_padding_at_their_ends_are_as_alone(
    model: Any, documents: list[list[int]], data: st.DataObject
) -> None:
    length = max(map(len, documents)) + data.draw(st.integers(0, 3))
    ids = torch.full((len(documents), length), data.draw(st.integers(-100, 100)))
    mask = torch.zeros(ids.shape, dtype=data.draw(st.sampled_from([torch.bool, torch.long, torch.float32])))
    for row, document in enumerate(documents):
        start = data.draw(st.integers(0, length - len(document)))
        ids[row, start : start + len(document)] = torch.tensor(document)
        mask[row, start : start + len(document)] = 1
    ((_, _, tensor),) = capture_activations(model, ids, CaptureSpec(layers=1), mask)
    rows = tensor[None] if len(documents) == 1 else tensor
    for row, document in enumerate(documents):
        assert worst_error(rows[row][mask[row] == 1], alone(model, blocks(model)[1], document)) < TOLERANCE


def test_the_last_residual_comes_before_the_final_norm_and_the_normed_state_has_its_own_site() -> None:  # defect 1
    model = tiny_llama()
    last, normed = capture_activations(model, IDS, CaptureSpec(("residual.2", "final_norm")))
    with torch.no_grad():
        state = model(IDS, output_hidden_states=True).hidden_states[-1][0]
        assert worst_error(model.model.norm(last.tensor), state) < TOLERANCE
    assert worst_error(normed.tensor, state) < TOLERANCE
    assert worst_error(last.tensor, state) > 0.1
    assert (normed.layer, normed.site) == (None, "final_norm")


@pytest.mark.parametrize("family", ["llama", "phi", "qwen3_moe", "granite", "gemma2", "gemma3", "olmo2"])
def test_contributions_add_up_where_a_norm_follows_the_sublayer_too(family: str) -> None:  # defect 9
    spec = CaptureSpec(("residual_pre", "attn_contribution", "mlp_contribution", "residual"), layers=1)
    before, attn, mlp, after = (site.tensor for site in capture_activations(tiny_family(family), IDS, spec))
    assert worst_error(before + attn + mlp, after) < TOLERANCE


def test_expert_routers_and_modules_by_path_have_a_row_per_token_of_every_sequence() -> None:
    model = tiny_family("olmoe")
    ids, mask = padded(DOCUMENTS, "right")
    spec = CaptureSpec(("router", "module:model.layers.{layer}.input_layernorm", "embedding", "module:lm_head"), 1)
    router, norm, embedding, head = capture_activations(model, ids, spec, mask)
    assert (router.tensor.shape, router.site) == ((*ids.shape, EXPERTS), "router")
    assert (norm.layer, norm.site) == (1, "module:model.layers.1.input_layernorm")
    assert (embedding.layer, embedding.site) == (None, "embedding")
    assert (head.layer, head.site, head.tensor.shape[-1]) == (None, "module:lm_head", 64)
    for row, document in enumerate(DOCUMENTS):
        expected = alone(model, model.model.layers[1].input_layernorm, document)
        assert worst_error(norm.tensor[row, : len(document)], expected) < TOLERANCE
        assert worst_error(head.tensor[row, : len(document)], alone(model, model.lm_head, document)) < TOLERANCE


def test_headless_models_are_captured_like_those_with_a_head() -> None:  # defect 7
    model = tiny_llama()
    for part in (model, model.model):
        (site,) = capture_activations(part, IDS, CaptureSpec(layers=1))
        assert worst_error(site.tensor, alone(model, model.model.layers[1], DOCUMENTS[0])) < TOLERANCE


def test_dropout_is_off_and_the_mode_of_every_module_is_restored() -> None:  # defect 14, E13
    model = tiny_gpt2(resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)
    expected = alone(model, model.transformer.h[2], DOCUMENTS[0])
    model.train()
    model.transformer.h[1].eval()
    before = state_of(model)
    (site,) = capture_activations(model, IDS, CaptureSpec(layers=-1))
    assert worst_error(site.tensor, expected) < TOLERANCE
    assert state_of(model) == before


def test_nothing_that_stands_at_padding_reaches_a_row_even_if_it_is_no_number() -> None:  # E20
    model = tiny_llama()
    ids, mask = padded(DOCUMENTS, "left")
    expected = capture_activations(model, ids, CaptureSpec(layers=2), mask)[0].tensor
    model.model.layers[2].register_forward_hook(lambda _m, _a, out: out.masked_fill(mask[..., None] == 0, float("nan")))
    found = capture_activations(model, ids, CaptureSpec(layers=2), mask)[0].tensor
    assert torch.equal(found, expected)


def test_the_dtype_is_the_one_in_which_the_model_computed() -> None:
    (site,) = capture_activations(tiny_llama().bfloat16(), IDS, CaptureSpec(layers=0))
    assert site.tensor.dtype == torch.bfloat16


# ---- steering ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt", "gemma2"])
def test_what_a_hook_adds_at_a_layer_is_seen_at_that_layer_and_not_before(family: str) -> None:  # defect 10
    model = tiny_family(family)
    plain = [site.tensor for site in capture_activations(model, IDS, CaptureSpec())]
    for layer in range(LAYERS):
        add = lambda _m, _a, out: (out[0] + 100.0, *out[1:]) if isinstance(out, tuple) else out + 100.0  # noqa: E731
        handle = blocks(model)[layer].register_forward_hook(add)
        steered = [site.tensor for site in capture_activations(model, IDS, CaptureSpec())]
        handle.remove()
        assert [torch.equal(a, b) for a, b in zip(plain, steered)] == [n < layer for n in range(LAYERS)]
        assert torch.allclose(steered[layer] - plain[layer], torch.full_like(plain[layer], 100.0), atol=1e-3)


def test_hooks_see_the_sequences_where_the_caller_put_them() -> None:
    model = tiny_gpt2()
    ids, mask = padded(DOCUMENTS, "left", length=11)
    plain = capture_activations(model, ids, CaptureSpec(layers=1), mask)[0].tensor

    def last_token(_m: Any, _a: Any, out: Any) -> Any:
        changed = first(out).clone()
        changed[:, -1] += 100.0
        return (changed, *out[1:]) if isinstance(out, tuple) else changed

    model.transformer.h[1].register_forward_hook(last_token)
    steered = capture_activations(model, ids, CaptureSpec(layers=1), mask)[0].tensor
    assert torch.equal(steered[:, :-1], plain[:, :-1])
    assert torch.allclose(steered[:, -1] - plain[:, -1], torch.tensor(100.0), atol=1e-3)


def test_a_request_puts_the_steered_state_in_its_cache_with_spans() -> None:  # defect 11
    model, cache = tiny_llama(), ActivationCache()
    request = CaptureRequest(cache, CaptureSpec(("residual", "attn"), layers=(0, 1)))
    plain = capture_activations(model, IDS, request.spec)
    model.model.layers[1].register_forward_hook(lambda _m, _a, out: out + 100.0)
    added = request.capture(model, IDS, "alice", 3, token_span=(4, 7), phases={"prompt": (0, 4), "answer": (4, 7)})
    assert [(r.participant, r.message_idx, r.layer, r.site) for r in cache] == [
        ("alice", 3, layer, site) for site in ("residual", "attn") for layer in (0, 1)
    ]
    assert len(added) == 4
    steered = cache.at("alice", 3, 1, phase="answer")
    assert torch.allclose(steered - plain[1].tensor[4:7], torch.tensor(100.0), atol=1e-3)
    with pytest.raises(RequestError, match="token_span"):
        request.capture(model, IDS, "alice", 4, token_span=(4, 8))
    with pytest.raises(RequestError, match="input_ids: 2 sequences; allowed is one"):
        request.capture(model, [[1, 2], [3, 4]], "alice")
    assert len(cache) == 4


# ---- what comes back ---------------------------------------------------------------------------------------------


def test_one_sequence_has_no_batch_axis_whether_given_as_ids_or_as_a_batch_of_one() -> None:  # defect 15
    model = tiny_llama()
    row = capture_activations(model, DOCUMENTS[0], CaptureSpec(layers=1))[0].tensor
    assert row.shape == (7, 16)
    for ids in (IDS, IDS[0], IDS.int(), IDS.numpy()):
        assert torch.equal(capture_activations(model, ids, CaptureSpec(layers=1))[0].tensor, row)
    ids, mask = padded([DOCUMENTS[0]], "left")
    masked = capture_activations(model, ids[0], CaptureSpec(layers=1), mask[0])[0].tensor
    assert masked.shape == (9, 16)
    assert worst_error(masked[2:], row) < TOLERANCE


def test_tensors_own_just_what_they_show_and_every_sequence_is_there() -> None:  # defect 2, E46
    model = tiny_llama()
    ids = torch.tensor([DOCUMENTS[0], DOCUMENTS[0][::-1]])
    (batch,) = capture_activations(model, ids, CaptureSpec(layers=1))
    assert batch.tensor.shape == (2, 7, 16)
    assert worst_error(batch.tensor[1], alone(model, model.model.layers[1], ids[1].tolist())) < TOLERANCE
    for given_ids in (ids, IDS):
        for site in capture_activations(model, given_ids, CaptureSpec(("residual", "attn_heads", "mlp_neurons"))):
            assert site.tensor.untyped_storage().nbytes() == site.tensor.nbytes
            assert site.tensor.is_contiguous()
            assert site.tensor._base is None


@pytest.mark.parametrize("inside", [False, True])
def test_a_probe_can_be_trained_on_what_comes_back(inside: bool) -> None:  # defect 12
    with torch.inference_mode(inside):
        (site,) = capture_activations(tiny_llama(), IDS, CaptureSpec(layers=1))
    assert not site.tensor.requires_grad
    probe = nn.Linear(16, 1)
    probe(site.tensor).sum().backward()
    assert probe.weight.grad is not None
    site.tensor.requires_grad_()


def test_later_changes_to_a_hidden_state_do_not_reach_what_was_taken() -> None:
    model = tiny_llama()
    expected = capture_activations(model, IDS, CaptureSpec(layers=0))[0].tensor
    model.model.layers[1].register_forward_pre_hook(lambda _m, args: (args[0].add_(100.0),))
    found = capture_activations(model, IDS, CaptureSpec(layers=(0, 1)))[0].tensor
    assert torch.equal(found, expected)


def test_results_come_site_by_site_in_the_order_asked_layers_rising_each_once() -> None:
    spec = CaptureSpec(("mlp", "residual", "mlp", "blocks.0.hook_resid_post"), layers=(2, 0, -1, 2))
    found = capture_activations(tiny_llama(), IDS, spec)
    assert [(layer, site) for layer, site, _ in found] == [(0, "mlp"), (2, "mlp"), (0, "residual"), (2, "residual")]
    assert all(isinstance(site, CapturedSite) for site in found)


@pytest.mark.parametrize("layer", [-1, -2, -3])
@pytest.mark.parametrize("site", ["residual", "attn", "mlp"])
def test_negative_layers_count_from_the_end_and_carry_their_true_index(site: str, layer: int) -> None:  # defect 4
    model = tiny_llama()
    (counted,) = capture_activations(model, IDS, CaptureSpec(site, layer))
    (plain,) = capture_activations(model, IDS, CaptureSpec((site,), (3 + layer,)))
    assert counted.layer == plain.layer == 3 + layer
    assert torch.equal(counted.tensor, plain.tensor)


def test_tensors_stay_where_they_were_computed_when_asked_to() -> None:
    for offload in ("none", "cpu"):
        (site,) = capture_activations(tiny_llama(), IDS, CaptureSpec(layers=0, offload=offload))
        assert site.tensor.device.type == "cpu"


# ---- what is left ------------------------------------------------------------------------------------------------


def test_the_forward_ends_after_the_last_module_needed() -> None:  # defect 13
    model, ran = tiny_llama(layers=12), []
    for index, block in enumerate(model.model.layers):
        block.register_forward_hook(lambda *_, index=index: ran.append(index))
    for module in (model.model.norm, model.lm_head):
        module.register_forward_hook(lambda *_: ran.append("after the blocks"))
    capture_activations(model, IDS, CaptureSpec(("residual", "mlp"), layers=3))
    assert ran == [0, 1, 2, 3]
    capture_activations(model, IDS, CaptureSpec())
    assert ran[4:] == list(range(12))


def test_the_model_can_be_trained_as_before() -> None:
    model = tiny_llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    model.train()
    model.model.embed_tokens.requires_grad_(False)
    before = state_of(model)
    capture_activations(model, torch.randint(0, 64, (1, 80)), CaptureSpec())  # beyond 64: the frequencies change
    assert state_of(model) == before
    assert not any(tensor.is_inference() for tensor in [*model.buffers(), *model.parameters()])
    model(torch.randint(0, 64, (1, 80))).logits.sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None


def test_an_error_in_the_middle_of_a_forward_leaves_the_model_as_it_was() -> None:
    model = tiny_llama().train()

    def fail(*_: Any) -> None:
        raise RuntimeError("a hook of the caller's failed")

    model.model.layers[1].register_forward_hook(fail)
    before = state_of(model)
    with pytest.raises(RuntimeError, match="a hook of the caller's failed"):
        capture_activations(model, IDS, CaptureSpec(("residual", "attn")))
    assert state_of(model) == before


def test_an_error_in_the_middle_of_registration_leaves_the_model_as_it_was() -> None:  # defect 5
    model = tiny_llama().train()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no more hooks")

    model.model.layers[2].register_forward_hook = fail
    before = state_of(model)
    with pytest.raises(RuntimeError, match="no more hooks"):
        capture_activations(model, IDS, CaptureSpec())
    assert state_of(model) == before


def test_of_a_module_that_runs_twice_the_first_time_counts() -> None:
    model = tiny_llama()
    mlp, seen = model.model.layers[0].mlp, []
    mlp.register_forward_hook(lambda _m, _a, out: seen.append(out[0].clone()))
    model.model.layers[0].forward = lambda hidden, **_: mlp(mlp(hidden))
    found = capture_activations(model, IDS, CaptureSpec(("mlp", "residual"), layers=0))
    assert [torch.equal(site.tensor, run) for site, run in zip(found, seen)] == [True, True]
    assert not torch.equal(*seen)


def test_a_module_that_does_not_run_this_time_is_an_error_and_not_a_missing_row() -> None:
    model = tiny_llama()
    model.model.layers[1].forward = lambda hidden, **_: hidden
    with pytest.raises(WorkError, match=r"never ran: mlp\.1"):
        capture_activations(model, IDS, CaptureSpec("mlp"))


# ---- refused before anything runs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"sites": ()}, r"sites = \(\)"),
        ({"sites": ("residual", 3)}, "sites = .*allowed are one or several of residual"),
        ({"sites": None}, "sites = None"),
        ({"sites": "resid"}, "sites = 'resid': no such site; allowed are residual, residual_pre"),
        ({"sites": ("residual", "self_attn")}, "sites = 'self_attn': no such site"),
        ({"layers": ()}, r"layers = \(\): allowed are one or several whole numbers, or None"),
        ({"layers": "all"}, "layers = 'all'"),
        ({"layers": 1.0}, r"layers = 1\.0"),
        ({"layers": True}, "layers = True"),
        ({"layers": (0, None)}, r"layers = \(0, None\)"),
        ({"offload": "disk"}, "offload = 'disk': allowed are 'cpu', 'none'"),
        ({"offload": None}, "offload = None"),
        ({"offload": "meta"}, "offload = 'meta'"),
    ],
)
def test_a_spec_is_checked_when_it_is_made(wrong: dict[str, Any], says: str) -> None:  # defect 6
    with pytest.raises(ValueError, match=says):
        CaptureSpec(**wrong)


def padding(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("ids", "spec", "mask", "says"),
    [
        (IDS, CaptureSpec(layers=(0, 3)), None, r"^layers = \[0, 3\]: the model has 3 layers; allowed are 0 to 2"),
        (IDS, CaptureSpec(layers=-4), None, "allowed are 0 to 2, or -3 to -1"),
        (IDS, CaptureSpec("attn.9"), None, "the model has 3 layers"),
        (IDS, CaptureSpec("router"), None, "'llama' has none"),
        (IDS, CaptureSpec("module:model.nothing"), None, "no module 'model.nothing'"),
        (IDS, "residual", None, "spec: str given; allowed is CaptureSpec"),
        (torch.zeros(0).long(), CaptureSpec(), None, r"input_ids: shape \[0\]"),
        (torch.zeros(2, 0).long(), CaptureSpec(), None, r"input_ids: shape \[2, 0\]"),
        (torch.zeros(1, 2, 3).long(), CaptureSpec(), None, r"input_ids: shape \[1, 2, 3\]"),
        (torch.zeros(2, 3), CaptureSpec(), None, r"input_ids: torch\.float32; allowed are whole numbers"),
        ([[1, 2], [3]], CaptureSpec(), None, "input_ids: no tensor .* padded to one length"),
        ("text", CaptureSpec(), None, "input_ids: no tensor"),
        ([5, 64], CaptureSpec(), None, "input_ids: 64: beyond the vocabulary; allowed are 0 to 63"),
        ([5, -1], CaptureSpec(), None, "input_ids: -1: beyond the vocabulary"),
        ([[1, 2], [3, 4]], CaptureSpec(), padding([1, 1], [0, 0]), "attention_mask: row 1 has no token"),
        ([[1, 2, 3], [3, 4, 5]], CaptureSpec(), padding([1, 1, 1], [1, 0, 1]), "row 1 has padding between its tokens"),
        ([[1, 2], [3, 4]], CaptureSpec(), padding([1, 1]), r"attention_mask: \[1, 2\] for input_ids \[2, 2\]"),
        ([1, 2], CaptureSpec(), torch.tensor([0.0, -1e9]), "attention_mask: allowed are 1 for a token and 0"),
    ],
)
def test_a_wrong_request_is_refused_before_the_forward_and_says_what_is_allowed(
    ids: Any, spec: Any, mask: Any, says: str
) -> None:  # defects 5 and 6
    model = tiny_llama().train()
    before = state_of(model)
    model.model.embed_tokens.forward = lambda *_: pytest.fail("a forward was run")
    with pytest.raises(RequestError, match=says):
        capture_activations(model, ids, spec, mask)
    assert state_of(model) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(RequestError, match="offload = 'cuda:1': this machine has no such device"):
        capture_activations(tiny_llama(), IDS, CaptureSpec(offload="cuda:1"))


@pytest.mark.parametrize(
    ("family", "most"), [("gpt2", 64), ("opt", 64), ("bert", 64), ("roberta", 64), ("llama", None)]
)
def test_more_tokens_than_learned_positions_are_refused_and_computed_positions_have_no_end(
    family: str, most: int | None
) -> None:
    model = tiny_family(family)
    assert len(capture_activations(model, [5] * 64, CaptureSpec(layers=0))[0].tensor) == 64
    if most is None:
        assert len(capture_activations(model, [5] * 65, CaptureSpec(layers=0))[0].tensor) == 65
    else:
        with pytest.raises(RequestError, match="input_ids: 65 tokens; allowed are 64, the positions"):
            capture_activations(model, [5] * 65, CaptureSpec(layers=0))


def tiny_xlstm() -> Any:
    """Takes no mask."""
    kernels = {"chunkwise_kernel": "chunkwise--native_autograd", "sequence_kernel": "native_sequence__native"}
    sizes = {"vocab_size": 64, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_heads": 2}
    return amplify(xLSTMForCausalLM(xLSTMConfig(**sizes, **kernels, step_kernel="native")))


def unheard_of() -> Any:
    """ALiBi that counts by the mask, under a name that nobody knows."""
    model = tiny_family("mpt")
    model.config.model_type = "unheard_of"
    return model


def tiny_encoder(kind: str, **more: Any) -> Any:
    sizes = {"vocab_size": 64, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    more = {"intermediate_size": 24, "max_position_embeddings": 64, "pad_token_id": 1, **more}
    torch.manual_seed(0)
    return amplify(AutoModel.from_config(CONFIG_MAPPING[kind](**sizes, **more)))


SEES_PADDING = {
    "alibi": unheard_of,
    "no_mask": tiny_xlstm,
    "convolution": lambda: tiny_encoder("convbert", embedding_size=HIDDEN),
    "fourier": lambda: tiny_encoder("fnet"),
    "positions_after_padding": lambda: tiny_encoder("mpnet"),
}


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("build", SEES_PADDING)
def test_padding_changes_nothing_where_nobody_knows_what_it_does(build: str, side: str) -> None:
    model = SEES_PADDING[build]()
    ids, mask = padded(DOCUMENTS, side, pad=3)
    found = capture_activations(model, ids, CaptureSpec(), mask)
    for row, document in enumerate(DOCUMENTS):
        for layer, _, tensor in found:
            expected = alone(model, blocks(model)[layer], document)
            assert worst_error(tensor[row][mask[row] == 1], expected) < TOLERANCE
            assert not tensor[row][mask[row] == 0].any()
    ((_, _, single),) = capture_activations(model, ids[1], CaptureSpec(layers=0), mask[1])
    assert torch.equal(single, found[0].tensor[1])


@pytest.mark.parametrize(("family", "side"), [("llama", "left"), ("bert", "right"), ("gpt2", "both")])
def test_what_is_no_finite_number_in_the_padding_reaches_no_token(family: str, side: str) -> None:
    model = tiny_family(family)
    pad = 50  # no document has it
    with torch.no_grad():
        model.get_input_embeddings().weight[pad] = float("inf")
    model.config.pad_token_id = pad
    ids, mask = padded(DOCUMENTS, side, pad)
    ((_, _, found),) = capture_activations(model, ids, CaptureSpec(layers=2), mask)
    for row, document in enumerate(DOCUMENTS):
        assert worst_error(found[row][mask[row] == 1], alone(model, blocks(model)[2], document)) < TOLERANCE
    assert not found[mask == 0].any()


def test_an_id_that_pads_is_a_token_to_a_model_that_makes_its_own_mask(tmp_path: Path) -> None:
    model, documents = tiny_encoder("dpr"), [[5, 1, 9, 1], [1, 1], [7, 8, 1]]
    ids, mask = padded(documents, "right", pad=3)
    found = capture_activations(model, ids, CaptureSpec(layers=0), mask)[0].tensor
    job = {"data": {"ids": "i"}, "capture": {"layers": [0]}, "run": {"path": str(tmp_path / "run"), "threads": 1}}
    stored = harvest.run(job, model=model, data=[{"i": document} for document in documents])["residual.0"][:]
    for row, document in enumerate(documents):
        every_id = torch.ones(1, len(document), dtype=torch.long)
        expected = alone(model, blocks(model)[0], document, attention_mask=every_id)
        start = sum(map(len, documents[:row]))
        one = capture_activations(model, document, CaptureSpec(layers=0))[0].tensor
        for rows in (stored[start : start + len(document)], found[row, : len(document)], one):
            assert worst_error(rows, expected) < TOLERANCE


def test_blocks_that_a_forward_passes_by_are_refused_by_name() -> None:
    model = tiny_encoder("squeezebert", embedding_size=HIDDEN, q_groups=1, k_groups=1, v_groups=1)
    with pytest.raises(RequestError, match=r"'residual': 'squeezebert' has none: its blocks .* has module:PATH,"):
        capture_activations(model, IDS, CaptureSpec())


def test_an_encoder_decoder_and_what_is_no_model_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="'t5' is an encoder-decoder model"):
        capture_activations(tiny_family("t5"), IDS, CaptureSpec())
    with pytest.raises(RequestError, match="Linear has no transformers config"):
        capture_activations(nn.Linear(2, 2), IDS, CaptureSpec())


def test_the_names_are_offered_at_the_top() -> None:
    assert harvest.capture_activations is capture_activations
    assert (harvest.CaptureSpec, harvest.CapturedSite, harvest.CaptureRequest) == (
        CaptureSpec,
        CapturedSite,
        CaptureRequest,
    )
    assert harvest.ActivationCache is ActivationCache
    assert harvest.ActivationRecord.__name__ == "ActivationRecord"
    assert CaptureSpec() == CaptureSpec(sites=("residual",), layers=None, offload="cpu")


@pytest.mark.parametrize("offloaded", [accelerate.cpu_offload, accelerate.disk_offload])
def test_weights_that_are_fetched_when_needed_give_the_same_values_and_go_back(offloaded: Any, tmp_path: Path) -> None:
    model, where = tiny_gpt2(), [tmp_path] if offloaded is accelerate.disk_offload else []
    ids, mask = padded(DOCUMENTS, "left")
    spec = CaptureSpec(("residual", "attn", "mlp_neurons"), layers=1)
    expected = capture_activations(model, ids, spec, mask)
    offloaded(model, *where, execution_device="cpu")
    for _ in range(2):
        found = capture_activations(model, ids, spec, mask)
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(found, expected))
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
