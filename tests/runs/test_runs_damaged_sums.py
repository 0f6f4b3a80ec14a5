"""Directions, sums and tables that are damaged are told by file when they are asked for, never as other numbers."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from commandcase import jsonl
from runcase import run
from safetensors import safe_open
from safetensors.numpy import load, save
from spoilt import STATES, object_of, spoil

import harvest
from harvest.checking.verify import verify_run
from harvest.errors import DamageError

TEXTS = ["".join(chr(97 + (i * k + k * k) % 26) for i in range(40 + 3 * k)) for k in range(12)]
ROWS = [{"text": text, "label": str(k % 2)} for k, text in enumerate(TEXTS)]
DIRECTION = {"name": "s", "column": "label", "positive": ["1"], "negative": ["0"], "holdout": 0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A complete run of two shards."""
    tables = {"capture": {"layers": [0, 1]}, "store": {"shard_documents": 6}, "statistics": {"covariance": True}}
    run(tmp_path / "run", jsonl(tmp_path / "rows.jsonl", ROWS), directions=[DIRECTION], **tables)
    return tmp_path / "run"


def changed(file: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    arrays = load(file.read_bytes())
    change(arrays)
    with safe_open(file, "numpy") as opened:
        metadata = opened.metadata()
    file.write_bytes(save(arrays, metadata=metadata))


def without(*names: str) -> Callable[[dict[str, np.ndarray]], None]:
    def change(arrays: dict[str, np.ndarray]) -> None:
        for key in [key for key in arrays if key.startswith(names)]:
            del arrays[key]

    return change


@pytest.mark.parametrize(
    ("file", "data", "told"),
    [
        ("s.safetensors", None, r"directions/s\.safetensors: missing$"),
        ("s.json", None, r"directions/s\.json: missing$"),
        ("s.json", b'{"directions": [', r"directions/s\.json: Expecting value"),
        ("s.json", b'{"directions": [{}]}', r"directions/s\.safetensors: not a direction that a run wrote \('mode'\)$"),
        ("s.safetensors", b"\x08", r"directions/s\.safetensors: not a direction that a run wrote \("),
    ],
)
def test_a_direction_whose_files_are_damaged_is_told_by_file(
    file: str, data: bytes | None, told: str, path: Path
) -> None:
    target = path / "directions" / file
    target.unlink() if data is None else target.write_bytes(data)
    with pytest.raises(DamageError, match=told):
        harvest.open(path).directions()


def test_sums_that_a_shard_lacks_or_that_are_of_another_run_are_told_by_name(path: Path) -> None:
    (path / "complete.json").unlink()  # so that they are merged anew
    states = object_of(path, STATES)
    whole = states.read_bytes()
    changed(states, without("directions/s/residual.1/"))
    with pytest.raises(DamageError, match=r"/states\.safetensors: no sums of 'residual\.1'$"):
        harvest.open(path).directions()
    states.write_bytes(whole)
    changed(states, without("covariance/residual.1/"))
    with pytest.raises(DamageError, match=r"/states\.safetensors: no covariance of 'residual\.1'$"):
        _ = harvest.open(path).statistics()["residual.1"].covariance
    states.write_bytes(whole)

    def rename(arrays: dict[str, np.ndarray]) -> None:
        for key in [key for key in arrays if key.startswith("moments/residual.1/")]:
            arrays[key.replace("residual.1", "residual.7")] = arrays.pop(key)

    changed(states, rename)
    with pytest.raises(DamageError, match=r"sums of 'residual\.7', which is no name of this run$"):
        harvest.open(path).statistics()


def test_a_token_table_with_other_columns_is_damage_though_everything_vouches_for_it(path: Path) -> None:
    table = pq.read_table(object_of(path, "tokens.parquet")).drop_columns(["chunk"])
    sink = io.BytesIO()
    pq.write_table(table, sink)
    spoil(path, "tokens.parquet", sink.getvalue())
    (finding,) = [finding for finding in verify_run(path).findings if finding.damage]
    assert "tokens.parquet: columns ['document', 'position', 'token', 'special']" in finding.what
