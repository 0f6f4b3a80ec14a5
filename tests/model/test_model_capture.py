"""Capture at the level of one batch: the right module, the right rows, the model as it was found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracle import SITES, TOLERANCE_TINY, alone, worst_error
from tiny import TINY, tiny_gpt2, tiny_llama

from harvest.errors import DocumentError, WorkError
from harvest.model.capture import Capture
from harvest.model.sites import decoder_layers, resolve_names
from harvest.records import Batch, Window
from harvest.text.batch import sort_windows


def batches(documents: list[list[int]], tokens: int = 64, keep: Any = None) -> tuple[list[Batch], int]:
    windows, row = [], 0
    for number, ids in enumerate(documents):
        kept = np.arange(len(ids), dtype=np.int32) if keep is None else np.array(keep(ids), dtype=np.int32)
        windows.append(Window(ids=np.array(ids, dtype=np.int32), keep=kept, row=row, document=number))
        row += len(kept)
    (window,) = sort_windows(windows, tokens_per_batch=tokens, rows_per_window=10_000)
    return list(window.batches), row


def capture(
    model: Any, names: Any, documents: list[list[int]], dtype: torch.dtype = torch.float32, **more: Any
) -> dict[str, torch.Tensor]:
    run, rows = batches(documents, **more)
    into = {str(name): torch.full((rows, name.width), float("nan"), dtype=dtype) for name in names}
    with Capture(model, names) as take:
        for batch in run:
            take(batch, into)
    return into


DOCUMENTS = [[5, 9, 17, 23, 31, 40], [7], [2, 3], [60, 61, 62, 63, 1, 0, 0, 9, 8], [5, 9, 17]]


@pytest.mark.parametrize("family", TINY)
def test_the_last_residual_is_the_block_output_and_its_norm_is_the_hidden_state(family: str) -> None:  # E01
    model = TINY[family]()
    (name,) = resolve_names(model, ["residual"], [-1])
    assert str(name) == "residual.2"
    rows = capture(model, [name], [DOCUMENTS[0]])["residual.2"]
    with torch.no_grad():
        last = model(torch.tensor([DOCUMENTS[0]]), output_hidden_states=True).hidden_states[-1][0]
        norm = {"llama": "model.norm", "gpt2": "transformer.ln_f", "neox": "gpt_neox.final_layer_norm"}[family]
        assert torch.allclose(model.get_submodule(norm)(rows), last, atol=1e-4)
    assert not torch.allclose(rows, last, atol=1e-1)


def test_layer_k_is_block_k_and_matches_one_hidden_state_only() -> None:  # E02
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight *= 100
        states = model(torch.tensor([[5, 9, 17]]), output_hidden_states=True).hidden_states
    found = capture(model, resolve_names(model, ["residual"], [0, 1]), [[5, 9, 17]])
    for layer in (0, 1):
        matches = [
            j for j, state in enumerate(states) if torch.allclose(state[0], found[f"residual.{layer}"], atol=1e-3)
        ]
        assert matches == [layer + 1]


def test_names_hold_what_they_say_when_every_module_has_its_own_scale() -> None:  # E81
    model = tiny_llama()
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight *= 10
            block.mlp.down_proj.weight *= 100
    names = resolve_names(model, SITES, "all")
    found, expected = capture(model, names, [DOCUMENTS[0]]), alone(model, DOCUMENTS[0], [str(n) for n in names])
    for name, rows in found.items():
        assert [other for other in expected if worst_error(rows, expected[other]) < TOLERANCE_TINY] == [name]


def test_the_forward_stops_after_the_last_block_that_is_needed() -> None:
    model, ran = tiny_llama(layers=4), []
    for index, block in enumerate(decoder_layers(model)):
        block.register_forward_hook(lambda *_, index=index: ran.append(index))
    model.lm_head.register_forward_hook(lambda *_: ran.append("lm_head"))
    capture(model, resolve_names(model, ["residual", "attn"], [0, 1]), [[5, 9]])
    assert ran == [0, 1]


def test_stopping_inside_a_block_leaves_later_forwards_as_they_were() -> None:
    model = tiny_llama()
    with torch.no_grad():
        before = model(torch.tensor([[5, 9, 17]])).logits
        capture(model, resolve_names(model, ["attn"], [1]), [[5, 9]])
        assert torch.equal(model(torch.tensor([[5, 9, 17]])).logits, before)


def hooks_on(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_no_hook_of_ours_stays_and_those_of_the_caller_do() -> None:  # E12
    model = tiny_llama()
    model.model.layers[1].register_forward_hook(lambda *_: None)
    before = hooks_on(model)
    first = capture(model, resolve_names(model, ["residual"], [0]), DOCUMENTS)
    second = capture(model, resolve_names(model, ["residual"], [0, 1]), DOCUMENTS)
    assert hooks_on(model) == before
    assert torch.equal(first["residual.0"], second["residual.0"])
    with pytest.raises(IndexError):  # an id beyond the embedding fails in the middle of a forward
        capture(model, resolve_names(model, ["residual"], "all"), [[5, 64]])
    assert hooks_on(model) == before


def test_what_the_callers_hooks_change_is_what_is_captured() -> None:
    model = tiny_llama()
    model.model.layers[1].register_forward_hook(lambda _m, _a, out: out + 100.0)
    found = capture(model, resolve_names(model, ["residual"], [1]), [[5, 9, 17]])
    assert found["residual.1"].mean() > 50


def test_dropout_is_off_inside_and_the_mode_of_every_module_is_restored() -> None:  # E13
    model = tiny_gpt2(resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)
    names = resolve_names(model, ["residual"], "all")
    expected = alone(model, DOCUMENTS[0], [str(n) for n in names])
    model.train()
    model.transformer.h[1].eval()
    modes = [module.training for module in model.modules()]
    for name, rows in capture(model, names, [DOCUMENTS[0]]).items():
        assert worst_error(rows, expected[name]) < TOLERANCE_TINY
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("keep", [lambda ids: [len(ids) - 1], lambda ids: range(0, len(ids), 2)])
def test_selected_positions_keep_their_place(keep: Any) -> None:
    model = tiny_llama()
    names = resolve_names(model, ["residual"], [1])
    everything, some = capture(model, names, DOCUMENTS), capture(model, names, DOCUMENTS, keep=keep)
    starts = np.cumsum([0, *map(len, DOCUMENTS)])
    rows = [start + position for start, ids in zip(starts, DOCUMENTS) for position in keep(ids)]
    assert torch.equal(some["residual.1"], everything["residual.1"][rows])


def test_a_small_selection_does_not_hold_the_batch() -> None:  # E46
    model = tiny_llama()
    rows = capture(
        model, resolve_names(model, ["residual"], [1]), [[5] * 60] * 20, tokens=10_000, keep=lambda ids: [59]
    )
    assert rows["residual.1"].untyped_storage().nbytes() == 20 * 16 * 4


def test_a_value_that_the_stored_dtype_cannot_hold_is_an_error_that_names_the_document() -> None:  # E38
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[33] *= 1e6
    names = resolve_names(model, ["residual"], [0])
    capture(model, names, [[5, 9], [7, 33]], dtype=torch.bfloat16)
    with pytest.raises(DocumentError, match=r"document 1: residual\.0 holds .* store\.dtype = 'float16'"):
        capture(model, names, [[5, 9], [7, 33], [8]], dtype=torch.float16)


def test_values_that_were_infinite_before_are_stored_as_they_are() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[33] = float("inf")
    found = capture(model, resolve_names(model, ["residual"], [0]), [[5, 9], [33]], dtype=torch.float16)
    assert found["residual.0"].isfinite().all(dim=1).tolist() == [True, True, False]


def test_a_module_that_does_not_run_this_time_is_an_error_and_not_an_empty_row() -> None:
    model = tiny_llama()
    names = resolve_names(model, ["mlp"], [1])
    model.model.layers[1].mlp.forward = None
    model.model.layers[1].forward = lambda hidden, **_: hidden
    with pytest.raises(WorkError, match=r"never ran: mlp\.1"):
        capture(model, names, [[5, 9]])


def test_a_model_that_was_harvested_can_still_be_trained() -> None:
    """Rotary tables that grow with the sequence are kept by the model: they must not be inference tensors."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_llama(max_position_embeddings=8, rope_parameters=rope)
    capture(model, resolve_names(model, ["residual"], [1]), [list(range(20))])
    assert not any(tensor.is_inference() for tensor in [*model.buffers(), *model.parameters()])
    model.train()(input_ids=torch.arange(20)[None]).logits.sum().backward()
    assert model.model.layers[0].mlp.down_proj.weight.grad is not None
