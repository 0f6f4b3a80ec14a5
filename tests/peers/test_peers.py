"""Exports read by the peers' own code. Each has an interpreter of its own, `make test-peers` makes them.

HARVEST_PEER_SAELENS, HARVEST_PEER_LLAMASCOPIUM, HARVEST_PEER_DICTIONARY_LEARNING and HARVEST_PEER_STEERING (repeng,
steering-vectors) name the interpreters; without one its tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.export.export import Request, export_run

HERE = Path(__file__).parent
TEXTS = [f"text number {i * i} of many, {'and more of it ' * (i % 5)}" for i in range(60)]


def peer(name: str, script: str, *arguments: Any) -> dict[str, Any]:
    """What a script prints under the interpreter of a peer, as JSON."""
    variable = f"HARVEST_PEER_{name}"
    if variable not in os.environ:
        pytest.skip(f"{variable} names no interpreter: make test-peers")
    command = [os.environ[variable], str(HERE / script), *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "WANDB_MODE": "disabled"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny Llama's residual stream, in bfloat16."""
    folder = tmp_path_factory.mktemp("peers")
    tiny_llama(vocab=300).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    job = {
        "model": {"name": str(folder / "model")},
        "data": {"path": str(folder / "texts.jsonl")},
        "capture": {"layers": [0, 1]},
        "store": {"dtype": "bfloat16"},
        "run": {"path": str(folder / "run"), "threads": 1},
    }
    return harvest.run(job)


def exported(run: Any, out: Path, format: str, **options: Any) -> tuple[dict[str, Any], np.ndarray]:
    """The card, and the rows of residual.1 that tokens.parquet says went out, float32."""
    card = export_run(Request(format=format, run=run.path, out=str(out), **options))
    tokens, all_tokens = pq.read_table(out / "tokens.parquet"), run.tokens()
    keys = {key: i for i, key in enumerate(zip(*(all_tokens[c].to_pylist() for c in ("document", "position"))))}
    order = [keys[key] for key in zip(*(tokens[c].to_pylist() for c in ("document", "position")))]
    return card, run["residual.1"].numpy(order)


@pytest.mark.parametrize("context", [None, 8])
def test_saelens_reads_every_row_and_its_sae_learns(context: int | None, run: Any, tmp_path: Path) -> None:
    _, rows = exported(run, tmp_path / "out", "saelens", naming="hf", shuffle=3, context=context)
    model = run.record.job["model"]["name"]
    found = peer("SAELENS", "saelens_train.py", model, tmp_path / "out", "model.layers.1", context or 1, rows.shape[1])
    np.testing.assert_array_equal(np.array(found["rows"], np.float32), rows)
    tokens = pq.read_table(tmp_path / "out/tokens.parquet")["token"].to_numpy()
    np.testing.assert_array_equal(np.array(found["tokens"]), tokens)
    assert found["unexplained"] < 0.05


@pytest.mark.parametrize("context", [None, 8])
def test_llamascopium_reads_every_row_of_every_hook_in_bfloat16(context: int | None, run: Any, tmp_path: Path) -> None:
    _, rows = exported(run, tmp_path / "out", "llamascopium", shuffle=3, context=context)
    hooks = ("blocks.1.hook_resid_post", "blocks.0.hook_resid_post")
    found = peer("LLAMASCOPIUM", "llamascopium_read.py", tmp_path / "out", *hooks)
    assert found["dtypes"] == ["torch.bfloat16"]
    values = np.concatenate([np.array(chunk, np.float32) for chunk in found[hooks[0]]])
    assert values.ndim == (2 if context is None else 3)
    np.testing.assert_array_equal(values.reshape(rows.shape), rows)
    ids = np.concatenate([np.array(chunk) for chunk in found["tokens"]]).reshape(-1)
    np.testing.assert_array_equal(ids, pq.read_table(tmp_path / "out/tokens.parquet")["token"].to_numpy())
    np.testing.assert_array_equal(np.array(found["batches"], np.float32), rows)


def test_dictionary_learning_trains_on_batches_of_a_run(run: Any, tmp_path: Path) -> None:
    rows = torch.cat(list(run.batches("residual.1", 16, seed=1, epochs=2, dtype="float32")))
    np.save(tmp_path / "rows.npy", rows.numpy())
    found = peer("DICTIONARY_LEARNING", "dictionary_learning_train.py", tmp_path / "rows.npy")
    assert found["unexplained"] < 0.2


def test_repeng_and_steering_vectors_add_the_directions_where_steer_does(tmp_path: Path) -> None:
    from harvest.export.directions import export_directions

    model = tiny_llama(vocab=300)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"text": f"text {i} {'xy'[i % 2]}", "label": str(i % 2)} for i in range(20)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = {
        "model": {"name": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "texts.jsonl")},
        "directions": [{"name": "d", "column": "label", "positive": ["1"], "negative": ["0"]}],
        "run": {"path": str(tmp_path / "run"), "threads": 1},
    }
    directions = harvest.run(job).directions()["d"]
    for format in ("gguf", "safetensors"):
        export_directions(format, str(tmp_path / "run"), str(tmp_path / format))
    files = tmp_path / "gguf" / "d.gguf", tmp_path / "safetensors" / "d.safetensors"
    ids = [3, 80, 5, 66, 90]
    found = peer("STEERING", "steering_apply.py", tmp_path / "model", *files, 1.5, *ids)
    assert found["model_type"] == str(tmp_path / "model")
    assert sorted(found["directions"]) == ["1", "2"]
    for block, vector in found["directions"].items():
        np.testing.assert_array_equal(np.array(vector, np.float32), directions[f"residual.{block}"].raw.astype("f4"))
    with torch.no_grad():
        for peers, layers in (("repeng", [1, 2]), ("steering_vectors", [0, 1, 2])):
            with harvest.steer(model, directions, 1.5, layers=layers):
                expected = model(torch.tensor([ids])).logits.numpy()
            np.testing.assert_allclose(np.array(found[peers]), expected, rtol=1e-4, atol=1e-4)
            assert np.abs(expected - np.array(found["bare"])).max() > 0.1
    assert found["layers"] == [0, 1, 2]
