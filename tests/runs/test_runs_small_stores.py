"""Runs with `store.compression = "zstd"` and `store.dtype = "int8"`, through every promise that a plain run keeps."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import zarr
from commandcase import jsonl
from plainrun import digest, files_below, snapshot
from runcase import Died, Failing, bury, install, job
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.__main__ import _status
from harvest.checking.repair import repair_run
from harvest.checking.verify import verify_run
from harvest.config import Job
from harvest.planning.sizes import chunk_bytes_of
from harvest.records import StoredObject
from harvest.store.ledger import Ledger
from harvest.store.opening import open_files

TEXTS = ["abc", "", "a much longer text than the others", "d", "ee ee ee", "xyz" * 9, "k", "last one", "and", "on"]
SMALL = {
    "zstd": {"compression": "zstd"},
    "int8": {"dtype": "int8"},
    "both": {"compression": "zstd", "dtype": "int8"},
    "bfloat16": {"compression": "zstd", "dtype": "bfloat16"},
}
DIRECTION = {"name": "sign", "column": "label", "positive": ["1"], "negative": ["0"], "read": "last", "holdout": 0}
NAMES = ["residual.1", "mlp.0"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, texts, and a run of every kind: float32 as `plain`."""
    folder = tmp_path_factory.mktemp("made")
    tiny_llama(layers=2, vocab=300).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    jsonl(folder / "texts.jsonl", [{"text": text, "label": str(i % 2)} for i, text in enumerate(TEXTS)])
    for kind, store in {"plain": {}, **SMALL}.items():
        harvest.run(settings(folder, folder / kind, store))
    return folder


def settings(folder: Path, path: Path, store: dict[str, Any], **tables: Any) -> dict[str, Any]:
    return job(
        path,
        **{
            "model": {"name": str(folder / "model")},
            "data": {"path": str(folder / "texts.jsonl"), "keep": ["label"]},
            "store": {"shard_documents": 4, "chunk_mb": 0.0004, **store},
            "tokens": {"context": 16, "batch": 48},
            "capture": {"sites": NAMES, "pool": ["mean", "last"], "exclude": ["bos"]},
            "directions": [DIRECTION],
            **tables,
        },
    )


def attempts(path: Path) -> list[Path]:
    records = sorted((path / "ledger").iterdir())
    return [path / "shards" / json.loads(record.read_text())["attempt"] for record in records]


def by_zarr(path: Path, name: str) -> np.ndarray:
    """All rows of an array, decoded as its attributes say, by zarr-python alone."""
    parts = []
    for attempt in attempts(path):
        group: Any = zarr.open_group(str(attempt), mode="r")
        rows = group[name][:]
        if "scale" in group[name].attrs:
            assert "code * scale" in group[name].attrs["decoding"]
            rows = rows * group[group[name].attrs["scale"]][:]
        parts.append(rows)
    return np.concatenate(parts)


