"""Directions of a crew: the bits of one worker, whatever the pairs, the order of the data and who did which shard."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_worker
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.config import load_job
from harvest.runtime import coordinate

crew_of = test_worker.crew_of

MODES = ["mean_difference", "single_group", "paired_rejection", "whitened", "pca", "leace"]
DIRECTIONS = [
    {"name": "column", "column": "label", "positive": ["1"], "negative": ["0"], "pair": "column:pid", "modes": MODES,
     "read": [-1, "mean", {"at": -1, "on": 1}]},
    {"name": "order", "column": "label", "positive": ["1"], "negative": ["0"], "pair": "order", "modes": MODES,
     "weight": "column:w", "examples": 20},
    {"name": "tokens", "positive": {"tokens": ["a", "c"]}, "negative": {"tokens": ["b", "d"]}, "pair": "order",
     "modes": MODES[:3]},
]  # fmt: skip


@pytest.fixture(scope="module", params=["mixed", "sorted", "shuffled"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """48 short texts: groups in turn; all of B before all of A, so that shards hold one group; pairs far apart."""
    folder, dice = tmp_path_factory.mktemp(request.param), np.random.default_rng(2)
    tiny_llama(vocab=300).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    rows = [
        {"text": "".join(dice.choice(list("abcdef"), size=dice.integers(2, 25))) + "xy"[i % 2], "label": str(i % 2),
         "pid": i // 2, "w": i % 3}
        for i in range(48)
    ]  # fmt: skip
    if request.param == "sorted":
        rows.sort(key=lambda row: row["label"])
    if request.param == "shuffled":
        rows = [rows[i] for i in dice.permutation(48)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": {"name": str(folder / "model")},
        "data": {"path": str(folder / "texts.jsonl")},
        "capture": {"layers": [0, 2], "store": True},
        "store": {"shard_documents": 8},
        "run": {"path": str(folder / "run"), "threads": 1},
        "directions": DIRECTIONS,
    }


@pytest.fixture(scope="module")
def alone(job: dict[str, Any]) -> dict[str, bytes]:
    """What one worker in this process writes."""
    harvest.run(job)
    return written(Path(job["run"]["path"]))


def written(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run / "directions").iterdir())}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_gives_the_directions_of_one(
    workers: int, job: dict[str, Any], alone: dict[str, bytes], tmp_path: Path, crew_of: Callable[..., Any]
) -> None:
    crew_of(workers)
    coordinate.run(load_job(job, [f"run.path={tmp_path / 'run'}"]))
    assert len(alone) == 6
    assert written(tmp_path / "run") == alone
    found = harvest.open(tmp_path / "run").directions("paired_rejection")
    assert found["column"]["residual.2@-1"].status == "ok"
    assert found["order"]["residual.2"].counts.pairs == found["order"]["residual.2"].counts.rows[0] > 14


def test_other_batches_and_shards_change_rounding_alone(
    job: dict[str, Any], alone: dict[str, bytes], tmp_path: Path
) -> None:
    """A forward rounds by its batch, so bits are those of a job; sums of the same rows do not depend on blocks."""
    first = harvest.open(job["run"]["path"])
    for number, (batch, size) in enumerate(((64, 8), (4096, 8), (256, 48))):
        overrides = [f"run.path={tmp_path / str(number)}", f"tokens.batch={batch}", f"store.shard_documents={size}"]
        other = harvest.run(load_job(job, overrides))
        for mode in MODES[:3]:
            for name, directions in first.directions(mode).items():
                for at, one in directions.items():
                    found = other.directions(mode)[name][at]
                    assert (found.status, found.counts) == (one.status, one.counts)
                    assert np.abs(found.vector - one.vector).max() <= 1e-4, (mode, name, at)
