"""Arrays: what is written reads back bit by bit through zarr-python, TensorStore, a memory map and our own reader."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorstore
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import harvest.store.bfloat16  # noqa: F401  (registers the data type)
from harvest.errors import DamageError, LostLeaseError, WorkError
from harvest.records import ArraySpec, StoredObject
from harvest.store.arrays import StoredArray, map_rows
from harvest.store.attempt import AttemptWriter
from harvest.store.files import Files
from harvest.store.grid import DTYPES, array_metadata, plan_grid
from harvest.store.layout import array_path
from harvest.store.opening import open_files
from tests.faults import Faults, FaultyFiles

ATTEMPT = "f00000-s000000.9c1f02ab-1"
DTYPE_NAMES = ("float32", "float16", "bfloat16")


def coded_rows(rows: int, width: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Rows in stored bits, with NaN, infinities, zeros and subnormals among them."""
    bits = np.random.default_rng(seed).integers(0, 2**32, (rows, width), np.uint32)
    return bits.view(np.float32) if dtype == "float32" else bits.astype(np.uint16).view(DTYPES[dtype])


def as_bits(values: np.ndarray) -> np.ndarray:
    values = np.ascontiguousarray(values)
    return values.view(np.uint32 if values.itemsize == 4 else np.uint16)


def append_and_close(writer: AttemptWriter, name: str, rows: np.ndarray) -> None:
    writer.append(name, rows)
    writer.close()


def write(
    files: Files, arrays: dict[str, np.ndarray], dtype: str, *, step: int = 7, chunk_bytes: int = 64, **options: Any
) -> dict[str, StoredObject]:
    specs = {
        name: ArraySpec(rows=len(rows), width=rows.shape[1], dtype=dtype, attributes={"site": name})
        for name, rows in arrays.items()
    }
    with AttemptWriter(files, ATTEMPT, specs, chunk_bytes=chunk_bytes, **options) as writer:
        for start in range(0, max(len(rows) for rows in arrays.values()), step):
            for name, rows in arrays.items():
                writer.append(name, rows[start : start + step])
        return writer.close()


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize(("rows", "object_bytes"), [(0, 1 << 20), (1, 1 << 20), (37, 1 << 20), (37, 200), (64, 1)])
def test_zarr_and_tensorstore_read_back_every_bit(tmp_path: Path, dtype: str, rows: int, object_bytes: int) -> None:
    files = open_files(str(tmp_path / "run"))
    arrays = {"residual.0": coded_rows(rows, 6, dtype), "module:a.b": coded_rows(rows, 3, dtype, seed=1)}
    write(files, arrays, dtype, object_bytes=object_bytes)
    folder = tmp_path / "run" / "shards" / ATTEMPT
    group = zarr.open_group(str(folder), mode="r")
    assert {name for name, _ in group.arrays()} == {array_path(name) for name in arrays}
    for name, expected in arrays.items():
        array: Any = group[array_path(name)]
        assert array.shape == expected.shape
        assert array.dtype == (ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype))
        assert array.attrs["site"] == name
        np.testing.assert_array_equal(as_bits(array[:]), as_bits(expected))
        store = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/{array_path(name)}/"}}
        other = tensorstore.open(store).result()
        assert other.dtype.name == dtype
        np.testing.assert_array_equal(as_bits(other.read().result()), as_bits(expected))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 300),
    width=st.integers(1, 9),
    chunk_bytes=st.integers(1, 2000),
    object_bytes=st.integers(1, 5000),
    dtype=st.sampled_from(DTYPE_NAMES),
)
def test_the_grid_covers_every_row_once_and_pads_less_than_a_row_per_chunk(
    rows: int, width: int, chunk_bytes: int, object_bytes: int, dtype: str
) -> None:
    grid = plan_grid(ArraySpec(rows=rows, width=width, dtype=dtype), chunk_bytes, object_bytes)
    assert sum(grid.rows_of(number) for number in range(grid.objects)) == rows
    assert all(grid.rows_of(number) > 0 for number in range(grid.objects))
    assert grid.outer % grid.inner == 0
    assert grid.inner == 1 or grid.inner * grid.row_bytes <= chunk_bytes
    assert grid.outer == grid.inner or grid.outer * grid.row_bytes <= object_bytes
    padded = sum(grid.padded_rows_of(number) for number in range(grid.objects))
    assert padded - rows < max(1, grid.inner)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 90),
    steps=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    chunk_bytes=st.integers(1, 400),
    object_bytes=st.integers(1, 900),
    seed=st.integers(0, 9),
)
def test_the_bytes_do_not_depend_on_how_the_rows_arrive(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    steps: list[int],
    chunk_bytes: int,
    object_bytes: int,
    seed: int,
) -> None:
    expected = coded_rows(rows, 5, "bfloat16", seed)
    spec = ArraySpec(rows=rows, width=5, dtype="bfloat16")
    results = []
    for pieces in (steps, [rows]):
        files = open_files(str(tmp_path_factory.mktemp("run")))
        with AttemptWriter(files, ATTEMPT, {"x.0": spec}, chunk_bytes=chunk_bytes, object_bytes=object_bytes) as writer:
            start, turn = 0, 0
            while start < rows:
                writer.append("x.0", expected[start : start + pieces[turn % len(pieces)]])
                start += pieces[turn % len(pieces)]
                turn += 1
            results.append(writer.close())
        stored = StoredArray(files, ATTEMPT, "x.0", spec)
        np.testing.assert_array_equal(stored.read(0, rows), expected)
    assert results[0] == results[1]


