"""Tables: exact schemas, every kept value in its type or as text, and reads of a few rows at a time."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvest.errors import DamageError
from harvest.records import DocumentRow, TokenColumns
from harvest.store import tables
from harvest.store.opening import open_files
from harvest.store.tables import (
    DOCUMENTS_SCHEMA,
    TOKENS_SCHEMA,
    StoredTable,
    concat_documents,
    documents_table,
    kept_names,
    parquet_bytes,
    tokens_table,
)


def token_columns(rows: int) -> TokenColumns:
    numbers = np.arange(rows)
    return TokenColumns(
        document=(numbers // 7 + 2**40).astype(np.int64),
        position=(numbers % 7).astype(np.int32),
        token=(numbers * 7919 % 50_000).astype(np.int32),
        chunk=(numbers % 7 // 4).astype(np.int32),
        special=numbers % 7 == 0,
    )


def document(number: int, **kept: Any) -> DocumentRow:
    return DocumentRow(document=number, tokens=3, rows=3, status="stored", reason=None, kept=kept)


def values_of(*values: Any) -> pa.ChunkedArray:
    return documents_table([document(i, x=value) for i, value in enumerate(values)], ["x"]).column("x")


def test_the_token_table_has_the_documented_schema_and_comes_back_from_parquet_as_it_was() -> None:
    columns = token_columns(1000)
    found = pq.read_table(io.BytesIO(parquet_bytes(tokens_table(columns))))
    assert [(field.name, str(field.type), field.nullable) for field in found.schema] == [
        ("document", "int64", False),
        ("position", "int32", False),
        ("token", "int32", False),
        ("chunk", "int32", False),
        ("special", "bool", False),
    ]
    for name in TOKENS_SCHEMA.names:
        np.testing.assert_array_equal(found.column(name).to_numpy(), getattr(columns, name))


def test_an_empty_shard_has_empty_tables_of_the_same_schema() -> None:
    assert pq.read_table(io.BytesIO(parquet_bytes(tokens_table(token_columns(0))))).schema.equals(TOKENS_SCHEMA)
    found = pq.read_table(io.BytesIO(parquet_bytes(documents_table([]))))
    assert (found.num_rows, found.schema.names) == (0, DOCUMENTS_SCHEMA.names)
    assert concat_documents([]).schema.equals(DOCUMENTS_SCHEMA)
    assert concat_documents([documents_table([]), documents_table([document(1)])]).num_rows == 1


def test_the_same_table_is_the_same_bytes_and_positions_cost_little() -> None:
    table = tokens_table(token_columns(200_000))
    data = parquet_bytes(table)
    assert data == parquet_bytes(table)
    column = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(1)
    assert "DELTA_BINARY_PACKED" in column.encodings
    assert column.total_compressed_size < column.num_values


def test_documents_say_what_became_of_them() -> None:
    rows = [
        DocumentRow(document=5, tokens=9, rows=4, status="stored", reason="truncated"),
        DocumentRow(document=6, tokens=0, rows=0, status="skipped", reason="null"),
        DocumentRow(document=7, tokens=1, rows=1, status="stored", reason=None),
    ]
    found = pq.read_table(io.BytesIO(parquet_bytes(documents_table(rows))))
    assert found.to_pylist() == [
        {"document": 5, "tokens": 9, "rows": 4, "status": "stored", "reason": "truncated"},
        {"document": 6, "tokens": 0, "rows": 0, "status": "skipped", "reason": "null"},
        {"document": 7, "tokens": 1, "rows": 1, "status": "stored", "reason": None},
    ]


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ((1, None, -3), "int64", None),
        ((True, False), "bool", None),
        ((1.5, None), "double", None),
        ((1, 1.5), "double", [1.0, 1.5]),
        (("a", None, "007"), "string", None),
        ((b"\xff\x00",), "binary", None),
        ((None, None), "null", None),
        ((np.float32(0.5), np.int64(2)), "double", [0.5, 2.0]),
        ((1, "a", None), "string", ["1", "a", None]),
        ((True, 1), "string", ["true", "1"]),
        ((2**53 + 1, 0.5), "string", [str(2**53 + 1), "0.5"]),
        ((2**70,), "string", [str(2**70)]),
        (([1, "é"], {"a": None}), "string", ['[1, "é"]', '{"a": null}']),
        (("ok", "\ud800"), "string", ["ok", "\\ud800"]),
        (([1, 2],), "string", ["[1, 2]"]),
    ],
)
def test_kept_columns_keep_their_type_and_mixed_or_nested_ones_become_text(
    values: tuple[Any, ...], kind: str, expected: list[Any] | None
) -> None:
    found = values_of(*values)
    assert str(found.type) == kind
    assert found.to_pylist() == (list(values) if expected is None else expected)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(JSON, max_size=8), st.integers(0, 8))
def test_no_kept_value_stops_a_run_or_is_lost_however_the_shards_are_cut(values: list[Any], cut: int) -> None:
    documents = [document(number, x=value) for number, value in enumerate(values)]
    parts = [documents_table(part, ["x"]) for part in (documents[:cut], documents[cut:])]
    read = [pq.read_table(io.BytesIO(parquet_bytes(part))) for part in parts]
    found = concat_documents(read).column("x").to_pylist()
    assert len(found) == len(values)
    for value, kept in zip(values, found, strict=True):
        if isinstance(kept, str) and not isinstance(value, str):
            assert json.loads(kept) == value
        elif isinstance(value, str):
            assert kept == value.encode("utf-8", "backslashreplace").decode()
        else:
            assert kept == value


def test_documents_of_differently_typed_shards_concatenate_as_text_or_float() -> None:
    def shard(number: int, value: Any) -> pa.Table:
        return documents_table([document(number, x=value)], ["x"])

    assert concat_documents([shard(0, None), shard(1, 3)]).column("x").to_pylist() == [None, 3]
    assert concat_documents([shard(0, 2), shard(1, 0.5)]).column("x").to_pylist() == [2.0, 0.5]
    assert concat_documents([shard(0, 7), shard(1, "007")]).column("x").to_pylist() == ["7", "007"]
    assert concat_documents([shard(0, True), shard(1, 1), shard(2, None)]).column("x").to_pylist() == [
        "true",
        "1",
        None,
    ]
    assert concat_documents([shard(0, 2**60), shard(1, 0.5)]).column("x").to_pylist() == [str(2**60), "0.5"]
    found = concat_documents([shard(0, 1), documents_table([document(1)])])
    assert found.column("x").to_pylist() == [1, None]
    assert found.column("status").to_pylist() == ["stored", "stored"]
    assert found.column("document").to_pylist() == [0, 1]


def test_a_kept_column_with_one_of_our_names_is_prefixed_and_ours_stays() -> None:
    assert kept_names(["rows", "label", "column.rows"]) == ["column.rows", "label", "column.column.rows"]
    found = documents_table([document(4, rows="theirs", label=1)], ["rows", "label"])
    assert found.to_pylist()[0] | {} == {
        "document": 4,
        "tokens": 3,
        "rows": 3,
        "status": "stored",
        "reason": None,
        "column.rows": "theirs",
        "label": 1,
    }


@pytest.mark.parametrize("where", ["local", "memory"])
def test_any_range_of_rows_and_columns_reads_back(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROW_GROUP_ROWS", 10)
    files = open_files(str(tmp_path) if where == "local" else f"memory:/{tmp_path}")
    whole = tokens_table(token_columns(35))
    files.create("tokens.parquet", parquet_bytes(whole))
    stored = StoredTable(files, "tokens.parquet")
    assert (stored.rows, stored.schema) == (35, TOKENS_SCHEMA)
    for start in range(0, 36, 5):
        for stop in range(start, 36, 3):
            assert stored.read(start=start, stop=stop).equals(whole.slice(start, stop - start))
    assert stored.read(["token", "document"], 9, 12).equals(whole.select(["token", "document"]).slice(9, 3))
    assert stored.read() == whole
    with pytest.raises(IndexError, match="has 35"):
        stored.read(start=0, stop=36)


@pytest.mark.parametrize("harm", ["missing", "torn", "foreign", "flipped", "empty"])
def test_a_damaged_table_is_named(tmp_path: Path, harm: str) -> None:
    files = open_files(str(tmp_path))
    data = parquet_bytes(tokens_table(token_columns(5000)))
    harmed = {
        "torn": data[:-7],
        "foreign": b"hello",
        "flipped": data[:100] + bytes(200) + data[300:],
        "empty": b"",
    }
    if harm != "missing":
        files.create("tokens.parquet", harmed[harm])
    with pytest.raises(DamageError, match=r"tokens\.parquet: (missing|not a readable)") as caught:
        StoredTable(files, "tokens.parquet").read()
    assert "\n" not in str(caught.value)
