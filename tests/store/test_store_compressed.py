"""Compressed arrays: plain zarr and TensorStore read every bit; only the chunks that are asked for are decoded."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import harvest.store.bfloat16  # noqa: F401  (registers the data type)
from harvest.errors import DamageError
from harvest.records import ArraySpec, StoredObject
from harvest.store.arrays import StoredArray
from harvest.store.attempt import AttemptWriter
from harvest.store.chunks import DecodedChunks, compressed, decompressed
from harvest.store.files import Files
from harvest.store.grid import DTYPES
from harvest.store.opening import open_files
from tests.faults import Faults, FaultyFiles

ATTEMPT = "f00000-s000000.9c1f02ab-1"
DTYPE_NAMES = ("float32", "float16", "bfloat16", "int8")


def some_rows(rows: int, width: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Any bits, a few different ones, so that they compress."""
    bits = np.random.default_rng(seed).choice(
        np.random.default_rng(1).integers(0, 256, 40, np.uint8), (rows, width * 4)
    )
    return bits[:, : width * np.dtype(DTYPES[dtype]).itemsize].copy().view(DTYPES[dtype])


def bits(values: Any) -> bytes:
    return np.ascontiguousarray(values).tobytes()


def write(files: Files, rows: np.ndarray, dtype: str, *, steps: list[int], **options: int) -> dict[str, StoredObject]:
    spec = ArraySpec(rows=len(rows), width=rows.shape[1], dtype=dtype, compression="zstd")
    with AttemptWriter(files, ATTEMPT, {"x.0": spec}, **options) as writer:
        start = turn = 0
        while start < len(rows):
            writer.append("x.0", rows[start : start + steps[turn % len(steps)]])
            start, turn = start + steps[turn % len(steps)], turn + 1
        return writer.close()


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize(("rows", "object_bytes"), [(0, 1 << 20), (1, 1 << 20), (103, 1 << 20), (103, 400), (64, 1)])
def test_zarr_and_tensorstore_read_back_every_bit(tmp_path: Path, dtype: str, rows: int, object_bytes: int) -> None:
    files = open_files(str(tmp_path))
    expected = some_rows(rows, 6, dtype)
    write(files, expected, dtype, steps=[7], chunk_bytes=100, object_bytes=object_bytes)
    folder = tmp_path / "shards" / ATTEMPT / "x.0"
    array: Any = zarr.open_array(str(folder), mode="r")
    assert array.shape == expected.shape
    assert array.dtype == (ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype))
    assert bits(array[:]) == bits(expected)
    other = tensorstore.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}).result()
    assert other.dtype.name == dtype
    assert bits(other.read().result()) == bits(expected)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 90),
    steps=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    chunk_bytes=st.integers(1, 400),
    object_bytes=st.integers(1, 900),
    data=st.data(),
)
def test_any_way_of_writing_gives_the_same_objects_and_any_way_of_reading_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    steps: list[int],
    chunk_bytes: int,
    object_bytes: int,
    data: st.DataObject,
) -> None:
    expected = some_rows(rows, 5, "bfloat16")
    results = []
    for pieces in (steps, [rows]):
        files = open_files(str(tmp_path_factory.mktemp("run")))
        options = {"chunk_bytes": chunk_bytes, "object_bytes": object_bytes}
        results.append(write(files, expected, "bfloat16", steps=pieces, **options))
        stored = StoredArray(files, ATTEMPT, "x.0")
        for number in range(stored.grid.objects):
            stored.check_object(number)
        start = data.draw(st.integers(0, rows))
        stop = data.draw(st.integers(start, rows))
        np.testing.assert_array_equal(stored.read(start, stop), expected[start:stop])
        picked = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=30)), np.int64)
        np.testing.assert_array_equal(stored.gather(picked), expected[picked])
    assert results[0] == results[1]


def test_an_object_is_its_frames_then_where_they_lie_then_the_crc_of_that(tmp_path: Path) -> None:
    rows = some_rows(10, 4, "float32")
    write(open_files(str(tmp_path)), rows, "float32", steps=[3], chunk_bytes=64, object_bytes=128)
    sizes = []
    for number, held in ((0, 2), (1, 1)):
        data = (tmp_path / "shards" / ATTEMPT / "x.0" / f"c.{number}.0").read_bytes()
        index = data[-36:]
        assert struct.unpack("<I", index[-4:])[0] == google_crc32c.value(index[:-4])
        places = struct.unpack("<4Q", index[:-4])
        assert places[2 * held :] == (2**64 - 1,) * (4 - 2 * held), "chunks that the last object lacks are absent"
        assert [places[0], places[0] + places[1]] == [0, places[2] if held == 2 else len(data) - 36]
        sizes += places[1 : 2 * held : 2]
    chunks = np.zeros((12, 4), "<f4")
    chunks[:10] = rows
    assert sizes == [len(compressed(chunks[start : start + 4])) for start in (0, 4, 8)], "padded with zeros"