def test_an_object_is_rows_then_index_then_its_crc(tmp_path: Path) -> None:
    files = open_files(str(tmp_path))
    rows = coded_rows(10, 4, "float32")
    write(files, {"residual.0": rows}, "float32", chunk_bytes=16 * 4)
    data = files.read(f"shards/{ATTEMPT}/residual.0/c.0.0")
    assert data[: rows.nbytes] == rows.tobytes()
    index = data[-(16 * 3 + 4) :]
    assert struct.unpack("<6Q", index[:-4]) == (0, 64, 64, 64, 128, 64)
    assert struct.unpack("<I", index[-4:])[0] == google_crc32c.value(index[:-4])
    assert data[rows.nbytes : -len(index)] == bytes(2 * 16), "the last inner chunk is padded with zeros"


def test_chunks_that_the_last_object_lacks_are_marked_absent(tmp_path: Path) -> None:
    files = open_files(str(tmp_path))
    write(files, {"residual.0": coded_rows(5, 4, "float32")}, "float32", chunk_bytes=16, object_bytes=48)
    data = files.read(f"shards/{ATTEMPT}/residual.0/c.1.0")
    nothing = 2**64 - 1
    assert struct.unpack("<6Q", data[2 * 16 : -4]) == (0, 16, 16, 16, nothing, nothing)


def test_what_close_returns_is_what_lies_there_with_its_size_and_checksum(tmp_path: Path) -> None:
    files = open_files(str(tmp_path))
    table = pa.table({"a": [1, 2]})
    spec = {
        "residual.0": ArraySpec(rows=20, width=3, dtype="float32"),
        "b/c": ArraySpec(rows=0, width=3, dtype="float16"),
    }
    with AttemptWriter(files, ATTEMPT, spec, chunk_bytes=64, object_bytes=100) as writer:
        writer.append("residual.0", coded_rows(20, 3, "float32"))
        writer.append("b/c", np.empty((0, 3), np.float16))
        writer.table("tokens.parquet", table)
        writer.blob("states.safetensors", b"states")
        objects = writer.close()
    folder = tmp_path / "shards" / ATTEMPT
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert list(objects) == sorted(found)
    for path, data in found.items():
        assert objects[path] == StoredObject(bytes=len(data), crc32c=f"{google_crc32c.value(data):08x}")
    assert pq.read_table(folder / "tokens.parquet") == table
    assert zarr.open_group(str(folder), mode="r")["b/c"].shape == (0, 3), "nested names are nested groups"


