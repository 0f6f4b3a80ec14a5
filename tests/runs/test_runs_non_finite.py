"""NaN and infinities: counted by name and by document, said aloud, and never spread to what stands beside them."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from commandcase import jsonl
from families import FAMILIES, HAVE, REFUSED, tiny_family
from oracle import TOLERANCE_TINY, at_names, worst_error
from plainrun import PlainRun
from runcase import run, stacked

import harvest
from harvest.__main__ import _status
from harvest.checking.verify import verify_run
from harvest.errors import WorkError
from harvest.model.points import SITES
from harvest.model.sites import resolve_names
from harvest.shardwork import ShardWork

ODD = 50
"""The id whose embedding is no number."""
DOCUMENTS = [[5, 9, 17, 23], [7], [ODD, 2, 3], [3, ODD], [5, 6, ODD, 8, 9, 10], [5, 9, 17, 23, 31, 40, 41, 42, 43]]
CLEAN = [0, 1, 5]
ALL_SITES = [family for family in ("llama", "gemma2", "olmoe", "mamba", "bert", "gpt2") if family in FAMILIES]


def run_ids(path: Path, model: Any, documents: list[list[int]] = DOCUMENTS, **tables: Any) -> PlainRun:
    tables = {"data": {"ids": "i"}, "tokens": {"batch": 1000}, **tables}
    return run(path, [{"i": ids} for ids in documents], model=model, tokenizer=None, **tables)


def poisoned(family: str, *ids: int) -> Any:
    model = tiny_family(family)
    with torch.no_grad():
        for i in ids:
            model.get_input_embeddings().weight[i] = float("nan")
    return model


def check(plain: PlainRun, model: Any, sites: list[str], documents: list[list[int]] = DOCUMENTS) -> None:
    """Every row is what it is alone: the same numbers, and NaN or infinite in the same rows."""
    names = resolve_names(model, sites, "all")
    for number, ids in enumerate(documents):
        expected = at_names(model, ids, names)
        for name in map(str, names):
            found, right = torch.from_numpy(plain.of(number, name)), expected[name]
            finite = right.isfinite().all(dim=1)
            assert torch.equal(found.isfinite().all(dim=1), finite), (number, name)
            assert worst_error(found[finite], right[finite]) < TOLERANCE_TINY


@pytest.mark.parametrize("batching", ["sorted", "packed"])
@pytest.mark.parametrize("family", ALL_SITES)
def test_what_is_no_number_stays_in_its_document(family: str, batching: str, tmp_path: Path) -> None:  # E20
    if batching == "packed" and family in REFUSED:
        pytest.skip("refused")
    sites = [site for site in SITES if site in HAVE[family]]
    model = poisoned(family, ODD, 0)  # 0 is what batches are padded with
    tables = {"capture": {"sites": sites}, "tokens": {"batch": 1000, "batching": batching}}
    plain = run_ids(tmp_path / "run", model, **tables)
    check(plain, model, sites)
    (record,) = plain.records.values()
    counts = {name: int((~np.isfinite(rows)).sum()) for name, rows in plain.rows.items()}
    assert record["non_finite"] == {name: count for name, count in counts.items() if count}
    assert record["non_finite_documents"] == 3
    reasons = [row["reason"] for row in plain.documents]
    assert reasons == [None, None, "non-finite values", "non-finite values", "non-finite values", None]
    assert {row["status"] for row in plain.documents} == {"stored"}


def test_rows_chosen_and_windows_cut_out_of_a_packed_row_keep_their_places(tmp_path: Path) -> None:
    model, documents = poisoned("llama", ODD), [*DOCUMENTS, list(range(2, 30)), [4] * 11]
    tokens = {"batch": 64, "batching": "packed", "context": 8}
    whole = run_ids(tmp_path / "whole", model, documents, tokens=tokens)
    some = run_ids(tmp_path / "some", model, documents, tokens=tokens, capture={"positions": {"every": 2}})
    at = whole.tokens["position"] % 2 == 0
    assert [key for key, kept in zip(whole.keys, at) if kept] == some.keys
    for name, rows in some.rows.items():
        np.testing.assert_allclose(rows, whole.rows[name][at], rtol=1e-4, atol=1e-4)
    assert [row["rows"] for row in whole.documents] == [len(ids) for ids in documents]


@pytest.mark.parametrize("store", [True, False])
def test_sums_and_pools_have_what_was_stored_after_all(store: bool, tmp_path: Path) -> None:  # E39
    model = poisoned("llama", ODD)
    tokens = {"batch": 1000, "batching": "packed"}
    plain = run_ids(tmp_path / "rows", model, tokens=tokens)
    run_ids(tmp_path / "run", model, tokens=tokens, capture={"store": store, "pool": ["mean"]})
    found = harvest.open(tmp_path / "run")
    for name, statistics in found.statistics().items():
        rows = stacked(plain, name)
        finite = rows[np.isfinite(rows).all(axis=1)]
        assert statistics.count == len(finite) < len(rows)
        np.testing.assert_allclose(statistics.mean, finite.mean(axis=0), rtol=1e-11, atol=1e-12)
        pooled = found.features(name, "mean")
        assert np.isfinite(pooled).all(axis=1).tolist() == [number in CLEAN for number in range(len(DOCUMENTS))]
    assert found.documents()["reason"].to_pylist().count("non-finite values") == 3


def test_a_document_that_was_cut_says_both(tmp_path: Path) -> None:
    plain = run_ids(tmp_path / "run", poisoned("llama", ODD), tokens={"context": 3, "long": "truncate"})
    assert [row["reason"] for row in plain.documents] == [
        "truncated",
        None,
        "non-finite values",
        "non-finite values",
        "truncated, non-finite values",
        "truncated",
    ]


def overflowing(dtype: torch.dtype) -> Any:
    model = tiny_family("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3] *= 3e4
    return model.to(dtype)


@pytest.mark.parametrize("batching", ["sorted", "packed"])
def test_float16_that_overflows_is_flagged_by_document_and_layer(batching: str, tmp_path: Path) -> None:  # E37
    documents, tokens = [[i, *ids] for i, ids in enumerate(DOCUMENTS * 3)], {"batch": 1000, "batching": batching}
    wide = run_ids(tmp_path / "wide", overflowing(torch.float32), documents, tokens=tokens)
    bf16 = run_ids(tmp_path / "bf16", overflowing(torch.bfloat16), documents, tokens=tokens, store={"dtype": "float32"})
    assert [r["non_finite"] for run in (wide, bf16) for r in run.records.values()] == [{}, {}]
    half = run_ids(tmp_path / "half", overflowing(torch.float16), documents, tokens=tokens, store={"dtype": "float32"})
    flagged = {row["document"] for row in half.documents if row["reason"] == "non-finite values"}
    rows = wide.rows["residual.0"]
    over = {wide.keys[i][0] for i in np.flatnonzero((np.abs(rows) > 65520).any(axis=1)).tolist()}
    assert 0 < len(flagged) < len(documents)
    assert flagged == over
    assert half.rows["residual.0"].shape == rows.shape
    (record,) = half.records.values()
    assert record["non_finite_documents"] == len(flagged)
    assert set(record["non_finite"]) >= {"residual.0"}
    assert json.loads((tmp_path / "half/complete.json").read_text())["non_finite_documents"] == len(flagged)
    table = pq.read_table(next((tmp_path / "half/shards").glob("*/documents.parquet")))
    assert harvest.open(tmp_path / "half").documents()["reason"].to_pylist() == table["reason"].to_pylist()


# ---- said aloud ------------------------------------------------------------------------------------------------------


def write_job(tmp_path: Path, **model: str) -> Path:
    """A job file over the model that overflows in float16, saved."""
    overflowing(torch.float32).save_pretrained(tmp_path / "model")
    jsonl(tmp_path / "d.jsonl", [{"i": [n, *ids]} for n, ids in enumerate(DOCUMENTS * 3)])
    lines = [f'name = "{tmp_path}/model"', *(f'{key} = "{value}"' for key, value in model.items())]
    path = tmp_path / "job.toml"
    path.write_text(
        "[model]\n" + "\n".join(lines) + f'\n[data]\npath = "{tmp_path}/d.jsonl"\nids = "i"\n'
        f'[run]\npath = "{tmp_path}/run"\nthreads = 1\n'
    )
    return path


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_an_overflow_is_in_the_summary_and_in_a_line_of_warning(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # E37
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    job = write_job(tmp_path, dtype="float16")
    assert _status(["run", str(job), *arguments]) == 0
    out, err = capsys.readouterr()
    summary = harvest.open(tmp_path / "run").summary()
    count = summary["non_finite_documents"]
    assert count > 0
    said = "1 document" if count == 1 else f"{count} documents"
    (line,) = [line for line in err.splitlines() if line.startswith("harvest: warning: ")]
    assert f"residual.0: {summary['non_finite']['residual.0']}, " in line
    assert f"in {said}; documents() names them; model.dtype = 'float16' ends at 65504" in line
    assert json.loads(out.splitlines()[-1])["non_finite_documents"] == count if arguments else f"in {said}" in out
    assert _status(["status", str(tmp_path / "run"), *arguments]) == 0
    out, _ = capsys.readouterr()
    assert json.loads(out)["non_finite_documents"] == count if arguments else f"in {said}" in out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_of_finite_numbers_warns_of_nothing(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # E37
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert _status(["run", str(write_job(tmp_path, dtype=dtype))]) == 0
    out, err = capsys.readouterr()
    assert "non-finite" not in out
    assert "warning" not in err


def test_a_span_that_no_document_had_is_told_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    job = write_job(tmp_path)
    marked = [{"i": ids, "s": [{"name": "noun", "start": 0, "end": 1}]} for ids in DOCUMENTS]
    jsonl(tmp_path / "d.jsonl", marked)
    settings = ["--set", "data.spans=s", "--set", "capture.positions={span = ['noun', 'nuon']}"]
    assert _status(["run", str(job), *settings]) == 0
    out, err = capsys.readouterr()
    assert "noun: 6 documents, nuon: 0 documents" in out
    assert "harvest: warning: capture.positions: no document has a token in span 'nuon'" in err.splitlines()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_value_that_the_store_cannot_hold_names_document_name_and_value(dtype: str, tmp_path: Path) -> None:  # E38
    documents = [[n, *ids] for n, ids in enumerate(DOCUMENTS * 3)]
    with pytest.raises(WorkError, match=r"document \d+: residual\.\d holds -?\d.*store\.dtype = 'float16'.* 65504"):
        run_ids(tmp_path / "run", overflowing(getattr(torch, dtype)), documents, store={"dtype": "float16"})
    assert not list((tmp_path / "run/ledger").glob("*"))


def test_verify_names_the_documents_and_finds_a_table_that_hides_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ids(tmp_path / "run", poisoned("llama", ODD))
    report = verify_run(tmp_path / "run")
    assert not report.damaged
    notes = {(finding.object.rpartition("/")[2], finding.what) for finding in report.findings}
    assert notes >= {(f"residual.{layer}", "non-finite values in document 2, 3, 4") for layer in range(3)}

    listed = ShardWork._documents
    monkeypatch.setattr(
        ShardWork,
        "_documents",
        lambda self: [replace(row, reason=None) if row.document == 3 else row for row in listed(self)],
    )
    run_ids(tmp_path / "hidden", poisoned("llama", ODD))
    damage = {finding.what for finding in verify_run(tmp_path / "hidden").findings if finding.damage}
    assert damage == {
        "documents with non-finite values: 2, the ledger says 3",
        "not listed with non-finite values: document 3",
    }
