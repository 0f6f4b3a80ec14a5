"""What a model says of itself before a weight is read: its sites, its limit, and how it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import CONFIGS, ENCODERS, LAYERS, tiny_config, tiny_family
from oracle import TOLERANCE_TINY, worst_error
from test_model_capture import DOCUMENTS, capture
from tiny import tiny_llama
from transformers import AutoModel, AutoModelForMaskedLM

import harvest
from harvest.errors import RequestError
from harvest.model.load import context_limit, load_config, load_model
from harvest.model.sites import resolve_names, sites_of
from harvest.settings.model import ModelSettings


@pytest.mark.parametrize("family", [family for family in CONFIGS if family != "t5"])
def test_sites_are_listed_from_the_config_alone_as_they_are_resolved_on_the_model(family: str, tmp_path: Path) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    listed = sites_of(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]
    assert json.loads(json.dumps(listed)) == listed
    assert (listed["architecture"], listed["layers"]) == (CONFIGS[family][0], LAYERS)
    names = resolve_names(tiny_family(family), list(listed["sites"]), "all")
    for site, entry in listed["sites"].items():
        found = [name for name in names if name.site == site]
        assert {name.width for name in found} == {entry["width"]}
        at = found[-1].layer
        path = entry["module"].removeprefix("input of ").replace("{layer}", str(at))
        assert (path, entry["module"].startswith("input of ")) == (found[-1].module, found[-1].reads == "input")
        layers = {name.layer for name in found}
        assert entry["layers"] == (
            None if at is None else {3: "0 to 2", 1: f"{at} to {at}"}.get(len(layers), entry["layers"])
        )


def test_layers_that_lack_a_site_are_left_out_of_the_list(tmp_path: Path) -> None:
    tiny_config("qwen3_moe").save_pretrained(tmp_path)
    sites = sites_of(str(tmp_path))["sites"]
    assert (sites["router"]["layers"], sites["mlp_neurons"]["layers"]) == ("0, 2", "1 to 1")


def test_an_encoder_decoder_is_refused_from_its_config(tmp_path: Path) -> None:  # E09
    tiny_config("t5").save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="'t5' is an encoder-decoder model"):
        sites_of(str(tmp_path))


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "bert", "opt", "gpt2", "mpt"])
def test_the_longest_window_runs_and_one_more_token_does_not(family: str) -> None:
    """RoBERTa's positions start after the padding id: of 66 rows 64 are ever read."""
    model = tiny_family(family)
    limit = context_limit(model.config)
    assert limit == 64
    names = resolve_names(model, ["residual"], [-1])
    ids = np.random.default_rng(0).integers(3, 60, limit).tolist()
    found = capture(model, names, [ids, ids[:5]], tokens=1000)["residual.2"]
    assert found.isfinite().all()
    if family != "mpt":  # ALiBi has no table of positions
        with pytest.raises((IndexError, RuntimeError)):
            capture(model, names, [[*ids, 9]])


def test_an_encoder_is_loaded_without_a_head_and_a_decoder_with_its_own(tmp_path: Path) -> None:
    for family, kind in (
        ("bert", "BertModel"),
        ("llama", "LlamaForCausalLM"),
        ("gemma3", "Gemma3ForConditionalGeneration"),
    ):
        tiny_family(family).save_pretrained(tmp_path / family)
        settings = ModelSettings(name=str(tmp_path / family))
        assert type(load_model(settings, load_config(settings), "float32", "cpu")).__name__ == kind


def test_a_head_more_or_less_changes_the_paths_and_not_the_rows() -> None:
    llama = tiny_llama()
    bert = AutoModelForMaskedLM.from_config(tiny_config("bert")).eval()
    for headed, bare in ((llama, llama.model), (bert, bert.bert)):
        for site in ("residual", "attn_heads", "embedding"):
            names = [resolve_names(model, [site], "all") for model in (headed, bare)]
            assert [name.module for name in names[0]] == [f"{headed.base_model_prefix}.{n.module}" for n in names[1]]
            rows = [capture(model, found, DOCUMENTS) for model, found in zip((headed, bare), names)]
            assert all(torch.equal(rows[0][name], rows[1][name]) for name in rows[0])


# ---- as whole runs -----------------------------------------------------------------------------------------------

SITES = {
    "gemma3": ["residual", "embedding", "final_norm", "module:model.language_model.layers.{layer}.mlp.up_proj"],
    "bert": ["residual", "mlp_neurons", "embedding", "module_input:encoder.layer.{layer}.intermediate"],
    "deepseek_v3": ["residual", "router", "module:lm_head"],
}


@pytest.mark.parametrize("family", SITES)
def test_a_run_stores_every_kind_of_name_row_by_row_with_its_tokens(family: str, tmp_path: Path) -> None:  # E08
    model = tiny_family(family)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in DOCUMENTS))
    job: dict[str, Any] = {
        "model": {"name": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "a.jsonl"), "ids": "ids"},
        "capture": {"sites": SITES[family]},
        "run": {"path": str(tmp_path / "run"), "threads": 1},
        "tokens": {"bos": "never"},
    }
    run = harvest.run(job)
    names = resolve_names(model, SITES[family], "all")
    assert run.names == [str(name) for name in names]
    expected = capture(model, names, DOCUMENTS)
    for name in names:
        assert worst_error(run[str(name)][:], expected[str(name)]) < TOLERANCE_TINY
    assert run.tokens()["token"].to_pylist() == [token for ids in DOCUMENTS for token in ids]
    with pytest.raises(RequestError, match="3 layers; allowed are 0 to 2"):
        harvest.run(job | {"capture": {"layers": [3]}, "run": {"path": str(tmp_path / "other")}})
    assert not (tmp_path / "other").exists()


def test_every_encoder_and_wrapper_has_a_way_to_be_loaded() -> None:
    for family in (*ENCODERS, "llava", "qwen2_vl", "qwen2_5_vl"):
        assert isinstance(tiny_family(family), AutoModel._model_mapping[type(tiny_config(family))])
