"""Each format read back by its own loader: every row with its token, in every order and dtype that it can hold."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import google_crc32c
import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import tensorstore
import zarr
from fakes import Fake, write_run
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.export import selection
from harvest.export.export import Request, export_run
from harvest.export.formats import parquet
from harvest.export.formats import safetensors as our_safetensors
from harvest.export.known import format_names, format_of

Read = Callable[[Path, str], np.ndarray]


def arrow(folder: Path, label: str) -> np.ndarray:
    return np.asarray(datasets.load_from_disk(str(folder)).with_format("numpy")[label][:])


def tables(folder: Path, label: str) -> np.ndarray:
    found = datasets.load_dataset(str(folder), split="train", cache_dir=str(folder.parent / "cache"))
    return np.asarray(found.with_format("numpy")[label][:])


def tensors(folder: Path, label: str) -> np.ndarray:
    files = sorted(folder.glob(f"{label}-*.safetensors"))
    return np.concatenate([safetensors.torch.load_file(path)["activations"].float().numpy() for path in files])


READERS: Mapping[str, Read] = {
    "npy": lambda folder, label: np.load(folder / f"{label}.npy", mmap_mode="r"),
    "safetensors": tensors,
    "parquet": tables,
    "hf": arrow,
    "zarr": lambda folder, label: zarr.open_group(folder, mode="r")[label][:],
}


def export(fake: Fake, out: Path, **options: Any) -> dict[str, Any]:
    return export_run(Request(run=fake.path, out=str(out), **options))


def whole(fake: Fake, name: str) -> np.ndarray:
    rows: np.ndarray = fake.rows[name].float().numpy()
    return rows


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    """Four shards of two files, one of them empty, in bfloat16."""
    return write_run(tmp_path_factory.mktemp("run") / "r", dtype="bfloat16", files_of=[0, 0, 1, 1])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, slabs and files of a few rows, so that every boundary is met."""
    monkeypatch.setattr(selection, "BLOCK_BYTES", 100)
    monkeypatch.setattr(selection, "SLAB_ROWS", 5)
    monkeypatch.setattr(parquet, "GROUP_BYTES", 300)
    for function in (parquet.file_ranges, our_safetensors.pieces):
        monkeypatch.setattr(function, "__defaults__", (400,))


@pytest.mark.parametrize("format", READERS)
@pytest.mark.parametrize("options", [{}, {"shuffle": 3}, {"rows": "position > 0", "shuffle": 1, "limit": 9}], ids=str)
def test_every_format_holds_the_rows_in_the_order_of_batches_beside_their_tokens(
    format: str, options: dict[str, Any], fake: Fake, tmp_path: Path, small: None
) -> None:
    card = export(fake, tmp_path / "out", format=format, **options)
    run = harvest.open(fake.path)
    where = fake.tokens["position"] > 0 if "rows" in options else None
    batches = run.batches(
        "mlp.1", 7, seed=options.get("shuffle") or 0, shuffle="shuffle" in options, with_rows=True, where=where
    )
    order = np.concatenate([rows.numpy() for _, rows in batches])[: options.get("limit")]
    assert card["rows"] == len(order)
    for name in fake.names:
        np.testing.assert_array_equal(READERS[format](tmp_path / "out", name), whole(fake, name)[order])
    tokens = pq.read_table(tmp_path / "out/tokens.parquet")
    assert tokens.schema.remove_metadata() == run.tokens(slice(0, 0)).schema.remove_metadata()
    for column, values in fake.tokens.items():
        np.testing.assert_array_equal(tokens[column].to_numpy(), values[order])


@pytest.mark.parametrize("format", ["hf", "parquet"])
def test_token_columns_stand_beside_the_rows(format: str, fake: Fake, tmp_path: Path, small: None) -> None:
    export(fake, tmp_path / "out", format=format, name=["residual.10", "mlp.1"], shuffle=5)
    for column in fake.tokens:
        beside = READERS[format](tmp_path / "out", column)
        np.testing.assert_array_equal(beside, pq.read_table(tmp_path / "out/tokens.parquet")[column].to_numpy())


@pytest.mark.parametrize("format", format_names())
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
def test_without_a_dtype_every_value_survives(format: str, stored: str, tmp_path: Path) -> None:
    odd = {"float32": 1 / 3, "float16": 6e-8, "bfloat16": 3e38}[stored]
    fake = write_run(tmp_path / "r", dtype=stored, change={("mlp.1", 2): odd}, names={"mlp.1": 4})
    card = export(fake, tmp_path / "out", format=format, naming="hf")
    if format in READERS:
        np.testing.assert_array_equal(
            READERS[format](tmp_path / "out", "mlp.1").astype(np.float32), whole(fake, "mlp.1")
        )
    held = card["columns"]["mlp.1"]
    assert held["stored_dtype"] == stored
    assert held["dtype"] == (stored if stored in format_of(format).known else "float32")


def test_bfloat16_is_kept_where_it_is_asked_for_and_read_by_tensorstore(fake: Fake, tmp_path: Path) -> None:
    export(fake, tmp_path / "out", format="zarr", dtype="bfloat16")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/out/mlp.1/"}}
    found = np.asarray(tensorstore.open(spec).result().read().result())
    assert found.dtype.name == "bfloat16"
    np.testing.assert_array_equal(found.astype(np.float32), whole(fake, "mlp.1"))


