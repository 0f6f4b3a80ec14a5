"""Rows of embeddings: the table as the weights hold it, on every family; what is no plain table is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import ENCODERS, FAMILIES, tiny_family
from tiny import tiny_llama

from harvest.errors import RequestError
from harvest.model.embedding import embedding_rows

HEADLESS = {*ENCODERS, "llava", "qwen2_vl", "qwen2_5_vl"}
INPUTS = ("embed_tokens", "wte", "word_embeddings", "backbone.embeddings", "embed_in", "tok_embeddings")
TABLES = {
    "input": tuple(f"{name}.weight" for name in INPUTS),
    "output": ("lm_head.weight", "embed_out.weight"),
}
"""What checkpoints call them."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rows_are_those_of_the_checkpoints_own_table(family: str) -> None:
    model = tiny_family(family)
    for which, ends in TABLES.items():
        if which == "output" and family in HEADLESS:
            with pytest.raises(RequestError, match="no output embedding; allowed is 'input'"):
                embedding_rows(model, which, [3], "direction 'd'")
            continue
        tables = [tensor for name, tensor in model.state_dict().items() if name.endswith(ends)]
        assert len(tables) == 1, [name for name, _ in model.named_parameters()]
        expected = tables[0][[3, 40, 7]].float()
        assert torch.equal(embedding_rows(model, which, [3, 40, 7], "direction 'd'"), expected)


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_gemmas_rows_are_unscaled_and_what_enters_block_0_is_a_multiple(family: str) -> None:
    model: Any = tiny_family(family)
    rows = embedding_rows(model, "input", [3, 40], "direction 'd'")
    entering = model.get_input_embeddings()(torch.tensor([3, 40])).detach()
    assert torch.allclose(entering, rows * 16**0.5)
    assert not torch.allclose(entering, rows)


def test_a_row_is_a_copy_and_needs_no_gradient() -> None:
    model = tiny_llama()
    rows = embedding_rows(model, "input", [3], "direction 'd'")
    rows += 1
    assert not rows.requires_grad
    assert not torch.equal(rows[0], model.model.embed_tokens.weight[3])


def test_a_table_that_an_adapter_changes_is_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["embed_tokens"], r=2)
    model = peft.get_peft_model(tiny_llama(), config)
    with pytest.raises(RequestError, match="direction 'd': the adapter changes the input embedding"):
        embedding_rows(model, "input", [3], "direction 'd'")
    assert embedding_rows(model, "output", [3], "direction 'd'").shape == (1, 16)


def test_a_table_that_is_put_away_is_read_where_it_lies(tmp_path: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny_llama()
    expected = model.model.embed_tokens.weight[[5, 9]].detach().clone()
    head = model.lm_head.weight[[5, 9]].detach().clone()
    spread = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert spread.model.embed_tokens.weight.is_meta
    assert torch.equal(embedding_rows(spread, "input", [5, 9], "direction 'd'"), expected)
    assert torch.equal(embedding_rows(spread, "output", [5, 9], "direction 'd'"), head)
