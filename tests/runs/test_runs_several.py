"""Runs of unlike tables read as one: with and without variants, with kept columns that are called like ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from commandcase import jsonl
from runcase import run
from tiny import byte_tokenizer, tiny_llama

import harvest

CAPTURE = {"layers": [0]}
AT = "residual.0"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A run of single texts and one of pairs, of a model that lies in a folder."""
    folder = tmp_path_factory.mktemp("mixed")
    model = {"name": str(folder / "model")}
    tiny_llama(vocab=300).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    plain = jsonl(folder / "plain.jsonl", [{"text": text} for text in ("abc", "de", "cab")])
    pairs = jsonl(folder / "pairs.jsonl", [{"good": "ab", "bad": "cab"}, {"good": "e", "bad": "abab"}])
    tables = {"capture": CAPTURE, "model": model, "store": {"shard_documents": 2}}
    for name, source, data in (("a", plain, {}), ("c", pairs, {"contrast": ["good", "bad"]})):
        harvest.run(
            {**tables, "data": {"path": str(source), **data}, "run": {"path": str(folder / name), "threads": 1}}
        )
    return harvest.open(folder / "a"), harvest.open(folder / "c")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_run_without_variants_has_variant_0_beside_one_with_them(mixed: Any, order: tuple[int, int]) -> None:
    parts = [mixed[i] for i in order]
    both = harvest.open(parts)
    variants = [
        run.tokens().column("variant").to_pylist() if "variant" in run.tokens().column_names else [0] * len(run)
        for run in parts
    ]
    assert both.tokens().column("variant").to_pylist() == [*variants[0], *variants[1]]
    assert both.tokens([len(both) - 1, 0], ["variant"]).column("variant").to_pylist() == [
        variants[1][-1],
        variants[0][0],
    ]
    expected = np.flatnonzero(np.array([*variants[0], *variants[1]]) == 1)
    assert both.rows_where(pc.field("variant") == 1).tolist() == expected.tolist()
    starts = [0, len(parts[0])]
    ids = [run.tokens().column("token").to_pylist() for run in parts]
    found = [start + row for start, of in zip(starts, ids) for row, token in enumerate(of) if token == ids[0][1]]
    assert both.find(token=ids[0][1]).tolist() == found
    texts = np.concatenate([run.find(text="ab") + start for run, start in zip(parts, starts)])
    assert both.find(text="ab").tolist() == texts.tolist()
    where = pc.field("variant") == 0
    batches = list(both.batches(AT, 4, where=where, with_rows=True))
    assert sorted(int(row) for _, rows in batches for row in rows) == both.rows_where(where).tolist()
    for row in range(len(both)):
        around = both.context(row, 99, 99).select(["run", "document", "variant"]).to_pylist()
        assert all(key == around[0] for key in around)
        assert around[0] == both.tokens(row, ["run", "document", "variant"]).to_pylist()[0]
    assert len(harvest.join(both, harvest.open(parts))) == len(both)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_documents_of_a_run_without_variants_are_variant_0(mixed: Any, order: tuple[int, int]) -> None:
    both = harvest.open([mixed[i] for i in order])
    table = both.documents()
    keys = {0: [(0, 0), (1, 0), (2, 0)], 1: [(0, 0), (0, 1), (1, 0), (1, 1)]}
    assert list(zip(table["document"].to_pylist(), table["variant"].to_pylist())) == keys[order[0]] + keys[order[1]]
    assert not table.schema.field("variant").nullable
    assert table["run"].to_pylist() == [0] * len(keys[order[0]]) + [1] * len(keys[order[1]])
    features, labels = both.features(AT, labels=["run", "variant"])
    assert len(features) == len(labels) == 7


def test_kept_columns_that_are_called_like_ours_are_renamed(tmp_path: Path) -> None:
    rows = [{"text": "a", "run": "r", "column.run": "s", "variant": "v"}]
    model = tiny_llama(vocab=300)
    kept = {"keep": ["run", "column.run", "variant"]}
    for name in "ab":
        run(tmp_path / name, jsonl(tmp_path / f"{name}.jsonl", rows), model=model, data=kept, capture=CAPTURE)
    table = harvest.open([tmp_path / name for name in "ab"]).documents()
    assert table["run"].to_pylist() == [0, 1]
    assert table["column.run"].to_pylist() == ["r"] * 2
    assert table["column.column.run"].to_pylist() == ["s"] * 2
    assert table["variant"].to_pylist() == ["v"] * 2, "no run has variants"
    labels = harvest.open([tmp_path / name for name in "ab"]).features(AT, "mean", ["run", "column.run"])[1]
    assert labels.to_pylist() == [{"run": number, "column.run": "r"} for number in (0, 1)]


def test_a_kept_variant_gives_way_to_that_of_another_run(tmp_path: Path) -> None:
    model = tiny_llama(vocab=300)
    texts = [{"text": "ab", "variant": "mine", "logit_diff": 5}]
    pairs = [{"good": "ab", "bad": "cd", "variant": "its"}]
    keep = {"keep": ["variant", "logit_diff"]}
    run(tmp_path / "a", jsonl(tmp_path / "a.jsonl", texts), model=model, data=keep, capture=CAPTURE)
    contrast = {"contrast": ["good", "bad"], "keep": ["variant"]}
    run(tmp_path / "c", jsonl(tmp_path / "c.jsonl", pairs), model=model, data=contrast, capture=CAPTURE)
    table = harvest.open([tmp_path / "a", tmp_path / "c"]).documents()
    assert table["variant"].to_pylist() == [0, 0, 1]
    assert table["column.variant"].to_pylist() == ["mine", "its", "its"]
    assert table["logit_diff"].to_pylist() == [5, None, None]
