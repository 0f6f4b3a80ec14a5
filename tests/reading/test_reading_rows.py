"""Reading rows and tables of a run; plain zarr, pyarrow and the coded rows themselves are the judges."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorstore
import torch
import zarr
from fakes import Fake, write_run
from hypothesis import given, settings
from hypothesis import strategies as st

import harvest
from harvest.errors import DamageError, RequestError
from harvest.records import DOCUMENTS_PER_FILE
from harvest.store.mapped import MappedRows, can_map


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    """Four shards of two files, one of them empty; objects of a few rows, so that arrays span several."""
    path = tmp_path_factory.mktemp("run")
    return write_run(path / "r", files_of=[0, 0, 1, 1], object_bytes=100, chunk_bytes=50)


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_names_come_in_the_order_of_the_plan_and_the_repr_tells_the_essentials(fake: Fake) -> None:
    run = harvest.open(fake.path)
    assert run.names == ["residual.0", "residual.10", "mlp.1"]
    assert len(run) == 31
    assert repr(run) == f"Run({fake.path!r}, complete, 4 shards, 31 rows, residual.0, residual.10, mlp.1)"
    assert repr(run["mlp.1"]) == "Activations('mlp.1', float32 [31, 4])"
    assert (run["mlp.1"].shape, run["mlp.1"].dtype) == ((31, 4), torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_name_reads_what_an_independent_reader_reads(tmp_path: Path, dtype: str) -> None:
    fake = write_run(tmp_path / "r", dtype=dtype, object_bytes=100, chunk_bytes=50)
    run = harvest.open(fake.path)
    for name in fake.names:
        parts = []
        for record in fake.records:
            folder = Path(fake.path) / "shards" / record.attempt
            if dtype == "bfloat16":
                spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder / name}/"}}
                parts.append(np.asarray(tensorstore.open(spec).result().read().result()).astype(np.float32))
            else:
                parts.append(zarr.open_group(folder, mode="r")[name][:].astype(np.float32))
        whole = np.concatenate(parts)
        found = run[name][:]
        assert found.dtype == getattr(torch, dtype)
        np.testing.assert_array_equal(found.float().numpy(), whole)
        np.testing.assert_array_equal(run[name].numpy(), whole)
        assert run[name].numpy().dtype == np.float32
        assert torch.equal(found, fake.rows[name])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_selection_is_what_torch_indexing_of_the_whole_gives(fake: Fake, data: st.DataObject) -> None:
    rows = harvest.open(fake.path)["residual.10"]
    whole, n = fake.rows["residual.10"], len(fake.rows["residual.10"])
    bound = st.one_of(st.none(), st.integers(-n - 3, n + 3))
    cut = data.draw(st.builds(slice, bound, bound, st.sampled_from([None, 1, 2, 5])))
    assert torch.equal(rows[cut], whole[cut])
    picked = data.draw(st.lists(st.integers(-n, n - 1), max_size=40))
    for form in (
        picked,
        np.array(picked, np.int64),
        torch.tensor(picked, dtype=torch.int64),
        np.array(picked, np.int32),
    ):
        assert torch.equal(rows[form], whole[torch.tensor(picked, dtype=torch.int64)])
    one = data.draw(st.integers(-n, n - 1))
    assert torch.equal(rows[one], whole[one])
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    assert torch.equal(rows[mask], whole[torch.from_numpy(mask)])


def test_what_is_read_is_a_copy_that_may_be_changed(fake: Fake) -> None:
    before = snapshot(Path(fake.path))
    run = harvest.open(fake.path)
    run["mlp.1"][3:9].fill_(7)
    run["mlp.1"][[1, 2]].fill_(7)
    run["mlp.1"].numpy(slice(0, 4))[:] = 7
    assert torch.equal(run["mlp.1"][:], fake.rows["mlp.1"])
    assert snapshot(Path(fake.path)) == before


@pytest.mark.parametrize("rows", [31, -32, [0, 31], [0, -32]])
def test_rows_beyond_the_end_are_an_index_error(fake: Fake, rows: object) -> None:
    with pytest.raises(IndexError, match="there are 31 rows"):
        harvest.open(fake.path)["mlp.1"][rows]


@pytest.mark.parametrize("rows", ["residual", [0.5], [[1, 2]], [True, False], (slice(0, 1), 0)])
def test_what_selects_no_rows_is_refused(fake: Fake, rows: object) -> None:
    with pytest.raises((RequestError, ValueError)):
        harvest.open(fake.path)["mlp.1"][rows]


def test_a_missing_name_is_refused_with_the_names_there_are(fake: Fake) -> None:
    with pytest.raises(RequestError, match=r"'residual\.1': this run has residual\.0, residual\.10, mlp\.1"):
        harvest.open(fake.path)["residual.1"]


def test_tokens_and_rows_of_every_name_are_the_same_token(fake: Fake) -> None:
    run = harvest.open(fake.path)
    tokens = run.tokens()
    for column, values in fake.tokens.items():
        np.testing.assert_array_equal(tokens.column(column).to_numpy(zero_copy_only=False), values)
    coded = run["residual.0"].numpy()
    row_in_file = tokens.column("document").to_numpy() % DOCUMENTS_PER_FILE
    offset = 100 * (tokens.column("document").to_numpy() // DOCUMENTS_PER_FILE)
    np.testing.assert_array_equal(coded[:, 0], row_in_file + offset)
    np.testing.assert_array_equal(coded[:, 1], tokens.column("position").to_numpy())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-31, 30), max_size=30), st.integers(-35, 35), st.integers(-35, 35))
def test_any_selection_of_tokens_equals_the_same_of_the_whole_table(
    fake: Fake, picked: list[int], start: int, stop: int
) -> None:
    run = harvest.open(fake.path)
    whole = run.tokens()
    rows = np.array(picked, np.int64)
    assert run.tokens(rows).equals(whole.take(np.where(rows < 0, rows + 31, rows)))
    expected = whole.take(np.arange(31)[start:stop])
    assert run.tokens(slice(start, stop), ["token", "document"]).equals(expected.select(["token", "document"]))


def test_tokens_of_documents_are_their_rows_and_read_no_other_shard(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r", files_of=[0, 0, 1, 1])
    second = DOCUMENTS_PER_FILE + 1
    expected = np.flatnonzero(np.isin(fake.tokens["document"], [second, DOCUMENTS_PER_FILE + 4]))
    for record in fake.records[:2]:
        shutil.rmtree(Path(fake.path) / "shards" / record.attempt)
    run = harvest.open(fake.path)
    found = run.tokens(documents=[DOCUMENTS_PER_FILE + 4, second, second, 99])
    np.testing.assert_array_equal(found.column("position").to_numpy(), fake.tokens["position"][expected])
    assert set(found.column("document").to_pylist()) == {second, DOCUMENTS_PER_FILE + 4}
    with pytest.raises(DamageError, match=fake.records[0].attempt):
        run.tokens(slice(0, 1))


def test_wrong_requests_for_tokens_are_refused(fake: Fake) -> None:
    run = harvest.open(fake.path)
    with pytest.raises(RequestError, match="'layer' is not in the token table"):
        run.tokens(columns=["layer"])
    with pytest.raises(RequestError, match="not both"):
        run.tokens(rows=[1], documents=[1])


@pytest.mark.parametrize("documents", [2, np.int64(2), torch.tensor(2), [2], (2,), np.array([2]), {2}, iter([2])])
def test_one_document_may_be_named_by_itself(fake: Fake, documents: Any) -> None:
    assert set(harvest.open(fake.path).tokens(documents=documents).column("document").to_pylist()) == {2}


@pytest.mark.parametrize("documents", ["x", ["x"], 3.5, [3.0], [None], [[3]], [[3], [4, 5]], True, [True]])
def test_what_is_no_document_or_token_id_is_refused_in_a_line(fake: Fake, documents: Any) -> None:
    run = harvest.open(fake.path)
    with pytest.raises(RequestError, match=r"documents = .*: allowed are ids"):
        run.tokens(documents=documents)
    for what in ("token", "document"):
        with pytest.raises(RequestError, match=rf"find\({what}=.*\): allowed is a whole number"):
            run.find(**{what: documents})


def test_documents_lists_every_document_with_its_kept_columns(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r", [[2, 0, 3], [], [0]])
    table = harvest.open(fake.path).documents()
    assert table.column("document").to_pylist() == [0, 1, 2, 3]
    assert table.column("rows").to_pylist() == [2, 0, 3, 0]
    assert table.column("status").to_pylist() == ["stored", "skipped", "stored", "skipped"]
    assert table.column("label").to_pylist() == ["0", "1", "0", "0"]
    plain = pq.read_table(Path(fake.path) / "shards" / fake.records[0].attempt / "documents.parquet")
    assert table.slice(0, 3).column("reason").to_pylist() == plain.column("reason").to_pylist()


def test_find_and_context_name_the_rows_that_a_plain_scan_finds(fake: Fake) -> None:
    run = harvest.open(fake.path)
    token, document = 28, 2
    where = fake.tokens["token"] == token
    np.testing.assert_array_equal(run.find(token=token), np.flatnonzero(where))
    np.testing.assert_array_equal(run.find(token=0), np.flatnonzero(fake.tokens["token"] == 0))
    of = fake.tokens["document"] == document
    np.testing.assert_array_equal(run.find(document=document), np.flatnonzero(of))
    np.testing.assert_array_equal(run.find(token=token, document=document), np.flatnonzero(where & of))
    row = int(np.flatnonzero(of)[2])
    around = run.context(row, before=10, after=1)
    assert around.column("document").to_pylist() == [document] * 4
    assert around.column("position").to_pylist() == [0, 1, 2, 3]
    assert run.context(row - 31, before=0, after=0).column("position").to_pylist() == [2]


def test_an_unfinished_run_shows_its_committed_shards_and_nothing_else(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r", complete=False)
    (Path(fake.path) / "ledger" / f"{fake.records[2].shard.key}.json").unlink()
    before = snapshot(Path(fake.path))
    run = harvest.open(fake.path)
    assert not run.complete
    assert "unfinished" in repr(run)
    expected = torch.cat([fake.rows["mlp.1"][:8], fake.rows["mlp.1"][14:]])
    assert torch.equal(run["mlp.1"][:], expected)
    assert torch.equal(run["mlp.1"][np.arange(len(run))], expected)
    assert run.tokens().num_rows == len(run) == len(expected)
    list(run.batches("mlp.1", 4))
    assert snapshot(Path(fake.path)) == before


def test_a_run_without_any_shard_reads_as_empty(tmp_path: Path) -> None:
    run = harvest.open(write_run(tmp_path / "r", [[0]], complete=False).path)
    assert run["mlp.1"][:].shape == (0, 4)
    fake = write_run(tmp_path / "none", [[1]], complete=False)
    (Path(fake.path) / "ledger" / f"{fake.records[0].shard.key}.json").unlink()
    run = harvest.open(fake.path)
    assert run["mlp.1"][:].shape == run["mlp.1"][[]].shape == (0, 4)
    assert (run.tokens().num_rows, run.documents().num_rows) == (0, 0)
    assert list(run.batches("mlp.1")) == []
    with pytest.raises(RequestError, match="no shard is committed"):
        run.statistics()


def test_a_folder_that_is_no_run_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "note.txt").write_text("keep me")
    before = snapshot(folder)
    with pytest.raises(RequestError, match=r"notes is not a run \(no run\.json\)"):
        harvest.open(folder)
    assert snapshot(folder) == before
    with pytest.raises(RequestError, match="is not a run"):
        harvest.open(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def test_a_run_of_a_later_format_is_refused(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r")
    path = Path(fake.path) / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(RequestError, match="format 2"):
        harvest.open(fake.path)


def test_a_missing_or_short_object_is_damage_by_name_never_zeros(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r")
    target = Path(fake.path) / "shards" / fake.records[2].attempt / "residual.0" / "c.0.0"
    data = target.read_bytes()
    for broken in (data[:-30], None):
        target.unlink()
        if broken is not None:
            target.write_bytes(broken)
        rows = harvest.open(fake.path)["residual.0"]
        assert torch.equal(rows[:8], fake.rows["residual.0"][:8])
        for wrong in (slice(5, 12), [9, 1]):
            with pytest.raises(DamageError, match=rf"{fake.records[2].attempt}/residual\.0/c\.0\.0"):
                rows[wrong]


def test_a_run_in_memory_reads_like_one_on_disk(tmp_path: Path) -> None:
    fake = write_run(f"memory://{tmp_path.name}-reader", dtype="bfloat16", object_bytes=100, chunk_bytes=50)
    run = harvest.open(fake.path)
    picked = [30, 0, -3, 12, 12, 5]
    assert torch.equal(run["residual.0"][picked], fake.rows["residual.0"][picked])
    assert torch.equal(run["residual.0"][7:20], fake.rows["residual.0"][7:20])
    rows = torch.cat([rows for _, rows in run.batches("mlp.1", 4, with_rows=True)])
    assert sorted(rows.tolist()) == list(range(31))


def test_a_run_without_stored_rows_has_statistics_and_says_why_it_has_no_rows(tmp_path: Path) -> None:
    run = harvest.open(write_run(tmp_path / "r", store=False).path)
    assert run.statistics()["mlp.1"].count == 31
    for wrong in (lambda: run["mlp.1"], run.tokens):
        with pytest.raises(RequestError, match=r"capture\.store = false"):
            wrong()


def test_statistics_print_as_a_line_whatever_their_width(fake: Fake) -> None:
    found = harvest.open(fake.path).statistics()["mlp.1"]
    assert re.fullmatch(r"NameStatistics\(31 rows of width 4, norms [\d.]+ to [\d.]+, mean [\d.]+\)", repr(found))
    assert repr(found.ordinary).startswith("RowStatistics(")
    assert found.mean.shape == (4,)


def test_statistics_are_those_of_numpy_over_the_stored_rows_with_and_without_special_tokens(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r", dtype="bfloat16", change={("mlp.1", 2): lambda rows: rows * 500})
    found = harvest.open(fake.path).statistics()
    assert list(found) == ["residual.0", "residual.10", "mlp.1"]
    for name, rows in fake.rows.items():
        whole = rows.double().numpy()
        for part, of in ((found[name], whole), (found[name].ordinary, whole[~fake.tokens["special"]])):
            assert part.count == len(of)
            np.testing.assert_allclose(part.mean, of.mean(axis=0), rtol=1e-12)
            np.testing.assert_allclose(part.variance, of.var(axis=0), rtol=1e-10)
            np.testing.assert_allclose(part.mean_norm, np.linalg.norm(of, axis=1).mean(), rtol=1e-12)
    assert harvest.open(fake.path).summary()["rows"] == 31


def test_a_run_that_kept_no_moments_says_so(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"statistics\.moments = false"):
        harvest.open(write_run(tmp_path / "r", moments=False).path).statistics()


@pytest.mark.parametrize("row_bytes", [2, 12, 1152, 2308, 4096])
def test_mapped_files_index_as_one_array_whatever_the_row_size(tmp_path: Path, row_bytes: int) -> None:
    generator, files, parts = np.random.default_rng(row_bytes), [], []
    for number, rows in enumerate([1, 700, 3, 64]):
        data = generator.integers(0, 256, (rows, row_bytes), np.uint8)
        (tmp_path / f"{number}").write_bytes(data.tobytes() + b"trailing index")
        files.append((str(tmp_path / f"{number}"), rows))
        parts.append(data)
    assert can_map(files, row_bytes)
    mapped = MappedRows(files, row_bytes)
    rows, first = mapped.bytes, mapped.first_rows
    del mapped  # the array alone keeps the mapping
    for part, start in zip(parts, first):
        np.testing.assert_array_equal(rows[start : start + len(part)], part)


def test_a_file_that_cannot_be_mapped_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="absent"):
        MappedRows([(str(tmp_path / "absent"), 3)], 8)
    assert not can_map([], 8)
    assert not can_map([("x", 2**50)], 8)
