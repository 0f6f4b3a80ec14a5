"""What trainers read, read back by small readers written from their formats' descriptions; `peers/` runs their own."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from fakes import Fake, write_run

from harvest.export import selection
from harvest.export.export import Request, export_run
from harvest.export.formats import activault, llamascopium, parquet

NAMES = {"residual.0": 6, "attn_heads.10": 4}
HOOKS = {"residual.0": "blocks.0.hook_resid_post", "attn_heads.10": "blocks.10.attn.hook_z"}


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return write_run(tmp_path_factory.mktemp("run") / "r", names=NAMES, dtype="bfloat16", files_of=[0, 0, 1, 1])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks to a file and several files to an export."""
    monkeypatch.setattr(selection, "BLOCK_BYTES", 50)
    monkeypatch.setattr(selection, "SLAB_ROWS", 5)
    monkeypatch.setattr(parquet.file_ranges, "__defaults__", (400,))
    monkeypatch.setattr(llamascopium, "CHUNK_BYTES", 100)
    monkeypatch.setattr(activault, "FILE_BYTES", 100)


def export(fake: Fake, out: Path, format: str, **options: Any) -> tuple[dict[str, Any], np.ndarray]:
    """The card, and which rows of the run tokens.parquet says went out."""
    card = export_run(Request(format=format, run=fake.path, out=str(out), **options))
    tokens = pq.read_table(out / "tokens.parquet")
    keys = {key: row for row, key in enumerate(zip(fake.tokens["document"].tolist(), fake.tokens["position"].tolist()))}
    order = np.array([keys[key] for key in zip(tokens["document"].to_pylist(), tokens["position"].to_pylist())])
    np.testing.assert_array_equal(tokens["token"].to_numpy(), fake.tokens["token"][order])
    assert len(order) == card["rows"]
    return card, order


def whole(fake: Fake, name: str, order: np.ndarray, context: int) -> np.ndarray:
    rows: np.ndarray = fake.rows[name][order].float().numpy()
    return rows.reshape(-1, context, rows.shape[1])


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_row_of_saelens_is_a_context_of_its_hook_beside_its_token_ids(
    context: int, dtype: str, fake: Fake, tmp_path: Path
) -> None:
    card, order = export(fake, tmp_path / "out", "saelens", context=context, dtype=dtype, shuffle=4)
    found = datasets.load_from_disk(str(tmp_path / "out"))
    assert found.num_rows == card["rows"] // context
    for name, hook in HOOKS.items():
        assert found.features[hook] == datasets.Array2D(shape=(context, NAMES[name]), dtype=dtype)
        values = np.asarray(found.with_format("numpy")[hook][:])
        np.testing.assert_array_equal(values, whole(fake, name, order, context).astype(dtype))
    ids = np.asarray(found.with_format("numpy")["token_ids"][:])
    np.testing.assert_array_equal(ids, fake.tokens["token"][order].reshape(-1, context))
    assert len(json.loads((tmp_path / "out/state.json").read_text())["_data_files"]) > 1


def test_saelens_finds_the_extension_type_in_the_plain_arrow_schema(fake: Fake, tmp_path: Path) -> None:
    export(fake, tmp_path / "out", "saelens", context=2)
    path = next((tmp_path / "out").glob("data-00000-of-*.arrow"))
    schema = pa.ipc.open_stream(path.read_bytes()).schema
    field = pa.ipc.open_stream(path.read_bytes()).schema.field(HOOKS["residual.0"])
    stored = getattr(field.type, "storage_type", field.type)
    assert stored == pa.list_(pa.list_(pa.float32()))
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert features[HOOKS["residual.0"]] == {"shape": [2, 6], "dtype": "float32", "_type": "Array2D"}


