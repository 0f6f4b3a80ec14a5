"""The logits of a few tokens at a few places, against the whole forward of each document alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import DOCUMENTS, FAMILIES, tiny_config, tiny_family
from tiny import tiny_gpt2, tiny_llama
from transformers import AutoModelForCausalLM, LlamaModel

from harvest.errors import RequestError, WorkError
from harvest.model.capture import Capture
from harvest.model.head import head_of, head_size
from harvest.model.sites import resolve_names
from harvest.records import Batch, Window
from harvest.text.batch import batching_of

TOKENS = (3, 17, 40, 63)
HEADLESS = {"llava", "qwen2_vl", "qwen2_5_vl", "bert", "roberta", "xlm-roberta", "modernbert"}
CHANGED: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 3.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 5.0},
    "cohere": {"logit_scale": 0.3},
}
"""What families do behind their head, made large enough to be seen."""


def batches(documents: list[list[int]], batching: str = "sorted") -> list[Batch]:
    """All tokens kept, several documents in a batch."""
    windows, row = [], 0
    for number, ids in enumerate(documents):
        keep = np.arange(len(ids), dtype=np.int32)
        windows.append(Window(ids=np.array(ids, np.int32), keep=keep, row=row, document=number))
        row += len(ids)
    (window,) = batching_of(batching)(windows, tokens_per_batch=40, rows_per_window=10_000)
    return list(window.batches)


def logits_of(model: Any, documents: list[list[int]], batching: str = "sorted") -> dict[int, np.ndarray]:
    """Document -> float64 [4] at its last token, from batches that hold several documents."""
    names = resolve_names(model, ["residual"], [0])
    ends = np.cumsum([len(ids) for ids in documents]) - 1
    found = {}
    with Capture(model, names, TOKENS) as capture:
        for batch in batches(documents, batching):
            rows = {str(names[0]): torch.zeros(ends[-1] + 1, names[0].width)}
            places = np.flatnonzero(np.isin(batch.rows, ends))
            logits = capture(batch, rows, places)
            assert logits is not None
            found |= dict(zip(batch.documents[places].tolist(), logits))
    return found


def expected(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    chosen: np.ndarray = whole[-1, list(TOKENS)].double().numpy()
    return chosen


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in HEADLESS])
def test_they_are_the_models_own_logits_whatever_it_does_behind_its_head(family: str) -> None:
    model = tiny_family(family, **CHANGED.get(family, {}))
    found = logits_of(model, DOCUMENTS)
    assert sorted(found) == list(range(len(DOCUMENTS)))
    spread = 0.0
    for document, ids in enumerate(DOCUMENTS):
        right = expected(model, ids)
        assert np.abs(found[document] - right).max() <= 1e-4 * max(1.0, np.abs(right).max()), document
        spread = max(spread, float(np.ptp(right)))
    assert spread > 0.01


def test_packed_documents_have_their_own() -> None:
    model = tiny_llama()
    found = logits_of(model, DOCUMENTS, "packed")
    for document, ids in enumerate(DOCUMENTS):
        assert np.abs(found[document] - expected(model, ids)).max() <= 1e-4


def test_the_head_sees_the_places_asked_for_and_nothing_runs_behind_what_is_needed() -> None:
    model = tiny_llama(layers=4)
    names = resolve_names(model, ["residual"], [1])
    seen: list[tuple[int, ...]] = []
    ran: list[int] = []
    model.lm_head.register_forward_hook(lambda _m, args, _out: seen.append(tuple(args[0].shape)))
    for number, block in enumerate(model.model.layers):
        block.register_forward_hook(lambda _m, _a, _o, number=number: ran.append(number))
    (batch, *_) = batches([[5, 6, 7], [8, 9], [10]])
    rows = {"residual.1": torch.zeros(6, 16)}
    with Capture(model, names, TOKENS) as capture:
        assert capture(batch, rows, np.zeros(0, np.int64)) is None
        assert (seen, ran) == ([], [0, 1])
        logits = capture(batch, rows, np.array([2]))
    assert logits is not None
    assert logits.shape == (1, len(TOKENS))
    assert logits.dtype == np.float64
    assert seen == [(1, 1, 16)]
    assert ran == [0, 1, 0, 1, 2, 3]
    assert not model.lm_head._forward_pre_hooks


def test_very_many_places_take_several_forwards_of_bounded_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = logits_of(tiny_llama(), DOCUMENTS)
    monkeypatch.setattr("harvest.model.head.LOGITS_BYTES", 2 * 4 * 64)
    model = tiny_llama()
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda _m, args, _out: seen.append(args[0].shape[1]))
    found = logits_of(model, DOCUMENTS)
    assert max(seen) == 2
    assert sum(seen) == len(DOCUMENTS)
    for document, logits in whole.items():
        assert np.abs(found[document] - logits).max() <= 1e-5


def test_rows_are_the_same_bits_with_and_without_answers() -> None:
    model = tiny_gpt2()
    names = resolve_names(model, ["residual", "final_norm"], "all")
    (batch, *_) = batches(DOCUMENTS[:4])
    taken = []
    for tokens, places in (((), None), (TOKENS, np.array([0, 5]))):
        rows = {str(name): torch.zeros(64, name.width) for name in names}
        with Capture(model, names, tokens) as capture:
            capture(batch, rows, places)
        taken.append(rows)
    for name in taken[0]:
        assert torch.equal(taken[0][name], taken[1][name])


def test_an_adapter_on_the_head_counts() -> None:
    peft = pytest.importorskip("peft")
    plain = tiny_llama()
    adapted = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    adapted.eval()
    ids = DOCUMENTS[0]
    found = logits_of(adapted, [ids])[0]
    assert np.abs(found - expected(adapted, ids)).max() <= 1e-4
    assert np.abs(found - expected(plain, ids)).max() > 0.1


def test_a_model_without_a_head_is_refused_by_its_class() -> None:
    for family in sorted(HEADLESS):
        model = tiny_family(family)
        with pytest.raises(RequestError, match=f"answers: {type(model).__name__} has no head"):
            head_of(model)
    with pytest.raises(RequestError, match="answers: LlamaModel has no head"):
        head_of(LlamaModel(tiny_config("llama")))


def test_a_checkpoint_without_the_heads_weights_is_refused_unless_they_are_the_embeddings() -> None:
    for tied in (False, True):
        config = tiny_config("llama", architectures=["LlamaModel"], tie_word_embeddings=tied)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        skeleton.config.architectures = ["LlamaModel"]
        if tied:
            assert head_size(skeleton) == 64
        else:
            with pytest.raises(RequestError, match="the checkpoint is a LlamaModel, which has no head of its own"):
                head_of(skeleton)


def test_a_forward_that_does_not_use_its_head_is_an_error() -> None:
    model = tiny_llama()
    forward = model.forward

    def without_module(*args: Any, **more: Any) -> Any:
        out = model.model(*args, **more)
        return type("Out", (), {"logits": out.last_hidden_state})()

    model.forward = without_module
    with pytest.raises(WorkError, match="answers: the forward gave"):
        logits_of(model, [[4, 5, 6]])
    model.forward = forward