def test_contexts_lie_one_after_another_in_every_flat_format(fake: Fake, tmp_path: Path, small: None) -> None:
    for format, read in READERS.items():
        card = export(fake, tmp_path / format, format=format, context=2, shuffle=4)
        tokens = pq.read_table(tmp_path / format / "tokens.parquet")
        document, position = (tokens[c].to_numpy().reshape(-1, 2) for c in ("document", "position"))
        assert (document[:, 0] == document[:, 1]).all()
        assert (position[:, 0] + 1 == position[:, 1]).all()
        keys = list(zip(fake.tokens["document"], fake.tokens["position"]))
        order = [keys.index(key) for key in zip(document.reshape(-1), position.reshape(-1))]
        np.testing.assert_array_equal(read(tmp_path / format, "residual.0"), whole(fake, "residual.0")[order])
        assert card["contexts"] == sum(int(n) // 2 for n in (3, 1, 4, 1, 5, 9, 2, 6))


@pytest.mark.parametrize("format", format_names())
def test_the_card_lists_every_file_with_its_size_and_checksum(format: str, fake: Fake, tmp_path: Path) -> None:
    export(fake, tmp_path / "out", format=format, name=["residual.10"], shuffle=11)
    card = json.loads((tmp_path / "out/export.json").read_text())
    there = {str(p.relative_to(tmp_path / "out")): p for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert set(there) - {"export.json"} == set(card["files"])
    for path, listed in card["files"].items():
        data = there[path].read_bytes()
        assert (len(data), f"{google_crc32c.value(data):08x}") == (listed["bytes"], listed["crc32c"])
    (column,) = card["columns"].values()
    assert (column["name"], column["site"], column["layer"], column["width"]) == ("residual.10", "residual", 10, 6)
    assert (card["shuffle"], card["rows"], card["run"]["rows"]) == (11, 31, 31)
    assert "seed 11" in (tmp_path / "out/README.md").read_text()


def test_two_exports_of_one_request_are_the_same_bytes(fake: Fake, tmp_path: Path) -> None:
    for format in format_names():
        cards = [export(fake, tmp_path / f"{format}{i}", format=format, shuffle=2, name=["residual.0"]) for i in (1, 2)]
        first, second = (
            {p: f for p, f in card["files"].items() if p not in ("README.md", "export.json")} for card in cards
        )
        assert first == second


def test_an_export_is_read_where_harvest_is_not_installed(fake: Fake, tmp_path: Path) -> None:
    export(fake, tmp_path / "out", format="zarr", name=["mlp.1"])
    code = (
        "import sys; sys.modules['harvest'] = None\n"
        f"import zarr; print(zarr.open_group({str(tmp_path / 'out')!r}, mode='r')['mlp.1'][:].sum())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == whole(fake, "mlp.1").sum()


def test_an_unfinished_run_gives_the_rows_that_are_committed_and_the_card_says_so(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r", complete=False)
    card = export(fake, tmp_path / "out", format="npy")
    assert card["run"]["complete"] is False
    assert "unfinished" in (tmp_path / "out/README.md").read_text()
    np.testing.assert_array_equal(np.load(tmp_path / "out/mlp.1.npy"), whole(fake, "mlp.1"))


def test_spans_stand_beside_the_rows_as_text_and_filter_them(tmp_path: Path, small: None) -> None:
    texts = [
        {"text": "one two three", "marks": [{"name": name, "start": 4, "end": 7}]} for name in ("a", "b", "c", "b")
    ]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    job = {
        "data": {"spans": "marks", "path": str(tmp_path / "texts.jsonl")},
        "capture": {"layers": [0]},
        "store": {"shard_documents": 2},
        "run": {"path": str(tmp_path / "run"), "threads": 1},
    }
    run = harvest.run(job, model=tiny_llama(vocab=300), tokenizer=byte_tokenizer())
    spans = run.tokens().column("span").to_pylist()
    assert set(spans) == {"a", "b", "c", None}
    for rows, kept in ((None, lambda span: True), ("span in ['b', 'c']", lambda span: span in ("b", "c"))):
        chosen = [row for row, span in enumerate(spans) if kept(span)]
        for format in ("hf", "parquet"):
            out = tmp_path / f"{format}{rows is None}"
            export_run(Request(format=format, run=run.path, out=str(out), rows=rows))
            beside = pq.read_table(out / "tokens.parquet")["span"].to_pylist()
            assert beside == [spans[row] for row in chosen]
            files = sorted(out.glob("data-*"))
            tables = [datasets.load_from_disk(str(out)).data] if format == "hf" else map(pq.read_table, files)
            assert [span for table in tables for span in table.column("span").to_pylist()] == beside


@pytest.mark.parametrize("format", format_names())
def test_no_more_than_a_block_and_a_slab_are_in_memory(
    format: str, fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    blocks, slabs = [], []
    inner_blocks, inner_tokens = selection.Selected.blocks, selection.Selected.tokens

    def watched_blocks(self: Any, *args: Any, **more: Any) -> Any:
        for block in inner_blocks(self, *args, **more):
            blocks.append(sum(values.nbytes for values in block.values.values()))
            yield block

    def watched_tokens(self: Any, *args: Any, **more: Any) -> Any:
        for table in inner_tokens(self, *args, **more):
            slabs.append(len(table))
            yield table

    monkeypatch.setattr(selection.Selected, "blocks", watched_blocks)
    monkeypatch.setattr(selection.Selected, "tokens", watched_tokens)
    export(fake, tmp_path / "out", format=format, naming="hf", shuffle=1, name=["mlp.1", "residual.0"])
    assert max(blocks) <= 100
    assert max(slabs) <= 5
    assert len(blocks) > 5