@pytest.mark.parametrize("context", [None, 2])
def test_llamascopium_finds_chunks_of_every_hook_with_the_same_tokens(
    context: int | None, fake: Fake, tmp_path: Path
) -> None:
    card, order = export(fake, tmp_path / "out", "llamascopium", context=context, shuffle=1)
    chunks = {}
    for name, hook in HOOKS.items():
        paths = sorted((tmp_path / "out" / hook).iterdir())
        assert [path.name for path in paths] == [f"chunk-{i:08d}.safetensors" for i in range(len(paths))]
        chunks[name] = [safetensors.torch.load_file(path) for path in paths]
        for chunk in chunks[name]:
            assert chunk["activation"].dtype == torch.bfloat16
            lead = chunk["activation"].shape[:-1]
            assert lead == ((len(chunk["tokens"]),) if context is None else (len(chunk["tokens"]), context))
            for key, kind in (("tokens", torch.int64), ("mask", torch.int32), ("attention_mask", torch.int32)):
                assert (chunk[key].dtype, chunk[key].shape) == (kind, lead)
            assert (chunk["mask"] == 1).all()
            assert (chunk["attention_mask"] == 1).all()
        values = torch.cat([chunk["activation"] for chunk in chunks[name]]).reshape(-1, NAMES[name])
        assert torch.equal(values, fake.rows[name][order])
        ids = torch.cat([chunk["tokens"] for chunk in chunks[name]]).reshape(-1)
        np.testing.assert_array_equal(ids.numpy(), fake.tokens["token"][order])
    assert card["chunks"] == len(chunks["residual.0"]) == len(chunks["attn_heads.10"]) > 2


def ranged(path: Path, limit: int, part: int = 64) -> bytes:
    """A file as a reader gets it that asks for ranges up to a limit."""
    data = path.read_bytes()
    return b"".join(data[start : min(start + part, limit)] for start in range(0, limit, part))


def test_activault_finds_files_of_one_shape_that_load_without_running_code(fake: Fake, tmp_path: Path) -> None:
    card, order = export(fake, tmp_path / "out", "activault", context=2, shuffle=6)
    uuids = {}
    for name, width in NAMES.items():
        folder = tmp_path / "out" / name
        described = json.loads((folder / "metadata.json").read_text())
        paths = sorted(folder.glob("*.saved.pt"), key=lambda path: int(path.name.split("--")[1].split("_")[0]))
        assert len(paths) == card["files_per_name"] > 2
        states, ids = [], []
        for path in paths:
            assert re.fullmatch(r"[0-9a-f-]{36}--\d+_0\.saved\.pt", path.name)
            saved = torch.load(io.BytesIO(ranged(path, described["bytes_per_file"])), weights_only=True)
            assert list(saved["states"].shape) == described["shape"]
            assert list(saved["input_ids"].shape) == described["input_ids_shape"]
            assert saved["tensor_bytes"] == saved["states"].numel() * 2
            assert (str(saved["states"].dtype), saved["input_ids"].dtype) == (described["dtype"], torch.int64)
            states.append(saved["states"].reshape(-1, width))
            ids.append(saved["input_ids"].reshape(-1))
        assert torch.equal(torch.cat(states), fake.rows[name][order])
        np.testing.assert_array_equal(torch.cat(ids).numpy(), fake.tokens["token"][order])
        assert (described["d_in"], described["sequence_length"]) == (width, 2)
        uuids[name] = [path.name.split("--")[0] for path in paths]
        figures = json.loads((folder / "statistics.json").read_text())
        truth = fake.rows[name][order].double().numpy()
        np.testing.assert_allclose(figures["mean"], truth.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(figures["std"], truth.std(axis=0), rtol=1e-12)
        np.testing.assert_allclose(figures["M2"], truth.var(axis=0) * len(truth), rtol=1e-12)
        np.testing.assert_allclose(figures["norm"], np.linalg.norm(truth, axis=1).mean(), rtol=1e-12)
    assert uuids["residual.0"] == uuids["attn_heads.10"]
    assert len(set(uuids["residual.0"])) == card["files_per_name"]
    contexts = sum(int(n) // 2 for n in (3, 1, 4, 1, 5, 9, 2, 6))
    assert contexts - card["files_per_name"] < card["contexts"] <= contexts


def test_statistics_leave_out_rows_that_are_not_finite(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r", names={"residual.0": 6}, change={("residual.0", 2): float("nan")})
    _, order = export(fake, tmp_path / "out", "activault")
    rows = fake.rows["residual.0"][order].double()
    kept = rows[rows.isfinite().all(dim=1)].numpy()
    figures = json.loads((tmp_path / "out/residual.0/statistics.json").read_text())
    assert len(kept) < len(rows)
    np.testing.assert_allclose(figures["std"], kept.std(axis=0), rtol=1e-12)
