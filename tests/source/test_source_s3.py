"""The same rows from an object store: slices with cursors, row groups by position, versions by ETag."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from s3server import s3_server

from harvest.errors import RequestError
from harvest.settings.tables import DataSettings
from harvest.source.open import open_source

s3fs = pytest.importorskip("s3fs")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        fs = s3fs.S3FileSystem()
        fs.makedirs("texts", exist_ok=True)
        yield fs


def test_objects_in_a_bucket_are_found_read_in_slices_and_known_by_version(bucket: Any) -> None:
    lines = [json.dumps({"text": f"t{i}"}) for i in range(1000)]
    with bucket.open("texts/json/a.jsonl", "w") as file:
        file.write("\n".join(lines[:600]))
    with bucket.open("texts/json/b.jsonl", "w") as file:
        file.write("\n".join(lines[600:]))
    with bucket.open("texts/table/a.parquet", "wb") as file:
        pq.write_table(pa.table({"text": [f"t{i}" for i in range(1000)]}), file, row_group_size=100)
    data = DataSettings(path="s3://texts/json")
    source = open_source(data, ["text"])
    assert [(file.name, file.path, file.rows) for file in source.files] == [
        ("a.jsonl", "s3://texts/json/a.jsonl", None),
        ("b.jsonl", "s3://texts/json/b.jsonl", None),
    ]
    first = source.rows(0, 0, 250)
    texts = [row.values["text"] for row in first]
    rest = open_source(data, ["text"]).rows(0, 250, 700, json.loads(json.dumps(first.cursor)))
    texts += [row.values["text"] for row in rest] + [row.values["text"] for row in source.rows(1, 0, 700)]
    assert texts == [f"t{i}" for i in range(1000)]
    assert rest.ended
    table = open_source(DataSettings(path="s3://texts/table/*.parquet"), ["text"])
    assert table.files[0].rows == 1000
    assert [row.values["text"] for row in table.rows(0, 449, 452)] == ["t449", "t450", "t451"]

    before = source.files[0].fingerprint
    assert open_source(data, ["text"]).files[0].fingerprint == before
    bucket.pipe("texts/json/a.jsonl", "\n".join(lines[1:600] + lines[:1]).encode())
    assert open_source(data, ["text"]).files[0].fingerprint != before


def test_a_missing_bucket_is_one_line(bucket: Any) -> None:
    with pytest.raises(RequestError, match=r"data\.path = 's3://nowhere/a\.jsonl': no such file"):
        open_source(DataSettings(path="s3://nowhere/a.jsonl"), ["text"])
