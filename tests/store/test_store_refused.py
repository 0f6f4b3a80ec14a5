"""Damaged tables of examples, torn completions, objects that end within a row, and places that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from harvest.errors import DamageError, RequestError
from harvest.records import ArraySpec
from harvest.store.arrays import StoredArray
from harvest.store.attempt import AttemptWriter
from harvest.store.examples import KEYS, StoredExamples, examples_bytes
from harvest.store.files import Files
from harvest.store.layout import attempt_name
from harvest.store.ledger import Ledger
from harvest.store.opening import open_files

TEXTS = ("read", "pair")
NOTHING = {field.name: np.zeros(0, field.type.to_pandas_dtype()) for field in KEYS if field.name not in TEXTS}


class Cut:
    """A store of which every read gives two bytes less than it is asked for."""

    def __init__(self, inner: Files) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read_range(self, path: str, start: int, length: int) -> bytes:
        return self.inner.read_range(path, start, length)[:-2]


def test_examples_that_are_missing_torn_or_lack_a_name_are_damage(tmp_path: Path) -> None:
    files = open_files(str(tmp_path))
    whole = examples_bytes({**NOTHING, "read": [], "pair": []}, {"residual.1": np.zeros((0, 3), np.float32)})
    with pytest.raises(DamageError, match=r"/s\.arrow: missing$"):
        StoredExamples(files, "s.arrow")
    for data in (b"", whole[:-5], b"ARROW1" + bytes(90)):
        (tmp_path / "s.arrow").write_bytes(data)
        with pytest.raises(DamageError, match=r"/s\.arrow: not a readable Arrow file of examples \("):
            StoredExamples(files, "s.arrow")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema([pa.field("read", pa.string())])):
        pass
    (tmp_path / "s.arrow").write_bytes(sink.getvalue().to_pybytes())
    with pytest.raises(DamageError, match="not a readable Arrow file of examples"):
        StoredExamples(files, "s.arrow")
    (tmp_path / "s.arrow").write_bytes(whole)
    with pytest.raises(DamageError, match=r"/s\.arrow: no states of 'residual\.2'$"):
        StoredExamples(files, "s.arrow").states("residual.2", np.zeros(0, np.int64))
    assert StoredExamples(files, "s.arrow").states("residual.1", np.zeros(0, np.int64)).shape == (0, 3)


@pytest.mark.parametrize("text", ["[]", "3", '"complete"'])
def test_a_completion_that_is_no_object_names_the_way_out(text: str, tmp_path: Path) -> None:
    (tmp_path / "complete.json").write_text(text)
    with pytest.raises(DamageError, match=r"complete\.json: not an object; harvest verify --repair mends it$"):
        Ledger(open_files(str(tmp_path))).completion()


def test_an_object_elsewhere_that_ends_within_a_row_says_which(tmp_path: Path) -> None:
    files = open_files(f"memory://{tmp_path.name}-cut")
    attempt = attempt_name("f00000-s000000", "0123abcd", 1)
    spec = ArraySpec(rows=5, width=4, dtype="float32")
    writer = AttemptWriter(files, attempt, {"residual.1": spec}, chunk_bytes=16)
    writer.append("residual.1", np.arange(20, dtype=np.float32).reshape(5, 4))
    writer.close()
    path = f"shards/{attempt}/residual.1/c.0.0"
    whole = files.read(path)
    cut: Any = Cut(files)  # after its size has been looked at
    with pytest.raises(DamageError, match=r"residual\.1/c\.0\.0: ends inside row 3$"):
        StoredArray(cut, attempt, "residual.1").read(1, 4)
    files.replace(path, whole[:40])
    with pytest.raises(DamageError, match=rf"residual\.1/c\.0\.0: 40 bytes, expected {len(whole)}$"):
        StoredArray(files, attempt, "residual.1").read(1, 4)


def test_places_that_no_folder_can_be_are_named(tmp_path: Path) -> None:
    for path in ("", "a\0b"):
        with pytest.raises(RequestError, match=r"^run\.path = .*: a folder or a URL is needed$"):
            open_files(path)
    with pytest.raises(RequestError, match=r"^run\.path = '.*: File name too long$") as caught:
        open_files(str(tmp_path / ("x" * 5000)))
    assert len(str(caught.value)) < 300
    with pytest.raises(RequestError, match=r"^run\.path = 'nonsense://x/y': unknown kind of store 'nonsense'$"):
        open_files("nonsense://x/y")
