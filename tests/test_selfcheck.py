"""A model whose rows depend on what stands beside them in the batch is refused before a row of it is stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY, byte_tokenizer, tiny_llama

import harvest
from harvest.errors import WorkError

TEXTS = ["a", "some words", "a longer text than the others", "middle sized", "b"] * 5


def run(path: Path, model: Any, **capture: Any) -> Any:
    job = {"capture": capture, "run": {"path": path}}
    return harvest.run(job, model=model, tokenizer=byte_tokenizer(), data=TEXTS)


@pytest.mark.parametrize("family", TINY)
def test_a_sound_model_passes_and_its_largest_error_per_name_is_kept(family: str, tmp_path: Path) -> None:
    found = run(tmp_path / "run", TINY[family](vocab=300), sites=["residual", "attn", "mlp"])
    errors = found.summary()["self_check"]
    assert set(errors) == set(found.names)
    assert max(errors.values()) < 1e-5  # float32 rounds otherwise at other batch shapes
    (record,) = (json.loads(path.read_text()) for path in (tmp_path / "run/ledger").iterdir())
    assert record["self_check"] == errors


def leak_from_the_row_above(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
    return out + 0.5 * out.roll(1, dims=0) if len(out) > 1 else out


def leak_from_padding(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
    return out + out[:, -1:]


def shift_by_the_length(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * (1 + out.shape[1] / 8)


@pytest.mark.parametrize("leak", [leak_from_the_row_above, leak_from_padding, shift_by_the_length])
def test_rows_that_depend_on_the_batch_are_refused_by_name_and_document_and_nothing_is_committed(
    leak: Any, tmp_path: Path
) -> None:
    model = tiny_llama(vocab=300)
    model.model.layers[1].register_forward_hook(leak)
    with pytest.raises(WorkError, match=r"self-check: residual\.1 of document \d+ differs by") as caught:
        run(tmp_path / "run", model)
    assert "attempts" not in str(caught.value)  # it would repeat itself, so it is not tried again
    assert not any((tmp_path / "run").glob("ledger/*"))
    assert not any((tmp_path / "run").glob("shards/*/*"))


def test_a_run_without_anything_to_run_needs_no_check(tmp_path: Path) -> None:
    job = {"run": {"path": tmp_path / "run"}}
    found = harvest.run(job, model=tiny_llama(vocab=300), tokenizer=byte_tokenizer(), data=["", ""])
    assert found.summary()["self_check"] == {}


def test_non_finite_rows_do_not_hide_a_mismatch_nor_make_one(tmp_path: Path) -> None:
    model = tiny_llama(vocab=300)
    with torch.no_grad():
        model.model.embed_tokens.weight[66] = float("nan")  # "a" stands in most of the texts
    assert all(error < 1e-5 for error in run(tmp_path / "sound", model).summary()["self_check"].values())
    model.model.layers[1].register_forward_hook(leak_from_the_row_above)
    with pytest.raises(WorkError, match="self-check"):
        run(tmp_path / "leaking", model)


def test_a_row_many_times_as_long_as_the_rest_is_measured_by_itself(tmp_path: Path) -> None:
    """Attention sinks: rounding of a row of norm 1e6 is no error of rows of norm 1."""
    model = tiny_llama(vocab=300)

    def sink(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
        first = torch.arange(out.shape[1])[None, :, None] == 0
        return torch.where(first, out * 1e6, out)

    model.model.layers[-1].register_forward_hook(sink)
    errors = run(tmp_path / "run", model, sites=["residual"]).summary()["self_check"]
    assert max(errors.values()) < 1e-5