@pytest.mark.parametrize("kind", ["zstd", "int8", "both"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_a_plain_run_up_to_what_int8_rounds(made: Path, kind: str, name: str) -> None:
    exact = by_zarr(made / "plain", name)
    found = harvest.open(made / kind)[name]
    np.testing.assert_array_equal(found[:].numpy(), by_zarr(made / kind, name))
    assert (found.dtype, found.shape) == (torch.float32, exact.shape)
    assert found.stored == ("float32" if kind == "zstd" else "int8")
    if kind == "zstd":
        np.testing.assert_array_equal(found[:].numpy(), exact)
    else:
        room = np.abs(exact).max(axis=1, keepdims=True) / 254 * (1 + 1e-4)
        assert (np.abs(found[:].numpy() - exact) <= room).all()
        assert np.abs(found[:].numpy() - exact).max() > 0
    picked = [5, 0, len(exact) - 1, 17, 5]
    np.testing.assert_array_equal(found[picked].numpy(), found[:].numpy()[picked])
    np.testing.assert_array_equal(found.numpy(slice(3, 9)), found[:].numpy()[3:9])


@pytest.mark.parametrize("kind", SMALL)
def test_a_run_is_sound_a_second_one_changes_nothing_and_tokens_are_the_same(made: Path, kind: str) -> None:
    report = verify_run(str(made / kind))
    assert report.findings == (), report.text
    before = snapshot(made / kind)
    harvest.run(settings(made, made / kind, SMALL[kind]))
    assert snapshot(made / kind) == before
    assert harvest.open(made / kind).tokens() == harvest.open(made / "plain").tokens()


@pytest.mark.parametrize("kind", ["int8", "both"])
def test_sums_pools_and_directions_describe_rows_as_stored(made: Path, kind: str) -> None:
    run = harvest.open(made / kind)
    documents = run.tokens(columns=["document"]).column("document").to_numpy()
    labels = dict(zip(run.documents()["document"].to_pylist(), run.documents()["label"].to_pylist()))
    for name in NAMES:
        rows = by_zarr(made / kind, name).astype(np.float64)
        found = run.statistics()[name].all
        np.testing.assert_allclose(found.mean, rows.mean(axis=0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found.variance, rows.var(axis=0), rtol=1e-9)
        assert (found.min, found.max) == (rows.min(), rows.max())
        ids = np.unique(documents)
        last = np.stack([rows[documents == i][-1] for i in ids])
        np.testing.assert_array_equal(run.features(name, "last"), last.astype(np.float32))
        means = np.stack([rows[documents == i].mean(axis=0) for i in ids])
        np.testing.assert_allclose(run.features(name, "mean"), means, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(run.features(name, "max")[0], rows[documents == ids[0]].max(axis=0), rtol=1e-7)
        group = np.array([labels[i] for i in ids])
        expected = last[group == "1"].mean(axis=0) - last[group == "0"].mean(axis=0)
        direction = run.directions()["sign"][name]
        assert sum(direction.counts.rows) == len(ids)
        np.testing.assert_allclose(direction.raw, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("harm", ["flipped", "short", "gone", "array gone"])
def test_damage_is_found_and_mended_to_the_same_bits(made: Path, tmp_path: Path, kind: str, harm: str) -> None:
    clean, damaged = tmp_path / "clean", tmp_path / "run"
    harvest.run(settings(made, clean, SMALL[kind]))
    harvest.run(settings(made, damaged, SMALL[kind]))
    name = "residual.1.scale" if "int8" in SMALL[kind].values() else "residual.1"
    folder = attempts(damaged)[1] / name
    target = folder / "c.0.0"
    data = bytearray(target.read_bytes())
    data[3] ^= 4
    if harm == "array gone":
        for file in folder.iterdir():
            file.unlink()
    else:
        target.unlink()
        if harm != "gone":
            target.write_bytes(data if harm == "flipped" else data[:-2])
    report = verify_run(str(damaged))
    assert {finding.shard for finding in report.findings if finding.damage} == {"f00000-s000001"}
    assert any(f"{name}/c.0.0" in str(finding) for finding in report.findings)
    mended = repair_run(str(damaged))
    assert mended.harvested == ("f00000-s000001",)
    assert not mended.after.damaged
    for one, two in zip(attempts(clean), attempts(damaged), strict=True):
        assert files_below(one) == files_below(two)
        assert all(digest(one / path) == digest(two / path) for path in files_below(one))


def test_a_life_that_ends_at_a_write_is_mended_by_the_next_to_the_same_bits(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean, died = attempts(made / "both"), 0
    for at in range(11, 300, 61):
        path = tmp_path / f"run-{at}"
        with monkeypatch.context() as patch:
            install(patch, lambda files: Failing(files, at))  # noqa: B023  (called at once)
            try:
                harvest.run(settings(made, path, SMALL["both"]))
            except Died:
                bury(path)
                died += 1
        harvest.run(settings(made, path, SMALL["both"]))
        for one, two in zip(clean, attempts(path), strict=True):
            assert {file: digest(one / file) for file in files_below(one)} == {
                file: digest(two / file) for file in files_below(two)
            }
        assert verify_run(str(path)).findings == ()
    assert died > 2


def test_a_scale_that_is_not_the_shards_own_is_found_by_the_sums(made: Path, tmp_path: Path) -> None:
    """The ledger vouches for the object: only its contents are wrong."""
    path = tmp_path / "run"
    harvest.run(settings(made, path, SMALL["int8"]))
    target = attempts(path)[0] / "residual.1.scale/c.0.0"
    data = bytearray(target.read_bytes())
    data[:4] = (np.frombuffer(data[:4], "<f4") * 2).tobytes()
    target.write_bytes(data)
    ledger = Ledger(open_files(str(path)))
    record = ledger.record("f00000-s000000")
    stored = StoredObject(bytes=len(data), crc32c=f"{google_crc32c.value(bytes(data)):08x}")
    ledger.remove("f00000-s000000")
    ledger.commit(replace(record, objects={**record.objects, "residual.1.scale/c.0.0": stored}))
    assert any("residual.1: " in str(finding) for finding in verify_run(str(path)).findings if finding.damage)


def test_a_row_of_int8_with_a_nan_is_nan_counted_and_its_document_listed(tmp_path: Path) -> None:
    model = tiny_llama(layers=2)
    with torch.no_grad():
        model.get_input_embeddings().weight[50, 3] = float("nan")
    documents = [[5, 9, 17], [7, 50, 8], [11, 12], [50, 1]]
    data = [{"ids": ids} for ids in documents]
    tables = {"data": {"ids": "ids"}, "tokens": {"batch": 1000}, "capture": {"sites": ["residual_pre"], "layers": [0]}}
    for kind in ("float32", "int8"):
        harvest.run(job(tmp_path / kind, **tables, store={"dtype": kind}), model=model, data=data)
    run, exact = harvest.open(tmp_path / "int8"), harvest.open(tmp_path / "float32")["residual_pre.0"][:]
    odd = [4, 8]
    found = run["residual_pre.0"][:]
    assert torch.isnan(found[odd]).all()
    others = [row for row in range(10) if row not in odd]
    room = exact[others].abs().amax(dim=1, keepdim=True) / 254 * (1 + 1e-4)
    assert ((found[others] - exact[others]).abs() <= room).all(), "rows of a window that ran twice are rounded once"
    assert run.summary()["non_finite"] == {"residual_pre.0": 2 * 16}
    assert run.statistics()["residual_pre.0"].all.count == 8
    reasons = run.documents().column("reason").to_pylist()
    assert [bool(reason) for reason in reasons] == [False, True, False, True]
    report = verify_run(str(tmp_path / "int8"))
    assert not report.damaged, report.text


def test_an_int8_run_takes_a_fourth_of_float32_and_says_so_before(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {}
    for kind in ("plain", "int8"):
        shapes = [json.loads(file.read_text())["shape"] for file in (made / kind).glob("shards/*/residual.1/zarr.json")]
        rows = sum(shape[0] for shape in shapes)
        sizes[kind] = sum(file.stat().st_size for file in (made / kind).glob("shards/*/residual.1*/c.*"))
    index = 2000  # chunks of some 400 bytes have an index of their own
    assert sizes["int8"] < rows * (16 + 4) + index < sizes["plain"]
    for kind, bytes_per_row in (("plain", {"residual.1": 64, "mlp.0": 64}), ("int8", {"residual.1": 20, "mlp.0": 20})):
        path = made / f"{kind}.json"
        path.with_suffix(".toml").write_text(
            _toml(settings(made, made / f"planned-{kind}", {"plain": {}, **SMALL}[kind]))
        )
        assert _status(["plan", str(path.with_suffix(".toml")), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["bytes_per_row"] == bytes_per_row


def _toml(tables: dict[str, Any]) -> str:
    """A job without directions as TOML."""
    lines = []
    for table, values in tables.items():
        if isinstance(values, dict):
            lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines)


def test_a_name_that_the_scales_of_another_would_take_is_refused(tmp_path: Path) -> None:
    model = tiny_llama(layers=1)
    mlp = model.model.layers[0].mlp
    mlp.down_proj = torch.nn.Sequential(OrderedDict(scale=mlp.down_proj))
    sites = ["module:model.layers.0.mlp.down_proj", "module:model.layers.0.mlp.down_proj.scale"]
    tables = {"data": {"ids": "ids"}, "capture": {"sites": sites}, "store": {"dtype": "int8"}}
    with pytest.raises(harvest.RequestError, match=r"store\.dtype = 'int8': the scales of module:.*down_proj would be"):
        harvest.run(job(tmp_path / "r", **tables), model=model, data=[{"ids": [5, 6]}])
    assert not (tmp_path / "r").exists()


def test_tables_are_those_of_every_run(made: Path) -> None:
    for kind in SMALL:
        for attempt in attempts(made / kind):
            tokens = pq.read_table(attempt / "tokens.parquet")
            shapes = [zarr.open_group(str(attempt), mode="r")[name].shape for name in NAMES if kind != "bfloat16"]
            assert all(shape[0] == len(tokens) for shape in shapes)


@pytest.mark.parametrize("capture", [{"positions": "last"}, {"store": False}])
def test_rows_that_are_read_but_not_stored_are_rounded_too(made: Path, tmp_path: Path, capture: dict[str, Any]) -> None:
    """The direction reads the first token; what is stored is another, or nothing."""
    directions = [{**DIRECTION, "read": "first"}]
    whole, part = tmp_path / "whole", tmp_path / "part"
    sites = {"sites": ["mlp.0"]}
    harvest.run(settings(made, whole, SMALL["int8"], capture=sites, directions=directions))
    harvest.run(settings(made, part, SMALL["int8"], capture={**sites, **capture}, directions=directions))
    one, two = (harvest.open(path) for path in (whole, part))
    np.testing.assert_array_equal(one.directions()["sign"]["mlp.0"].raw, two.directions()["sign"]["mlp.0"].raw)
    assert verify_run(str(part)).findings == ()
    if "positions" in capture:
        last = {document: row for row, document in enumerate(one.tokens().column("document").to_pylist())}
        expected = one["mlp.0"][list(last.values())]
        step = expected.abs().amax(dim=1, keepdim=True) / 127  # other windows run: a value may fall on the next code
        assert ((two["mlp.0"][:] - expected).abs() <= step * (1 + 1e-4)).all()
    else:
        np.testing.assert_array_equal(two.statistics()["mlp.0"].all.mean, one.statistics()["mlp.0"].all.mean)
        with pytest.raises(harvest.RequestError, match="stores no rows"):
            two["mlp.0"]


@pytest.mark.parametrize(
    ("store", "names", "most"),
    [
        ({"compression": "zstd"}, 2, 8 << 20),
        ({"compression": "zstd"}, 40, (16 << 20) // 40),
        ({"compression": "zstd"}, 4000, 64 << 10),
        ({"compression": "zstd", "chunk_mb": 0.01}, 4000, 10485),
        ({}, 4000, 8 << 20),
    ],
)
def test_compressed_chunks_are_smaller_where_there_are_many_names(store: dict[str, Any], names: int, most: int) -> None:
    """What a single row of each costs is bounded, and pools of mixed batches hold the rows of many chunks."""
    asked = Job.model_validate({"model": {"name": "m"}, "data": {"path": "d"}, "run": {"path": "r"}, "store": store})
    assert chunk_bytes_of(asked, names) == most