@pytest.mark.parametrize("where", ["local", "memory"])
def test_a_few_rows_cost_their_own_chunks_and_a_chunk_that_was_just_decoded_costs_nothing(
    tmp_path: Path, where: str
) -> None:
    faults = Faults()
    files = FaultyFiles(open_files(str(tmp_path) if where == "local" else f"memory:/{tmp_path}"), faults)
    rows = some_rows(1000, 8, "float32")
    write(files, rows, "float32", steps=[1000], chunk_bytes=32 * 100, object_bytes=1 << 20)
    stored = StoredArray(files, ATTEMPT, "x.0", decoded=DecodedChunks(2 * 32 * 100))
    faults.calls.clear()
    np.testing.assert_array_equal(stored.gather(np.array([950, 3, 4, 999, 3])), rows[[950, 3, 4, 999, 3]])
    assert faults.calls["read_range"] == 3, "the index of the object and two of its ten chunks"
    stored.gather(np.array([901, 99]))
    assert faults.calls["read_range"] == 3
    stored.read(400, 500)
    stored.gather(np.array([901, 402]))
    assert faults.calls["read_range"] == 4
    stored.gather(np.array([5]))
    assert faults.calls["read_range"] == 5, "only two chunks stay decoded"


def _absent(data: bytes) -> bytes:
    """The object with its second chunk called absent, under an index whose own checksum is right."""
    index = bytearray(data[-(16 * 5 + 4) : -4])
    index[16:32] = b"\xff" * 16
    return data[: -(16 * 5 + 4)] + bytes(index) + int(google_crc32c.value(bytes(index))).to_bytes(4, "little")


@pytest.mark.parametrize("where", ["local", "memory"])
@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (None, "missing"),
        (lambda data: data[:20], "20 bytes, its chunk index alone has 84"),
        (lambda data: data[:-1], "chunk index"),
        (lambda data: data + b"\0", "chunk index"),
        (lambda data: b"\0" + data, "chunk index"),
        (_absent, "chunk index"),
        (lambda data: b"\0" * 9 + data[9:], "inner chunk 0 cannot be read"),
        (lambda data: b"", "0 bytes"),
    ],
)
def test_a_damaged_object_is_named_and_never_read_as_zeros(tmp_path: Path, where: str, harm: Any, what: str) -> None:
    files = open_files(str(tmp_path) if where == "local" else f"memory:/{tmp_path}")
    write(files, some_rows(100, 5, "float32"), "float32", steps=[100], chunk_bytes=200, object_bytes=1000)
    path = f"shards/{ATTEMPT}/x.0/c.1.0"
    if harm is None:
        files.delete(path)
    else:
        files.replace(path, harm(files.read(path)))
    named = rf"x\.0/c\.1\.0: .*{what}"
    for read in (lambda stored: stored.gather(np.array([99, 2, 51, 62])), lambda stored: stored.read(0, 100)):
        with pytest.raises(DamageError, match=named):
            read(StoredArray(files, ATTEMPT, "x.0"))
    if "cannot be read" not in what:
        with pytest.raises(DamageError, match=named):
            StoredArray(files, ATTEMPT, "x.0").check_object(1)


@pytest.mark.parametrize("size", [99, 101])
def test_a_frame_of_another_size_is_refused(size: int) -> None:
    frame = compressed(np.zeros(100, np.uint8)).tobytes()
    assert decompressed(frame, 100).tolist() == [0] * 100
    with pytest.raises(ValueError, match=r"\S"):
        decompressed(frame, size)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_a_deleted_object_reads_as_no_value_through_plain_zarr(tmp_path: Path, dtype: str) -> None:
    files = open_files(str(tmp_path))
    write(files, some_rows(10, 4, dtype), dtype, steps=[10], chunk_bytes=64)
    files.delete(f"shards/{ATTEMPT}/x.0/c.0.0")
    array: Any = zarr.open_array(str(tmp_path / "shards" / ATTEMPT / "x.0"), mode="r")
    if dtype == "int8":
        assert (array[:] == -128).all()
    else:
        assert np.isnan(array[:].astype(np.float32)).all()
