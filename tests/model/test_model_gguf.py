"""GGUF headers: what the fast reader gives is what the library's own gives, field by field; torn ones are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvest.errors import RequestError
from harvest.model.gguffile import Reader, read_once
from harvest.model.load import load_config
from harvest.settings.model import ModelSettings

texts = st.lists(st.text(max_size=12), min_size=1, max_size=20)
numbers = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20)
floats = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20)
flags = st.lists(st.booleans(), min_size=1, max_size=5)


def written(path: Path, arrays: dict[str, list[Any]], endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE) -> Path:
    """A file with these arrays among scalars, and two tensors."""
    writer = gguf.GGUFWriter(path, "llama", endianess=endianess)
    writer.add_uint32("llama.block_count", 3)
    for key, values in arrays.items():
        writer.add_array(key, values)
    writer.add_string("general.name", "naïve")
    writer.add_tensor("token_embd.weight", np.arange(64, dtype=np.float32).reshape(4, 16))
    writer.add_tensor("output_norm.weight", np.arange(16, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same(path: Path) -> None:
    ours, theirs = Reader(path), gguf.GGUFReader(path)
    assert list(ours.fields) == list(theirs.fields)
    for key, expected in theirs.fields.items():
        found = ours.fields[key]
        assert (found.offset, found.data, found.types) == (expected.offset, expected.data, expected.types)
        assert [part.tobytes() for part in found.parts] == [part.tobytes() for part in expected.parts]
        assert [part.dtype for part in found.parts] == [part.dtype for part in expected.parts]
        assert found.contents() == expected.contents()
    for found, expected in zip(ours.tensors, theirs.tensors, strict=True):
        assert (found.name, found.data_offset, found.tensor_type) == (
            expected.name,
            expected.data_offset,
            expected.tensor_type,
        )
        assert np.array_equal(found.data, expected.data)


@settings(max_examples=40, deadline=None)
@given(tokens=texts, scores=floats, types=numbers, added=flags)
def test_every_field_and_tensor_is_as_the_library_reads_it(
    tmp_path_factory: pytest.TempPathFactory,
    tokens: list[str],
    scores: list[float],
    types: list[int],
    added: list[bool],
) -> None:
    arrays = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores, "a.types": types, "a.added": added}
    assert_same(written(tmp_path_factory.mktemp("gguf") / "m.gguf", arrays))


def test_files_of_the_other_byte_order_are_read_too(tmp_path: Path) -> None:
    arrays = {"tokenizer.ggml.tokens": ["a", "bcd"], "a.types": [1, 2, 70000]}
    path = written(tmp_path / "m.gguf", arrays, gguf.GGUFEndian.BIG)
    assert_same(path)
    assert Reader(path).fields["a.types"].contents() == [1, 2, 70000]


@pytest.mark.parametrize("values", [["abc"] * 50, list(range(1000))])
def test_a_file_that_ends_within_an_array_is_an_error_and_not_a_shorter_array(
    tmp_path: Path, values: list[Any]
) -> None:
    path = written(tmp_path / "m.gguf", {"a.values": values})
    path.write_bytes(path.read_bytes()[:400])
    with pytest.raises(Exception):  # noqa: B017, PT011  # as the library: whatever the reading of nothing raises
        Reader(path)
    with pytest.raises(RequestError, match=r"^model\.name = .*cannot be loaded"):
        load_config(ModelSettings(name=str(path)))


def test_a_header_is_parsed_once_however_often_it_is_asked_for_and_again_when_the_file_changes(tmp_path: Path) -> None:
    path, own = written(tmp_path / "m.gguf", {"a.values": [1]}), gguf.GGUFReader
    with read_once():
        first = gguf.GGUFReader(path)
        assert gguf.GGUFReader(path) is first
        path.unlink()
        written(path, {"a.values": [2, 3]})
        assert gguf.GGUFReader(str(path)).fields["a.values"].contents() == [2, 3]
    assert gguf.GGUFReader is own
