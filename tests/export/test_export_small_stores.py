"""Exports of compressed and int8 runs: the decoded rows, in the orders of every other run."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import Fake, write_run

import harvest
from harvest.errors import RequestError, WorkError
from harvest.export import staging
from harvest.export.export import Request, export_run
from harvest.export.known import format_names
from harvest.store import arrays

STORES = {
    "zstd": {"dtype": "float16", "compression": "zstd"},
    "int8": {"dtype": "int8"},
    "both": {"dtype": "int8", "compression": "zstd"},
}


@pytest.fixture(scope="module", params=STORES)
def fake(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fake:
    path = tmp_path_factory.mktemp("run") / "r"
    return write_run(path, [[7, 9], [4], [], [11, 30, 8]], chunk_bytes=60, object_bytes=200, **STORES[request.param])


@pytest.mark.parametrize("options", [{}, {"shuffle": 3}, {"rows": "position > 2"}, {"rows": "special", "shuffle": 0}])
def test_rows_go_out_decoded_in_order_shuffled_and_filtered(fake: Fake, tmp_path: Path, options: Any) -> None:
    out = tmp_path / "out"
    card = export_run(Request(format="npy", run=fake.path, out=str(out), **options))
    run = harvest.open(fake.path)
    where = {"position > 2": fake.tokens["position"] > 2, "special": fake.tokens["special"], None: None}
    for name in fake.names:
        shuffled = options.get("shuffle") is not None
        batches = run.batches(
            name,
            10,
            seed=options.get("shuffle") or 0,
            shuffle=shuffled,
            where=where[options.get("rows")],
            mixing="global",
        )
        found = np.load(out / f"{name}.npy")
        np.testing.assert_array_equal(found, torch.cat(list(batches)).numpy())
        assert found.dtype == (np.float16 if "float16" in repr(run[name]) else np.float32)
        assert card["columns"][name]["stored_dtype"] == run[name].stored


@pytest.mark.parametrize("format", format_names())
def test_every_format_takes_them(fake: Fake, tmp_path: Path, format: str) -> None:
    out = tmp_path / "out"
    options = {"name": ["residual.0", "residual.10"], "context": 4}
    card = export_run(Request(format=format, run=fake.path, out=str(out), **options))
    assert card["rows"] == 4 * card["contexts"] > 0
    assert json.loads((out / "export.json").read_text())["files"]


def test_a_value_that_float16_cannot_hold_ends_the_export(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r", dtype="int8", change={("mlp.1", 4): 1e6}, names={"mlp.1": 4}, moments=False)
    with pytest.raises(WorkError, match=r"mlp\.1: document 4, position 0: 1e\+06 does not fit into float16"):
        export_run(Request(format="npy", run=fake.path, out=str(tmp_path / "out"), dtype="float16"))
    assert not list(tmp_path.glob("out*"))


def test_a_shuffled_export_decodes_every_chunk_once_and_leaves_no_copy_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = write_run(tmp_path / "r", [[400], [300]], {"a": 6, "b": 6}, compression="zstd", chunk_bytes=24 * 50)
    decoded = []
    real = arrays.decompressed
    monkeypatch.setattr(arrays, "decompressed", lambda data, size: decoded.append(size) or real(data, size))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    export_run(Request(format="hf", run=fake.path, out=str(tmp_path / "out"), shuffle=1))
    assert len(decoded) == 2 * (8 + 6)
    decoded.clear()
    export_run(Request(format="hf", run=fake.path, out=str(tmp_path / "in_order")))
    assert len(decoded) == 2 * (8 + 6)
    assert not list((tmp_path / "tmp").iterdir())
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(RequestError, match="or compressed, shuffled or filtered, is copied to"):
        export_run(Request(format="hf", run=fake.path, out=str(tmp_path / "no"), shuffle=1))