def test_large_appends_and_reused_buffers_keep_their_bytes(tmp_path: Path) -> None:
    files = open_files(str(tmp_path))
    buffer = np.empty((3000, 256), np.float32)
    spec = ArraySpec(rows=9000, width=256, dtype="float32")
    with AttemptWriter(files, ATTEMPT, {"x.0": spec}, chunk_bytes=1 << 20, object_bytes=5 << 20) as writer:
        for turn in range(3):
            buffer[:] = turn + np.arange(3000, dtype=np.float32)[:, None]
            writer.append("x.0", buffer)
        buffer[:] = -1
        objects = writer.close()
    expected = np.concatenate([turn + np.arange(3000, dtype=np.float32) for turn in range(3)])
    stored = StoredArray(files, ATTEMPT, "x.0")
    np.testing.assert_array_equal(stored.read(0, 9000), np.repeat(expected[:, None], 256, axis=1))
    for path, found in objects.items():
        assert found.crc32c == f"{google_crc32c.value(files.read(f'shards/{ATTEMPT}/{path}')):08x}"


@pytest.mark.parametrize("where", ["local", "memory"])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_reading_and_gathering_give_numpys_rows(tmp_path: Path, where: str, dtype: str) -> None:
    files = open_files(str(tmp_path) if where == "local" else f"memory:/{tmp_path}")
    rows = coded_rows(103, 5, dtype)
    write(files, {"residual.0": rows}, dtype, object_bytes=300)
    stored = StoredArray(files, ATTEMPT, "residual.0")
    assert (stored.shape, stored.dtype) == ((103, 5), dtype)
    for start, stop in [(0, 103), (0, 0), (17, 18), (29, 71), (103, 103)]:
        np.testing.assert_array_equal(as_bits(stored.read(start, stop)), as_bits(rows[start:stop]))
    for indices in ([], [5], [102, 0, 0, 51, 7], list(range(103))[::-1]):
        wanted = np.array(indices, np.int64)
        np.testing.assert_array_equal(as_bits(stored.gather(wanted)), as_bits(rows[wanted]))
    out = np.empty((3, 5), stored.numpy_dtype)
    assert stored.gather(np.array([1, 2, 3]), out) is out
    np.testing.assert_array_equal(as_bits(out), as_bits(rows[1:4]))
    for wrong in (lambda: stored.read(0, 104), lambda: stored.read(-1, 3), lambda: stored.gather(np.array([-1]))):
        with pytest.raises(IndexError, match=r"residual\.0, which has 103"):
            wrong()


def test_mapped_rows_are_views_of_the_objects_without_padding(tmp_path: Path) -> None:
    files = open_files(str(tmp_path))
    rows = coded_rows(40, 5, "bfloat16")
    write(files, {"residual.0": rows}, "bfloat16", object_bytes=200)
    mapped = map_rows(files, ATTEMPT, "residual.0", ArraySpec(rows=40, width=5, dtype="bfloat16"))
    assert len(mapped) > 1
    assert all(part.dtype == np.uint16 and not part.flags.writeable for part in mapped)
    np.testing.assert_array_equal(np.concatenate(mapped), rows)


def test_a_gather_from_afar_asks_for_few_ranges(tmp_path: Path) -> None:
    faults = Faults()
    files = FaultyFiles(open_files(f"memory:/{tmp_path}"), faults)
    rows = coded_rows(5000, 64, "float32")
    write(files, {"x.0": rows}, "float32", chunk_bytes=1 << 20, step=5000)
    stored = StoredArray(files, ATTEMPT, "x.0")
    faults.calls.clear()
    wanted = np.array([4999, 10, 11, 12, 40, 4990])
    np.testing.assert_array_equal(as_bits(stored.gather(wanted)), as_bits(rows[wanted]))
    assert faults.calls["read_range"] == 2


