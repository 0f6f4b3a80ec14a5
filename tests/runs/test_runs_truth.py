"""Positions, sinks and recurrences as whole runs: the cases where a batch is asked for a part of its rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import TOLERANCE_TINY, alone, at_names, worst_error
from plainrun import PlainRun
from runcase import run, stacked
from tiny import BOS, amplify, byte_tokenizer, tiny_llama
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import harvest
from harvest.model.sites import resolve_names

SUFFIXED = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<eos>a<eos>{% endif %}"
"""A chat template that ends in three tokens, whatever the prompt."""
RNG = np.random.default_rng(2)


def run_ids(path: Path, documents: list[list[int]], **tables: Any) -> PlainRun:
    model = tables.pop("model", None) or tiny_llama()
    tables = {**tables, "data": {"ids": "i"}}
    return run(path, [{"i": ids} for ids in documents], model=model, tokenizer=None, **tables)


@pytest.mark.parametrize("batching", ["sorted", "packed"])
def test_vectors_are_read_at_each_prompts_own_place_whatever_the_template_puts_behind(
    batching: str, tmp_path: Path
) -> None:  # E17, E74
    model, tokenizer = tiny_llama(vocab=300), byte_tokenizer(bos=False, chat_template=SUFFIXED)
    prompts = ["ab", "abcde", "abcdefghi", ""]
    plain = run(
        tmp_path / "run",
        [{"m": prompt} for prompt in prompts],
        model=model,
        tokenizer=tokenizer,
        data={"messages": "m"},
        capture={"positions": [-4, -1]},
        tokens={"batching": batching},
    )
    for document, prompt in enumerate(prompts[:3]):
        ids = tokenizer.encode(prompt + "<eos>a<eos>")
        assert len(ids) == len(prompt) + 3
        assert plain.ids(document) == [ids[-4], ids[-1]] == [tokenizer.encode(prompt[-1])[0], 1]
        expected = alone(model, ids, ["residual.2"])["residual.2"][[-4, -1]]
        assert worst_error(torch.from_numpy(plain.of(document, "residual.2")), expected) < TOLERANCE_TINY
    assert [row["status"] for row in plain.documents] == ["stored", "stored", "stored", "skipped"]


def test_a_document_too_short_for_a_position_is_skipped_by_name_and_its_neighbours_are_whole(
    tmp_path: Path,
) -> None:  # E74
    documents = [[5, 6], [5, 6, 7, 8, 9], RNG.integers(2, 60, 9).tolist()]
    plain = run_ids(tmp_path / "run", documents, capture={"positions": [-1, -4]})
    assert [(row["status"], row["reason"]) for row in plain.documents] == [
        ("skipped", "too short for position -4"),
        ("stored", None),
        ("stored", None),
    ]
    assert plain.keys == [(1, 1), (1, 4), (2, 5), (2, 8)]
    for document in (1, 2):
        expected = alone(tiny_llama(), documents[document], ["residual.2"])["residual.2"][[-4, -1]]
        assert worst_error(torch.from_numpy(plain.of(document, "residual.2")), expected) < TOLERANCE_TINY


@pytest.mark.parametrize("batching", ["sorted", "packed"])
@pytest.mark.parametrize(
    ("capture", "left"),
    [
        ({"exclude": ["bos"]}, [1, 2, 3, 4]),
        ({"positions": [1, 2, 3, 4]}, [1, 2, 3, 4]),
        ({"positions": [2, 3, 4]}, [2, 3, 4]),
        ({"exclude": [BOS, 7]}, [2, 3, 4]),
    ],
    ids=["bos", "all but the first", "all but two", "two ids"],
)
def test_leaving_out_the_first_positions_costs_no_document(
    capture: dict[str, Any], left: list[int], batching: str, tmp_path: Path
) -> None:  # E19
    documents = [[BOS, 7, *RNG.integers(8, 60, 3).tolist()] for _ in range(4)]
    plain = run_ids(tmp_path / "run", documents, capture=capture, tokens={"batching": batching})
    assert plain.keys == [(document, position) for document in range(4) for position in left]
    for document, ids in enumerate(documents):
        expected = alone(tiny_llama(), ids, ["residual.2"])["residual.2"][left]
        assert worst_error(torch.from_numpy(plain.of(document, "residual.2")), expected) < TOLERANCE_TINY


def test_sinks_show_in_the_norms_and_leaving_them_out_gives_the_mean_of_the_rest(tmp_path: Path) -> None:  # E41
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[BOS] = 0
        model.model.embed_tokens.weight[BOS, 3] = 500
    documents = [[BOS, *RNG.integers(2, 60, 7).tolist()] for _ in range(12)]
    plain = run_ids(tmp_path / "run", documents, model=model)
    found = harvest.open(tmp_path / "run").statistics()["residual.0"]
    rows, first = stacked(plain, "residual.0"), plain.tokens["position"] == 0
    norms = np.linalg.norm(rows, axis=1)
    assert norms[first].min() > 20 * np.median(norms)
    assert found.high_norm_share == 12 / 96
    for share, norm in found.norm_quantiles.items():
        assert norm == pytest.approx(np.quantile(norms, share, method="inverted_cdf"), rel=0.01)
    assert found.norm_max == pytest.approx(norms.max(), rel=1e-6)
    np.testing.assert_allclose(found.ordinary.mean, rows[~first].mean(axis=0), rtol=1e-11, atol=1e-12)
    assert found.ordinary.high_norm_share == 0

    without = run_ids(tmp_path / "without", documents, model=model, capture={"exclude": ["bos"]})
    np.testing.assert_array_equal(without.rows["residual.0"], plain.rows["residual.0"][~first])
    excluded = harvest.open(tmp_path / "without").statistics()["residual.0"]
    np.testing.assert_allclose(excluded.mean, rows[~first].mean(axis=0), rtol=1e-11, atol=1e-12)
    cosine = found.mean @ excluded.mean / np.linalg.norm(found.mean) / np.linalg.norm(excluded.mean)
    assert cosine < 0.5  # with the sinks the mean is theirs


_SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 1}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4},
    "mamba2": {"state_size": 4, "head_dim": 8, "num_heads": 4, "n_groups": 1, "chunk_size": 4},
    "bamba": {
        **_HEADS,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 4,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 4,
        "attn_layer_indices": [1],
    },
    "qwen3_next": {
        **_HEADS,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    },
}


@pytest.mark.parametrize("family", RECURRENT)
def test_padding_does_not_run_through_a_recurrence_even_beside_a_lone_document(
    family: str, tmp_path: Path
) -> None:  # E03, E22
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**_SMALL, "pad_token_id": None, **RECURRENT[family]})
    model = amplify(AutoModelForCausalLM.from_config(config))
    documents = [RNG.integers(2, 60, length).tolist() for length in (6, 17, 1, 11)]
    plain = run_ids(tmp_path / "run", documents, model=model, tokens={"batch": 8})  # a document a batch, padded to 8s
    names = resolve_names(model, ["residual"], "all")
    for document, ids in enumerate(documents):
        for name, rows in at_names(model, ids, names).items():
            if name != "last":
                assert worst_error(torch.from_numpy(plain.of(document, name)), rows) < TOLERANCE_TINY
