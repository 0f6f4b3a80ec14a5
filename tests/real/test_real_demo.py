"""The demo's own job on the real model and the real reviews: every stored row is what the review alone gives."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from oracle import alone, rows_of, worst_error
from plainrun import digest, first_difference, read_plain
from realdata import REAL, REVIEWS, ROOT

import harvest
import harvest.store.bfloat16  # registers the data type with zarr

pytestmark = REAL
FLOAT32 = 5e-5
"""Promise 2: float32 rows differ from the unbatched forward by rounding, 6e-6 of the norm when it was measured."""
BFLOAT16 = 2**-8
"""What rounding a value to bfloat16 adds at most, relative to it."""


def test_every_stored_row_of_the_demo_equals_a_block_hook_on_the_review_alone(
    run: Any, model: Any, tokenizer: Any, reviews: list[dict[str, str]]
) -> None:
    documents = run.documents().to_pylist()
    assert len(documents) >= REVIEWS // 2
    assert len(run.names) == 36
    for entry in documents:
        ids = tokenizer(reviews[entry["document"]]["text"]).input_ids
        rows = rows_of(run, entry["document"])
        assert entry["tokens"] == len(ids)
        assert run.tokens()["token"].to_numpy()[rows].tolist() == ids[:256]
        expected = alone(model, ids[:256], run.names)
        for name in run.names:
            stored = run[name][rows]
            assert stored.dtype == torch.bfloat16
            # The store rounds each value by at most BFLOAT16 of itself, on top of the forward's own rounding.
            assert worst_error(stored, expected[name]) < FLOAT32 + BFLOAT16, (entry["document"], name)


def test_the_labels_and_sources_are_kept_as_the_file_has_them(run: Any, reviews: list[dict[str, str]]) -> None:
    for entry in run.documents().to_pylist():
        review = reviews[entry["document"]]
        assert (entry["label"], entry["source"]) == (review["label"], review["source"])


def test_float32_rows_of_the_same_job_pass_without_the_rounding_of_the_store(
    tmp_path: Path, model: Any, tokenizer: Any
) -> None:
    overrides = [f"run.path={tmp_path}/run", "data.sample=0.0002", "store.dtype=float32", "capture.layers=[0, 15, -1]"]
    run = harvest.run(ROOT / "jobs/demo.toml", model=model, tokenizer=tokenizer, overrides=overrides)
    tokens = run.tokens()
    for entry in run.documents().to_pylist():
        rows = rows_of(run, entry["document"])
        expected = alone(model, tokens["token"].to_numpy()[rows], run.names)
        for name in run.names:
            assert worst_error(run[name][rows], expected[name]) < FLOAT32, (entry["document"], name)


def test_plain_zarr_numpy_and_json_read_what_the_reader_reads(run: Any) -> None:
    """The recipe of the README: no Harvest needed. bfloat16 is the upper half of a float32."""
    record = json.loads(min(Path(run.path, "ledger").iterdir()).read_text())
    array = Path(run.path, "shards", record["attempt"], "residual.15")
    rows, width = json.loads((array / "zarr.json").read_text())["shape"]
    bits = np.memmap(array / "c.0.0", dtype="<u2", mode="r", shape=(rows, width))
    values = (bits.astype("<u4") << 16).view("<f4")
    assert np.array_equal(values, run["residual.15"].numpy(slice(0, rows)))
    plugin = zarr.open_group(array.parent, mode="r")["residual.15"]
    assert np.array_equal(plugin[:].astype(np.float32), values)


def test_the_readmes_command_for_two_workers_gives_the_bits_of_one_directions_included(
    run: Any, tmp_path: Path
) -> None:
    (line,) = re.findall(r"^\$ harvest (run .*run\.workers=2)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    here = [f"run.path='{tmp_path}/run'", f"data.sample={REVIEWS / 33_530}"]
    command = [sys.executable, "-m", "harvest", *shlex.split(line), *(word for one in here for word in ("--set", one))]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"worker-\d \(.*, pid \d+\) is ready", done.stderr), done.stderr
    assert first_difference(read_plain(run.path), read_plain(tmp_path / "run")) is None
    for path in sorted(Path(run.path).glob("directions/*.safetensors")):
        assert digest(path) == digest(tmp_path / "run" / "directions" / path.name)