@pytest.mark.parametrize("where", ["local", "memory"])
@pytest.mark.parametrize("harm", ["missing", "short", "long", "metadata gone", "metadata changed", "other spec"])
def test_a_damaged_array_is_named_and_never_read_as_zeros(tmp_path: Path, where: str, harm: str) -> None:
    files = open_files(str(tmp_path) if where == "local" else f"memory:/{tmp_path}")
    rows = coded_rows(40, 5, "float32")
    write(files, {"residual.0": rows}, "float32", object_bytes=400)
    path, metadata = f"shards/{ATTEMPT}/residual.0/c.1.0", f"shards/{ATTEMPT}/residual.0/zarr.json"
    spec = ArraySpec(rows=40, width=5, dtype="float32")
    if harm == "missing":
        files.delete(path)
    elif harm in ("short", "long"):
        files.replace(path, files.read(path)[:30] if harm == "short" else files.read(path) + b"x")
    elif harm == "metadata gone":
        files.delete(metadata)
    elif harm == "metadata changed":
        changed = json.loads(files.read(metadata))
        changed["codecs"][0]["configuration"]["codecs"].append({"name": "zstd", "configuration": {"level": 1}})
        files.replace(metadata, json.dumps(changed).encode())
    else:
        spec = ArraySpec(rows=41, width=5, dtype="float32")
    named = r"residual\.0/(c\.1\.0|zarr\.json)"
    with pytest.raises(DamageError, match=named):
        StoredArray(files, ATTEMPT, "residual.0", spec).gather(np.array([39, 2, 13, 25]))
    with pytest.raises(DamageError, match=named):
        StoredArray(files, ATTEMPT, "residual.0", spec).read(0, 40)


def test_a_deleted_object_reads_as_nan_through_plain_zarr_never_as_zeros(tmp_path: Path) -> None:
    files = open_files(str(tmp_path))
    for dtype in DTYPE_NAMES:
        write(files, {"residual.0": coded_rows(10, 4, dtype)}, dtype)
        files.delete(f"shards/{ATTEMPT}/residual.0/c.0.0")
        array: Any = zarr.open_array(str(tmp_path / "shards" / ATTEMPT / "residual.0"), mode="r")
        assert np.isnan(array[:].astype(np.float32)).all()
        shutil.rmtree(tmp_path / "shards")


