"""Batches from mixed blocks: every row once, in an order that sizes and seed decide, for few requests and bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from fakes import Fake, write_run
from hypothesis import given, settings
from hypothesis import strategies as st

import harvest
from harvest.errors import DamageError, RequestError
from harvest.reading import pools
from harvest.reading.shuffle import BlockOrder, Shuffle
from tests.faults import Faults, FaultyFiles

SHARDS = [[70, 9], [40], [], [11, 250, 8], [1] * 60, [200]]
ROWS = sum(map(sum, SHARDS))


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    path = tmp_path_factory.mktemp("run") / "r"
    return write_run(path, SHARDS, dtype="bfloat16", compression="zstd", chunk_bytes=12 * 16, object_bytes=12 * 100)


@pytest.fixture
def run(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With pools of so few rows that an epoch takes many."""
    monkeypatch.setattr(pools, "POOL_BYTES", 12 * 100)
    monkeypatch.setattr(pools, "BLOCK_BYTES", 12 * 8)
    monkeypatch.setattr(pools, "MIXED", 4)
    return harvest.open(fake.path)


def rows_of(batches: Any) -> list[int]:
    return [int(row) for _, rows in batches for row in rows]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 700), st.integers(1, 60), st.integers(1, 300), st.integers(0, 9), st.integers(0, 3))
