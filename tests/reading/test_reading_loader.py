"""Batches in PyTorch's DataLoader: workers and ranks share every row once a pass, and a place can be saved."""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import Fake, write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from s3server import s3_server
from torch.utils.data import ChainDataset, DataLoader, IterableDataset

import harvest
from harvest.errors import DamageError, RequestError
from harvest.reading import batches as batches_module
from harvest.reading import pools
from harvest.store.remote import RemoteFiles

SHARDS = [[7, 9], [4], [], [11, 2, 8], [1] * 6]
ROWS = 47
NAMES = ["residual.0", "mlp.1"]


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return write_run(tmp_path_factory.mktemp("run") / "r", SHARDS, dtype="bfloat16")


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    path = tmp_path_factory.mktemp("compressed") / "r"
    return write_run(path, SHARDS, dtype="bfloat16", compression="zstd", chunk_bytes=12 * 4, object_bytes=12 * 20)


@pytest.fixture(scope="module")
def run(fake: Fake) -> Any:
    return harvest.open(fake.path)


@pytest.fixture
def blocks(compressed: Fake, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A compressed run, with pools of so few rows that an epoch takes many."""
    monkeypatch.setattr(pools, "POOL_BYTES", 12 * 12)
    monkeypatch.setattr(pools, "BLOCK_BYTES", 12 * 4)
    monkeypatch.setattr(pools, "MIXED", 3)
    return harvest.open(compressed.path)


@pytest.fixture(params=["global", "blocks"])
def either(request: pytest.FixtureRequest, run: Any) -> Any:
    return run if request.param == "global" else request.getfixturevalue("blocks")


def load(batches: Any, workers: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None, num_workers=workers, **options)


def rows_of(loader: Any) -> list[int]:
    return [int(row) for _, rows in loader for row in rows]


def simulated(batches: Any, workers: int, patch: pytest.MonkeyPatch, took: int | None = None) -> list[list[int]]:
    """The rows of each batch as a DataLoader hands them over, its workers being copies in this process."""
    shares = []
    for number in range(workers):
        share = pickle.loads(pickle.dumps(batches))
        share._made_in = -1
        patch.setattr(batches_module, "get_worker_info", lambda n=number: SimpleNamespace(id=n, num_workers=workers))
        shares.append(iter(share))
        patch.undo()
    found: list[list[int]] = []
    while shares and len(found) != took:  # in turn; who has none left is left out
        share = shares.pop(0)
        with contextlib.suppress(StopIteration):
            found.append(next(share)[1].tolist())
            shares.append(share)
    return found


# ---- any DataLoader --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_workers_give_every_row_once_in_the_order_of_one_process(workers: int, run: Any, fake: Fake) -> None:
    batches = run.batches(NAMES, 4, seed=3, epochs=2, with_rows=True)
    assert isinstance(batches, IterableDataset)
    expected = rows_of(run.batches(NAMES, 4, seed=3, epochs=2, with_rows=True))
    loader = load(batches, workers)
    assert len(loader) == 24
    found = []
    for values, rows in loader:
        found += rows.tolist()
        for name in NAMES:
            assert torch.equal(values[name], fake.rows[name][rows])
    assert found == expected


@settings(max_examples=30, deadline=None)
@given(
    blocks=st.booleans(),
    batch=st.integers(1, 50),
    workers=st.integers(1, 7),
    world=st.integers(1, 3),
    epochs=st.integers(1, 3),
)
def test_over_all_workers_and_ranks_every_row_comes_once_an_epoch(
    blocks: bool, batch: int, workers: int, world: int, epochs: int, fake: Fake, compressed: Fake
) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context() as sizes:
        sizes.setattr(pools, "POOL_BYTES", 12 * 12)
        sizes.setattr(pools, "BLOCK_BYTES", 12 * 4)
        run = harvest.open((compressed if blocks else fake).path)
        options = {"batch_size": batch, "seed": 1, "epochs": epochs, "with_rows": True, "world": world}
        found = []
        for rank in range(world):
            batches = run.batches("residual.0", rank=rank, **options)
            given = simulated(batches, workers, patch)
            assert len(given) == len(batches)
            alone = [rows.tolist() for _, rows in run.batches("residual.0", rank=rank, **options)]
            assert sorted(given) == sorted(alone)  # the batches of the rank
            each = len(alone) // epochs
            for epoch in range(epochs):
                assert sorted(given[epoch * each :][:each]) == sorted(alone[epoch * each :][:each])
            if not blocks:
                assert given == alone
            found += [row for rows in given for row in rows]
        assert sorted(found) == sorted([*range(ROWS)] * epochs)


@pytest.mark.parametrize("taken", [2, 12])
def test_every_pass_of_lasting_workers_has_all_rows_also_behind_a_break(taken: int, either: Any) -> None:  # E55
    loader = load(either.batches("residual.0", 4, with_rows=True), 2, persistent_workers=True, prefetch_factor=3)
    for number, _ in enumerate(loader, 1):
        if number == taken:
            break
    second, third = rows_of(loader), rows_of(loader)
    assert sorted(second) == sorted(third) == list(range(ROWS))
    assert second != third


@pytest.mark.parametrize("taken", [0, 5, 12])
def test_lasting_workers_begin_where_a_state_was_loaded_and_their_second_pass_is_whole(taken: int, run: Any) -> None:
    whole = rows_of(run.batches("residual.0", 4, epochs=2, with_rows=True))
    first = run.batches("residual.0", 4, with_rows=True)
    for _ in range(taken):
        next(first)
    second = run.batches("residual.0", 4, with_rows=True)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    loader = load(second, 2, persistent_workers=True)
    assert rows_of(loader) == whole[taken * 4 : ROWS]
    assert rows_of(loader) == whole[ROWS:]


class Own(IterableDataset[Any]):
    """What people write themselves: each worker is a rank, and opens the run."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        run = harvest.open(self.path)
        return iter(run.batches("mlp.1", 4, with_rows=True, rank=worker.id, world=worker.num_workers))


def test_batches_made_in_a_worker_are_not_shared_a_second_time(fake: Fake, run: Any) -> None:
    assert sorted(rows_of(load(Own(fake.path), 2))) == list(range(ROWS))
    chained = ChainDataset([run.batches("mlp.1", 4, with_rows=True), run.batches("mlp.1", 5, with_rows=True)])
    assert sorted(rows_of(load(chained, 2))) == sorted([*range(ROWS)] * 2)


def test_workers_of_mixed_blocks_read_a_run_about_once_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than each all of it."""
    monkeypatch.setattr(pools, "POOL_BYTES", 24 * 100)
    monkeypatch.setattr(pools, "BLOCK_BYTES", 24 * 20)
    monkeypatch.setattr(pools, "MIXED", 4)
    fake = write_run(f"memory://{tmp_path.name}-shared", [[2000]], {"x": 6})
    batches = harvest.open(fake.path).batches("x", 10, with_rows=True)
    assert batches.mixing.startswith("blocks: 5 of 100 blocks")
    calls, read = [], RemoteFiles.read_range
    monkeypatch.setattr(RemoteFiles, "read_range", lambda self, *what: calls.append(what) or read(self, *what))
    with pytest.MonkeyPatch.context() as patch:
        found = simulated(batches, 4, patch)
    assert sorted(row for rows in found for row in rows) == list(range(2000))
    assert 100 <= len(calls) <= 100 + 3 * 5


# ---- processes -------------------------------------------------------------------------------------------------------


def test_started_workers_open_by_path_whatever_the_reader_is(fake: Fake, compressed: Fake, tmp_path: Path) -> None:
    """Started anew, not forked: several runs as one, and two aligned, one of them of int8."""
    other = write_run(tmp_path / "o", [[5, 3]], dtype="bfloat16")
    rounded = write_run(tmp_path / "i", SHARDS, dtype="int8")
    runs = harvest.open([fake.path, other.path])
    pair = harvest.join({"plain": harvest.open(compressed.path), "rounded": harvest.open(rounded.path)})
    names = ["plain/mlp.1", "rounded/mlp.1"]
    chained = ChainDataset(
        [
            runs.batches("mlp.1", 10, with_rows=True),
            pair.batches(names, 10, stack=True, dtype="float32", with_rows=True, where=np.arange(ROWS - 1, 3, -1)),
        ]
    )
    found: dict[int, list[int]] = {2: [], 3: []}
    for values, rows in load(chained, 2, multiprocessing_context="spawn"):
        found[values.ndim] += rows.tolist()
        if values.ndim == 2:
            assert torch.equal(values, torch.cat([fake.rows["mlp.1"], other.rows["mlp.1"]])[rows])
        else:
            assert torch.equal(values[:, 0], compressed.rows["mlp.1"][rows].float())
            assert torch.equal(values[:, 1], rounded.rows["mlp.1"][rows])
    assert sorted(found[2]) == list(range(ROWS + 8))
    assert sorted(found[3]) == list(range(4, ROWS))


def test_what_goes_to_a_worker_is_paths_and_no_rows_and_the_same_shards(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r", [[20_000]], {"x": 64}, chunk_bytes=1 << 20)
    batches = harvest.open(fake.path).batches("x", 4096, with_rows=True)
    next(batches)
    data = pickle.dumps(batches)
    assert len(data) < 10_000
    assert b"torch._utils" not in data
    assert fake.path.encode() in data
    for path in (Path(fake.path) / "ledger").iterdir():
        path.unlink()  # what is committed, or taken back, meanwhile is not looked at
    assert rows_of(pickle.loads(data)) == rows_of(batches)


def test_a_fork_beside_a_held_lock_does_not_wait_for_it(run: Any) -> None:
    batches = run.batches("mlp.1", 10, with_rows=True)
    next(batches)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with batches._arrays[0]._raw[0]._parts._lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert len(rows_of(load(batches, 2, timeout=200))) == ROWS - 10
    finally:
        done.set()
        thread.join()


def test_forked_workers_read_an_object_store_on_connections_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with s3_server() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        fake = write_run(f"s3://{server.bucket}/run", SHARDS, {"x": 6})
        monkeypatch.delenv("AWS_ENDPOINT_URL")
        run = harvest.open(fake.path, server.storage)
        batches = run.batches("x", 5, with_rows=True)
        next(batches)  # the parent's own connection is in use
        found = []
        for values, rows in load(batches, 2, timeout=200):
            assert torch.equal(values, fake.rows["x"][rows])
            found += rows.tolist()
        assert len(set(found)) == ROWS - 5


def test_damage_in_a_worker_reaches_the_caller(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r")
    (Path(fake.path) / "shards" / fake.records[0].attempt / "mlp.1" / "c.0.0").unlink()
    batches = harvest.open(fake.path).batches("mlp.1", 4, mixing="global")
    with pytest.raises(DamageError, match=r"mlp\.1/c\.0\.0: missing"):
        list(load(batches, 1))


# ---- a loader whose place can be saved -------------------------------------------------------------------------------


def test_loops_over_a_loader_go_on_behind_a_break_and_begin_new_epochs(either: Any) -> None:
    loader = either.batches("residual.0", 4, with_rows=True).loader(workers=2, prefetch_factor=4)
    assert len(loader) == 12
    head = []
    for _, rows in loader:
        head += rows.tolist()
        if len(head) == 12:
            break
    first = head + rows_of(loader)
    second = rows_of(loader)
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second
    once = either.batches("residual.0", 4, epochs=2, with_rows=True).loader(workers=2)
    assert rows_of(once) == first + second


@pytest.mark.parametrize("taken", [1, 7, 12, 17, 24])
def test_a_loader_goes_on_exactly_where_its_state_was_taken(taken: int, either: Any) -> None:
    def loader(workers: int = 2) -> Any:
        return either.batches("residual.0", 4, epochs=2, with_rows=True).loader(workers)

    whole, first, head = rows_of(loader()), loader(), []
    for number, (_, rows) in enumerate(first, 1):
        head += rows.tolist()
        if number == taken:
            break
    state = json.loads(json.dumps(first.state_dict()))
    second = loader()
    second.load_state_dict(state)
    assert head + rows_of(second) == whole
    other = loader(3)
    if "pool_blocks" in state:
        with pytest.raises(RequestError, match="workers is 2, here it is 3"):
            other.load_state_dict(state)
    else:
        other.load_state_dict(state)
        assert head + rows_of(other) == whole
        alone = either.batches("residual.0", 4, epochs=2, with_rows=True)
        alone.load_state_dict(state)
        assert head + rows_of(alone) == whole


@settings(max_examples=25, deadline=None)
@given(blocks=st.booleans(), taken=st.integers(0, 40), batch=st.integers(2, 9), workers=st.integers(1, 4))
def test_what_a_loader_gave_and_what_is_left_are_every_row(
    blocks: bool, taken: int, batch: int, workers: int, fake: Fake, compressed: Fake
) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context() as sizes:
        sizes.setattr(pools, "POOL_BYTES", 12 * 12)
        sizes.setattr(pools, "BLOCK_BYTES", 12 * 4)
        batches = harvest.open((compressed if blocks else fake).path).batches(
            "mlp.1", batch, epochs=2, with_rows=True, rank=1, world=2
        )
        whole = simulated(batches, workers, patch)
        head = simulated(batches, workers, patch, took=taken)
        batches.load_state_dict({**batches.state_dict(), "done": len(head)})
        assert head + simulated(batches, workers, patch) == whole


def test_a_loader_leaves_the_batches_it_was_made_from_alone(run: Any) -> None:
    batches = run.batches("mlp.1", 4, with_rows=True)
    next(batches)
    loader = batches.loader(1)
    assert len(rows_of(loader)) == ROWS - 4
    assert len(rows_of(batches)) == ROWS - 4


def test_wrong_requests_for_a_loader_name_the_setting(run: Any) -> None:
    with pytest.raises(RequestError, match="workers = 0: allowed are"):
        run.batches("mlp.1").loader(0)
    for key, value in (("batch_size", 4), ("persistent_workers", True), ("in_order", False)):
        with pytest.raises(RequestError, match=f"loader: {key} = {value}"):
            run.batches("mlp.1").loader(1, **{key: value})
    with pytest.raises(RequestError, match=r"device = 'cuda'.*pin_memory"):
        run.batches("mlp.1", device="cuda").loader(1)
    with pytest.raises(RequestError, match="device = 'cuda'"):
        list(load(run.batches("mlp.1", device="cuda"), 1))
    assert len(list(run.batches("mlp.1", device="cpu").loader(1))) == 1