@pytest.mark.parametrize("plugin", [False, True])
def test_bfloat16_is_refused_by_name_without_the_data_type_and_read_with_it(tmp_path: Path, plugin: bool) -> None:
    files = open_files(str(tmp_path))
    rows = np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.bfloat16)
    write(files, {"residual.0": rows.view(np.uint16)}, "bfloat16")
    script = textwrap.dedent(
        f"""
        import sys, zarr
        if {plugin}:
            import harvest.store.bfloat16
            assert "torch" not in sys.modules
        array = zarr.open_array(sys.argv[1], mode="r")
        print(array[2, 3])
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "shards" / ATTEMPT / "residual.0")],
        capture_output=True,
        text=True,
    )
    if plugin:
        assert done.stdout.strip() == "11", done.stderr
    else:
        assert done.returncode != 0
        assert "bfloat16" in done.stderr


def test_zarr_itself_writes_bfloat16_that_tensorstore_reads(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0, np.inf], [np.nan, 0.0, 3.0]], ml_dtypes.bfloat16)
    array = zarr.create_array(
        str(tmp_path / "x"), shape=(2, 3), chunks=(1, 3), dtype="bfloat16", fill_value=float("nan"), compressors=None
    )
    array[:] = values
    found = tensorstore.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/x/"}}).result()
    np.testing.assert_array_equal(as_bits(found.read().result()), as_bits(values))
    assert zarr.open_array(str(tmp_path / "x"), mode="r").fill_value != 0


def test_our_metadata_is_what_zarr_makes_of_it(tmp_path: Path) -> None:
    spec = ArraySpec(rows=40, width=5, dtype="float16", attributes={"layer": 3})
    ours = array_metadata(spec, plan_grid(spec, 100, 300))
    made = zarr.core.metadata.v3.ArrayV3Metadata.from_dict(json.loads(json.dumps(ours))).to_dict()
    again = json.loads(json.dumps({key: value for key, value in made.items() if value not in ((), None)}, default=str))
    for key in ("shape", "data_type", "chunk_grid", "chunk_key_encoding", "attributes", "zarr_format", "node_type"):
        assert str(again[key]) == str(ours[key]) or again[key] == ours[key]


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((2, 4), np.float64),
        np.zeros((2, 3), np.float32),
        np.zeros((2, 8), np.float32)[:, ::2],
        np.zeros(4, np.float32),
        np.zeros((2, 4), ">f4"),
    ],
)
def test_rows_of_another_shape_dtype_or_order_are_a_fault_of_the_caller(tmp_path: Path, rows: np.ndarray) -> None:
    files = open_files(str(tmp_path))
    writer = AttemptWriter(files, ATTEMPT, {"x.0": ArraySpec(rows=2, width=4, dtype="float32")}, chunk_bytes=64)
    with pytest.raises(ValueError, match=r"x\.0: rows of"):
        writer.append("x.0", rows)


def test_too_many_or_too_few_rows_never_become_an_attempt(tmp_path: Path) -> None:
    files = open_files(str(tmp_path))
    spec = {"x.0": ArraySpec(rows=4, width=2, dtype="float32")}
    with (
        pytest.raises(WorkError, match=r"x\.0: 3 rows were written, 4 announced"),
        AttemptWriter(files, ATTEMPT, spec, chunk_bytes=64) as writer,
    ):
        append_and_close(writer, "x.0", np.zeros((3, 2), np.float32))
    assert list(files.list()) == []
    with (
        pytest.raises(WorkError, match=r"x\.0: 5 rows were written, 4 announced"),
        AttemptWriter(files, ATTEMPT, spec, chunk_bytes=64) as writer,
    ):
        writer.append("x.0", np.zeros((5, 2), np.float32))
    assert list(files.list()) == []


@pytest.mark.parametrize("where", ["local", "memory"])
@pytest.mark.parametrize("victim", ["residual.1/c.1.0", "residual.0/zarr.json", "tokens.parquet", "zarr.json"])
@pytest.mark.parametrize("harm", ["drop", "cut", "fail"])
def test_a_store_that_loses_cuts_or_fails_an_object_is_caught_at_close(
    tmp_path: Path, where: str, victim: str, harm: str
) -> None:  # E45
    target = f"shards/{ATTEMPT}/{victim}"
    faults = Faults(
        drop=lambda path: harm == "drop" and path == target,
        cut=lambda path: 10 if harm == "cut" and path == target else None,
        fail=lambda path: harm == "fail" and path == target,
    )
    files = FaultyFiles(open_files(str(tmp_path) if where == "local" else f"memory:/{tmp_path}"), faults)
    spec = {f"residual.{layer}": ArraySpec(rows=40, width=4, dtype="float32") for layer in range(2)}

    def attempt() -> None:
        with AttemptWriter(files, ATTEMPT, spec, chunk_bytes=64, object_bytes=200) as writer:
            writer.table("tokens.parquet", pa.table({"a": [1]}))
            for name in spec:
                writer.append(name, coded_rows(40, 4, "float32"))
            writer.close()

    if harm == "fail" and victim != "residual.1/c.1.0":
        attempt()  # one write each: the second never comes
        return
    with pytest.raises(OSError if harm == "fail" else WorkError, match="Input/output" if harm == "fail" else victim):
        attempt()
    assert list(files.list()) == [], "the failed attempt is removed"


def test_a_full_disk_is_named_and_leaves_what_was_committed(tmp_path: Path) -> None:
    inner = open_files(str(tmp_path))
    rows = coded_rows(40, 4, "float32")
    write(inner, {"residual.0": rows}, "float32")
    before = {path: inner.read(path) for path, _ in inner.list()}
    second = "f00000-s000001.9c1f02ab-1"
    spec = {"residual.0": ArraySpec(rows=40, width=4, dtype="float32")}
    total = len(rows.tobytes())
    for full_after in (0, 100, total, total + 60, total + 900):
        files = FaultyFiles(inner, Faults(full_after=full_after))
        with (
            pytest.raises(WorkError, match=rf"disk full: {tmp_path}/shards/{second}/\S+: \d+ more bytes") as caught,
            AttemptWriter(files, second, spec, chunk_bytes=64) as writer,
        ):
            append_and_close(writer, "residual.0", rows)
        assert "\n" not in str(caught.value)
        assert {path: inner.read(path) for path, _ in inner.list()} == before
    with AttemptWriter(inner, second, spec, chunk_bytes=64) as writer:  # space was freed
        writer.append("residual.0", rows)
        writer.close()
    np.testing.assert_array_equal(as_bits(StoredArray(inner, second, "residual.0").read(0, 40)), as_bits(rows))


def test_a_life_that_is_over_opens_no_further_object(tmp_path: Path) -> None:
    files = FaultyFiles(open_files(str(tmp_path)), Faults())
    alive = [True, True, False]

    def fence() -> None:
        if not alive.pop(0):
            raise LostLeaseError("taken over")

    spec = {"x.0": ArraySpec(rows=40, width=4, dtype="float32")}
    with (
        pytest.raises(LostLeaseError),
        AttemptWriter(files, ATTEMPT, spec, chunk_bytes=64, object_bytes=200, before_object=fence) as writer,
    ):
        writer.append("x.0", coded_rows(40, 4, "float32"))
    assert files.faults.calls["open_write"] == 2
    assert list(files.list()) == []


def test_a_second_writer_in_the_same_attempt_is_found(tmp_path: Path) -> None:
    files = open_files(str(tmp_path))
    files.create(f"shards/{ATTEMPT}/residual.9/c.0.0", b"someone else's")
    with (
        pytest.raises(WorkError, match=r"residual\.9/c\.0\.0: another writer"),
        AttemptWriter(files, ATTEMPT, {}, chunk_bytes=64) as writer,
    ):
        writer.close()


def test_writers_side_by_side_lose_no_row(tmp_path: Path) -> None:
    """Case E43: each writer owns whole objects, so nothing is read, changed and written again."""
    files = open_files(str(tmp_path))
    attempts = {f"f00000-s{number:06d}.9c1f02ab-1": coded_rows(10, 4, "float32", number) for number in range(8)}

    def work(attempt: str, rows: np.ndarray) -> None:
        spec = {"residual.0": ArraySpec(rows=10, width=4, dtype="float32")}
        with AttemptWriter(files, attempt, spec, chunk_bytes=8 * 16) as writer:
            for row in range(10):
                writer.append("residual.0", rows[row : row + 1])
            writer.close()

    threads = [threading.Thread(target=work, args=item) for item in attempts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for attempt, rows in attempts.items():
        found: Any = zarr.open_group(str(tmp_path / "shards" / attempt), mode="r")["residual.0"]
        np.testing.assert_array_equal(as_bits(found[:]), as_bits(rows))


def test_a_second_attempt_beside_a_first_leaves_it_untouched(tmp_path: Path) -> None:
    """Cases E44 and E49: nothing is appended to and nothing is opened again for writing."""
    files = open_files(str(tmp_path))
    write(files, {"residual.0": coded_rows(10, 4, "float32")}, "float32")
    before = {path: files.read(path) for path, _ in files.list()}
    with pytest.raises(FileExistsError):
        write(files, {"residual.0": coded_rows(10, 4, "float32", 1)}, "float32")
    with AttemptWriter(
        files, "f00000-s000001.9c1f02ab-1", {"residual.0": ArraySpec(rows=10, width=4, dtype="float32")}, chunk_bytes=8
    ) as writer:
        writer.append("residual.0", coded_rows(10, 4, "float32", 2))
        writer.close()
    assert before.items() <= {path: files.read(path) for path, _ in files.list()}.items()