def test_an_order_of_blocks_is_a_bijection_whose_pools_hold_whole_blocks(
    count: int, block: int, pool: int, seed: int, epoch: int
) -> None:
    order = BlockOrder(count, block, pool, seed)
    places = order.places(epoch, np.arange(count))
    np.testing.assert_array_equal(np.sort(places.rows), np.arange(count))
    assert (np.diff(places.pool) >= 0).all()
    for number in range(order.pools):
        rows = [row for part in order.rows_of(epoch, number) for row in part]
        at = places.pool == number
        assert len(rows) <= max(pool, block) or order.pools == 1
        np.testing.assert_array_equal(np.array(rows)[places.inside[at]], places.rows[at])
        assert {row // block for row in rows} == {row // block for row in places.rows[at].tolist()}
        assert all(order.pool_of(epoch, int(i)) == number for i in np.flatnonzero(at)[:3])
    if order.pools == 1:
        np.testing.assert_array_equal(places.rows, Shuffle(count, seed, epoch)(np.arange(count)))


def test_the_rows_of_a_pool_are_mixed_and_its_blocks_are_any() -> None:
    order = BlockOrder(100_000, 100, 10_000, seed=1)
    for epoch in range(2):
        rows = order.places(epoch, np.arange(100_000)).rows
        for start in range(0, 100_000, 10_000):
            part = rows[start : start + 10_000]
            assert abs(np.corrcoef(part[:-1], part[1:])[0, 1]) < 0.05
            blocks = np.unique(part // 100)
            assert len(blocks) == 100
            assert np.count_nonzero(np.diff(blocks) == 1) < 30  # 10 expected
            assert np.count_nonzero(np.abs(np.diff(part)) == 1) < 10  # 2 expected
    one, two = (order.places(epoch, np.arange(10_000)).rows for epoch in range(2))
    assert len(np.intersect1d(one // 100, two // 100)) < 30


@pytest.mark.parametrize("where", ["zstd", "memory"])
def test_every_row_comes_once_an_epoch_with_its_values(
    run: Any, fake: Fake, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "memory":
        fake = write_run(f"memory://{tmp_path.name}-mixing", SHARDS, dtype="int8", chunk_bytes=12 * 16)
        run = harvest.open(fake.path)
    batches = run.batches(["residual.0", "mlp.1"], 23, seed=5, epochs=3, with_rows=True)
    assert "blocks" in batches.mixing
    found = list(batches)
    per_epoch = -(-ROWS // 23)
    assert len(found) == len(batches) == 3 * per_epoch
    orders = [torch.cat([rows for _, rows in found[i * per_epoch :][:per_epoch]]).tolist() for i in range(3)]
    assert all(sorted(order) == list(range(ROWS)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    for values, rows in found:
        for name in ("residual.0", "mlp.1"):
            assert torch.equal(values[name], fake.rows[name][rows])


def test_the_order_is_that_of_a_run_in_other_shards_chunks_and_compression(run: Any, tmp_path: Path) -> None:
    order = rows_of(run.batches("residual.0", 23, seed=5, with_rows=True))
    other = write_run(tmp_path / "r", [[ROWS]], {"x": 6}, dtype="bfloat16", compression="zstd", chunk_bytes=12 * 16)
    assert rows_of(harvest.open(other.path).batches("x", 23, seed=5, with_rows=True)) == order
    assert rows_of(run.batches("residual.0", 40, seed=5, with_rows=True)) == order
    assert rows_of(run.batches("residual.0", 23, seed=6, with_rows=True)) != order
    assert rows_of(run.batches("residual.0", 23, seed=5, shuffle=False, with_rows=True)) == list(range(ROWS))


def test_where_the_pool_holds_all_rows_the_order_is_the_global_one(fake: Fake) -> None:
    run = harvest.open(fake.path)
    for options in ({}, {"where": np.arange(100, 3, -1)}):
        one = run.batches("mlp.1", 23, seed=5, epochs=2, with_rows=True, **options)
        assert rows_of(one) == rows_of(
            run.batches("mlp.1", 23, 5, epochs=2, with_rows=True, mixing="global", **options)
        )
        assert one.mixing.startswith("blocks: 1 of 1 ") or "blocks" in one.mixing


@pytest.mark.parametrize("world", [1, 2, 3, 5, 40])
def test_ranks_are_disjoint_together_complete_and_read_their_own_pools(run: Any, world: int) -> None:
    options = {"batch_size": 23, "seed": 1, "with_rows": True, "world": world, "epochs": 2}
    per_rank = [rows_of(run.batches("residual.0", rank=rank, **options)) for rank in range(world)]
    assert sorted(row for rows in per_rank for row in rows) == sorted([*range(ROWS)] * 2)
    lengths = {len(run.batches("residual.0", rank=rank, **options)) // 2 for rank in range(world)}
    assert max(lengths) - min(lengths) <= 1
    once = [rows_of(run.batches("residual.0", rank=rank, **{**options, "epochs": 1})) for rank in range(world)]
    assert [row for rows in once for row in rows] == rows_of(
        run.batches("residual.0", **{**options, "world": 1, "epochs": 1})
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 70), st.integers(0, 2))
def test_a_stopped_iterator_goes_on_exactly_where_it_was(fake: Fake, taken: int, rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "POOL_BYTES", 12 * 100)
        run = harvest.open(fake.path)
        options = {"batch_size": 10, "epochs": 3, "rank": rank, "world": 3, "with_rows": True}
        whole = [rows.tolist() for _, rows in run.batches("residual.0", **options)]
        first = run.batches("residual.0", **options)
        head = [next(first)[1].tolist() for _ in range(min(taken, len(whole)))]
        second = run.batches("residual.0", **options)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert head + [rows.tolist() for _, rows in second] == whole


def test_a_state_of_another_mixing_is_refused(run: Any) -> None:
    state = run.batches("residual.0", 10).state_dict()
    with pytest.raises(RequestError, match="block_rows is 16, here it is 15"):
        run.batches(["residual.0", "mlp.1"], 10).load_state_dict(state)


def test_where_selects_rows(run: Any, fake: Fake) -> None:
    ordinary = np.flatnonzero(~fake.tokens["special"])
    for where in (ordinary, ~pc.field("special"), ordinary[::-1]):
        found = list(run.batches("residual.0", 23, where=where, with_rows=True))
        rows = torch.cat([rows for _, rows in found])
        assert sorted(rows.tolist()) == ordinary.tolist()
        assert torch.equal(torch.cat([values for values, _ in found]), fake.rows["residual.0"][rows])


def test_an_epoch_from_afar_costs_few_requests_whatever_the_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "POOL_BYTES", 24 * 100)
    monkeypatch.setattr(pools, "BLOCK_BYTES", 24 * 20)
    monkeypatch.setattr(pools, "MIXED", 4)
    faults = Faults()
    fake = write_run(f"memory://{tmp_path.name}-few", [[500]], {"x": 6})
    run = harvest.open(FaultyFiles(fake.files, faults))
    faults.calls.clear()
    batches = run.batches("x", 3, with_rows=True)
    assert batches.mixing.startswith("blocks: 5 of 25 blocks of 20 ")
    assert sorted(rows_of(batches)) == list(range(500))
    assert faults.calls["read_range"] == 25


def test_no_more_than_three_pools_are_held(run: Any) -> None:
    batches = run.batches("residual.0", 10)
    for _ in batches:
        assert len(batches._pools._held) <= 3


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("where", [None, np.arange(ROWS)[::-3]])
def test_pools_of_many_names_stay_within_their_bytes_and_mix_many_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, where: Any
) -> None:
    """A chunk of each name together is three times a pool here: what is held is stored rows of parts of chunks."""
    names = {f"mlp.{i}": 8 for i in range(12)}
    fake = write_run(tmp_path / "r", SHARDS, names, dtype, compression="zstd", chunk_bytes=8 * 200)
    row = sum(names.values()) * 2 if dtype == "bfloat16" else sum(names.values()) + 4 * len(names)
    monkeypatch.setattr(pools, "POOL_BYTES", row * 64)
    batches = harvest.open(fake.path).batches(list(names), 16, where=where, with_rows=True)
    wanted = ROWS if where is None else len(where)
    assert batches.mixing.startswith(f"blocks: 16 of {-(-wanted // 4)} blocks of 4 ")
    found = list(batches)
    assert sorted(int(row) for _, rows in found for row in rows) == sorted(range(ROWS) if where is None else where)
    for values, rows in found:
        assert all(torch.equal(values[name], fake.rows[name][rows]) for name in names)
        held = [future.result() for future in batches._pools._held.values()]
        assert all(sum(array.nbytes for room in pool for array in room) <= row * 64 for pool in held)
    assert len(held) == 3


def test_damage_reaches_the_caller(fake: Fake, tmp_path: Path) -> None:
    damaged = write_run(tmp_path / "r", SHARDS, compression="zstd")
    (Path(damaged.path) / "shards" / damaged.records[3].attempt / "mlp.1" / "c.0.0").unlink()
    with pytest.raises(DamageError, match=r"mlp\.1/c\.0\.0: missing"):
        list(harvest.open(damaged.path).batches("mlp.1", 4))


def test_the_words_say_how_well_rows_are_mixed(run: Any, tmp_path: Path) -> None:
    assert run.batches("residual.0", shuffle=False).mixing == "none: rows come in order"
    blocks = -(-ROWS // 16)
    assert run.batches("residual.0").mixing.startswith(f"blocks: 6 of {blocks} blocks of 16 consecutive rows at a time")
    plain = harvest.open(write_run(tmp_path / "r").path)
    assert plain.batches("mlp.1").mixing == "global: all 31 rows"
    assert plain.batches("mlp.1", mixing="blocks").mixing.startswith("blocks: ")
