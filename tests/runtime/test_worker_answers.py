"""Contrast pairs and answers of a crew: the bits of one worker in tables and directions; heads of checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_worker
from plainrun import PlainRun, first_difference, read_plain
from safetensors.torch import load_file, save_file
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.config import load_job
from harvest.errors import RequestError, WorkError
from harvest.runtime import coordinate

crew_of = test_worker.crew_of

MODES = ["mean_difference", "paired_rejection", "whitened", "pca"]
DIRECTIONS = [
    {"name": "right", "modes": MODES, "correct_only": True, "weight": "logit_diff", "read": [-1, "mean"]},
    {"name": "every", "modes": MODES, "examples": 12, "read": "first", "weight": "logit_diff"},
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """40 pairs of texts, some longer than the context, some of which cannot be used."""
    folder, dice = tmp_path_factory.mktemp("answers"), np.random.default_rng(4)
    tiny_llama(vocab=300).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    rows = [
        {column: "".join(dice.choice(list("abcdef"), size=dice.integers(1, 40))) for column in ("good", "bad")}
        for _ in range(40)
    ]
    rows[7]["bad"] = rows[21]["good"] = ""
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": {"name": str(folder / "model")},
        "data": {"path": str(folder / "pairs.jsonl"), "contrast": ["good", "bad"]},
        "capture": {"layers": [0, 2], "pool": ["mean"]},
        "tokens": {"context": 16},
        "store": {"shard_documents": 6},
        "directions": DIRECTIONS,
        "answers": {"good": "yes", "bad": "no"},
        "run": {"path": str(folder / "run"), "threads": 1},
    }


@pytest.fixture(scope="module")
def alone(job: dict[str, Any]) -> tuple[PlainRun, dict[str, bytes]]:
    """What one worker in this process writes."""
    harvest.run(job)
    return read_plain(job["run"]["path"]), written(Path(job["run"]["path"]))


def written(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run / "directions").iterdir())}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_gives_the_bits_of_one(
    workers: int,
    job: dict[str, Any],
    alone: tuple[PlainRun, dict[str, bytes]],
    tmp_path: Path,
    crew_of: Callable[..., Any],
) -> None:
    crew_of(workers)
    coordinate.run(load_job(job, [f"run.path={tmp_path / 'run'}"]))
    assert first_difference(alone[0], read_plain(tmp_path / "run")) is None
    assert written(tmp_path / "run") == alone[1]
    found = harvest.open(tmp_path / "run").directions()["right"]["residual.2@-1"]
    assert found.status == "ok"
    assert min(found.counts.wrong) > 0
    assert found.counts.rows[0] == found.counts.rows[1] > 2


def test_other_batches_and_shards_change_rounding_alone(
    job: dict[str, Any], alone: tuple[PlainRun, dict[str, bytes]], tmp_path: Path
) -> None:
    expected = np.array([row["logit_diff"] for row in alone[0].documents], np.float64)
    for number, (batch, size) in enumerate(((16, 6), (4096, 40), (64, 3))):
        overrides = [f"run.path={tmp_path / str(number)}", f"tokens.batch={batch}", f"store.shard_documents={size}"]
        harvest.run(load_job(job, overrides))
        found = np.array([row["logit_diff"] for row in read_plain(tmp_path / str(number)).documents], np.float64)
        assert (np.isnan(found) == np.isnan(expected)).all()
        assert np.nanmax(np.abs(found - expected)) <= 1e-4 * np.nanmax(np.abs(expected))


def _headless(job: dict[str, Any], folder: Path, architecture: str) -> dict[str, Any]:
    """The same job with a checkpoint that has no weights of the head, and says so or does not."""
    shutil.copytree(job["model"]["name"], folder / "model")
    weights = load_file(folder / "model/model.safetensors")
    save_file(
        {k: v for k, v in weights.items() if k != "lm_head.weight"},
        folder / "model/model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return {**job, "model": {"name": str(folder / "model")}, "run": {"path": str(folder / "run"), "threads": 1}}


def test_a_checkpoint_that_has_no_head_is_refused_before_it_is_loaded(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harvest.model import load

    monkeypatch.setattr(load, "load_model", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(RequestError, match="answers: the checkpoint is a LlamaModel"):
        harvest.run(_headless(job, tmp_path, "LlamaModel"))
    assert not (tmp_path / "run").exists()


def test_a_head_that_the_checkpoint_only_promises_is_never_made_up(job: dict[str, Any], tmp_path: Path) -> None:
    headless = _headless(job, tmp_path, "LlamaForCausalLM")
    with pytest.raises(WorkError, match=r"lacks 1 weights of the model, the first is lm_head\.weight"):
        harvest.run(headless)
    plain = {key: value for key, value in headless.items() if key not in ("answers", "directions")}
    harvest.run({**plain, "run": {"path": str(tmp_path / "plain"), "threads": 1}})  # nobody asks its head
