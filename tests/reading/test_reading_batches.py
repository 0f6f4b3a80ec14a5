"""Shuffled batches: every row once an epoch, in an order that the row count, seed and epoch alone decide."""

from __future__ import annotations

import json
import os
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
from harvest.reading.shuffle import Shuffle


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return write_run(tmp_path_factory.mktemp("run") / "r", [[7, 9], [4], [], [11, 2, 8], [1] * 6], dtype="bfloat16")


@pytest.fixture(scope="module")
def run(fake: Fake) -> Any:
    return harvest.open(fake.path)


def rows_of(batches: Any) -> list[int]:
    return [int(row) for _, rows in batches for row in rows]


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.integers(1, 300), st.integers(1, 70_000)), st.integers(0, 2**40), st.integers(0, 5))
def test_a_shuffle_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    found = Shuffle(n, seed, epoch)(np.arange(n))
    np.testing.assert_array_equal(np.sort(found), np.arange(n))


def test_a_shuffle_of_more_rows_than_32_bits_count_is_one_to_one_and_in_range() -> None:
    n = 2**33 + 12345
    found = Shuffle(n, 1, 0)(np.concatenate([np.arange(50_000), np.arange(n - 50_000, n)]))
    assert len(np.unique(found)) == 100_000
    assert 0 <= found.min() < n // 100 < n - n // 100 < found.max() < n


def test_a_shuffle_mixes_as_well_as_numpy_does() -> None:
    """Three traces that a poor one leaves: fixed points, neighbours that stay near, blocks that stay together."""
    n = 20_000
    for seed in range(5):
        found = Shuffle(n, seed, 0)(np.arange(n))
        assert np.count_nonzero(found == np.arange(n)) < 12  # 1 expected
        near = np.count_nonzero(np.abs(np.diff(found)) <= 5)
        assert near < 30  # 10 expected
        assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.04
        counts = np.histogram2d(np.arange(n), found, bins=20)[0]
        assert 250 < ((counts - 50) ** 2 / 50).sum() < 480  # chi-square of about 361 degrees of freedom, sd 27
    assert not np.array_equal(Shuffle(n, 0, 0)(np.arange(n)), Shuffle(n, 0, 1)(np.arange(n)))
    assert not np.array_equal(Shuffle(n, 0, 0)(np.arange(n)), Shuffle(n, 1, 0)(np.arange(n)))


def test_every_row_comes_once_an_epoch_and_the_last_batch_as_short_as_it_is(run: Any, fake: Fake) -> None:  # E55
    batches = run.batches("residual.0", batch_size=10, epochs=3, with_rows=True)
    found = list(batches)
    assert [len(rows) for _, rows in found] == [10, 10, 10, 10, 7] * 3
    assert len(batches) == 15
    epochs = [torch.cat([rows for _, rows in found[i : i + 5]]).tolist() for i in (0, 5, 10)]
    assert all(sorted(epoch) == list(range(47)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    for values, rows in found:
        assert torch.equal(values, fake.rows["residual.0"][rows])
        assert values.dtype == torch.bfloat16


def test_the_order_depends_on_row_count_and_seed_alone(run: Any, tmp_path: Path) -> None:  # E70
    order = rows_of(run.batches("mlp.1", 10, seed=3, with_rows=True))
    one_shard = harvest.open(write_run(tmp_path / "r", [[47]], {"other": 3}).path)
    assert rows_of(one_shard.batches("other", 10, seed=3, with_rows=True)) == order
    assert rows_of(run.batches(["mlp.1", "residual.0"], 13, seed=3, with_rows=True)) == order
    assert rows_of(run.batches("mlp.1", 10, seed=4, with_rows=True)) != order
    assert rows_of(run.batches("mlp.1", 10, shuffle=False, with_rows=True)) == list(range(47))


def test_several_names_are_aligned_as_a_dict_or_stacked(run: Any, fake: Fake) -> None:
    names = ["residual.10", "residual.0"]
    for values, rows in run.batches(names, 9, with_rows=True):
        assert list(values) == names
        assert all(torch.equal(values[name], fake.rows[name][rows]) for name in names)
    for values, rows in run.batches(names, 9, with_rows=True, stack=True, dtype="float32"):
        assert values.shape == (len(rows), 2, 6)
        assert values.dtype == torch.float32
        assert torch.equal(values, torch.stack([fake.rows[name][rows].float() for name in names], dim=1))
    assert isinstance(next(iter(run.batches(["mlp.1"], 9))), dict)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_are_disjoint_and_together_complete_in_every_epoch(run: Any, world: int, shuffle: bool) -> None:
    options = {"batch_size": 4, "seed": 1, "shuffle": shuffle, "with_rows": True, "world": world, "epochs": 2}
    per_rank = [rows_of(run.batches("mlp.1", rank=rank, **options)) for rank in range(world)]
    assert sorted(row for rows in per_rank for row in rows) == sorted([*range(47)] * 2)
    interleaved = [list(run.batches("mlp.1", rank=rank, **{**options, "epochs": 1})) for rank in range(world)]
    steps = max(map(len, interleaved))
    order = [int(r) for step in range(steps) for part in interleaved if step < len(part) for r in part[step][1]]
    assert order == rows_of(run.batches("mlp.1", **{**options, "world": 1, "epochs": 1}))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 14), st.booleans(), st.integers(0, 2))
def test_a_stopped_iterator_goes_on_exactly_where_it_was(run: Any, taken: int, shuffle: bool, rank: int) -> None:
    options = {"batch_size": 4, "epochs": 3, "shuffle": shuffle, "rank": rank, "world": 3, "with_rows": True}
    whole = [rows.tolist() for _, rows in run.batches("mlp.1", **options)]
    first = run.batches("mlp.1", **options)
    taken = min(taken, len(whole))
    head = [next(first)[1].tolist() for _ in range(taken)]
    second = run.batches("mlp.1", **options)
    next(second, None)  # whatever it was doing before is forgotten
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    tail = [rows.tolist() for _, rows in second]  # nothing, where the state was taken behind the last batch
    assert head + tail == whole


def test_an_iterator_goes_on_after_a_break_and_starts_anew_after_its_end(run: Any) -> None:
    batches = run.batches("mlp.1", 10, with_rows=True)
    for _ in batches:
        break
    assert len(rows_of(batches)) == 37
    assert sorted(rows_of(batches)) == list(range(47))


def test_loops_over_one_object_go_through_the_orders_of_one_loop_over_as_many_epochs(run: Any) -> None:
    whole = rows_of(run.batches("mlp.1", 10, epochs=4, with_rows=True))
    assert whole[:47] != whole[47:94]
    batches = run.batches("mlp.1", 10, epochs=2, with_rows=True)
    assert rows_of(batches) + rows_of(batches) == whole
    once = run.batches("mlp.1", 10, with_rows=True)
    assert [row for _ in range(4) for row in rows_of(once)] == whole
    in_order = run.batches("mlp.1", 10, shuffle=False, with_rows=True)
    assert rows_of(in_order) == rows_of(in_order) == list(range(47))


@pytest.mark.parametrize("taken", [0, 2, 5])
def test_a_state_of_a_later_loop_goes_on_in_that_loops_order(run: Any, taken: int) -> None:
    whole = rows_of(run.batches("mlp.1", 10, epochs=4, with_rows=True))
    first = run.batches("mlp.1", 10, with_rows=True)
    rows_of(first)
    rows_of(first)
    third = iter(first)
    head = [row for _ in range(taken) for row in next(third)[1].tolist()]
    state = json.loads(json.dumps(first.state_dict()))
    second = run.batches("mlp.1", 10, with_rows=True)
    next(second)  # of another epoch at the same place, gathered ahead
    second.load_state_dict(state)
    assert head + rows_of(second) == whole[94:141]
    assert rows_of(second) == whole[141:], "the loop after that"


def test_a_batch_larger_than_all_rows_takes_no_more_room_than_they_do(run: Any) -> None:
    assert sorted(rows_of(run.batches("mlp.1", 10**15, with_rows=True))) == list(range(47))
    assert rows_of(run.batches("mlp.1", 10**15, rank=1, world=2, with_rows=True)) == []


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"batch_size": 3}, {"world": 2}, {"shuffle": False}, {"where": [1, 2]}]
)
def test_a_state_of_another_order_is_refused_by_what_differs(run: Any, change: dict[str, Any]) -> None:
    state = run.batches("mlp.1", 10).state_dict()
    key = {"where": "rows"}.get(*change, *change)
    with pytest.raises(RequestError, match=f"{key}|selection"):
        run.batches("mlp.1", **{"batch_size": 10, **change}).load_state_dict(state)
    with pytest.raises(RequestError, match="done is -1"):
        run.batches("mlp.1", 10).load_state_dict({**state, "done": -1})
    with pytest.raises(RequestError, match="epoch is 'x'"):
        run.batches("mlp.1", 10).load_state_dict({**state, "epoch": "x"})


def test_where_selects_rows_by_indices_mask_or_expression(run: Any, fake: Fake) -> None:
    ordinary = np.flatnonzero(~fake.tokens["special"])
    mask = ~fake.tokens["special"]
    for where in (ordinary, mask, torch.from_numpy(mask), ~pc.field("special"), ordinary.tolist()):
        values = list(run.batches("mlp.1", 5, where=where, with_rows=True))
        rows = torch.cat([rows for _, rows in values])
        assert sorted(rows.tolist()) == ordinary.tolist()
        assert torch.equal(torch.cat([v for v, _ in values]), fake.rows["mlp.1"][rows])
    chosen = (pc.field("position") > 2) & (pc.field("document") == 1)
    expected = np.flatnonzero((fake.tokens["position"] > 2) & (fake.tokens["document"] == 1))
    assert rows_of(run.batches("mlp.1", 5, where=chosen, shuffle=False, with_rows=True)) == expected.tolist()
    assert list(run.batches("mlp.1", 5, where=pc.field("token") == 10**6)) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "batch_size = 0"),
        ({"epochs": 0}, "epochs = 0"),
        ({"rank": 2, "world": 2}, "rank = 2: allowed are 0 to 1"),
        ({"world": 0}, "world = 0"),
        ({"dtype": "int7"}, "dtype = 'int7'"),
        ({"mixing": "some"}, "mixing = 'some'"),
        ({"where": [1, 1]}, "named twice"),
        ({"where": pc.field("layer") == 1}, "where: "),
        ({"names": []}, "names: "),
        ({"names": ["mlp.1", "residual.0"], "stack": True}, "stack: "),
    ],
)
def test_wrong_requests_for_batches_name_the_setting(run: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        run.batches(**{"names": "mlp.1", **options})


def test_large_batches_gathered_by_several_threads_are_the_same_rows(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r", [[3000, 500], [2500]], {"wide": 512}, chunk_bytes=1 << 16, object_bytes=1 << 20)
    for values, rows in harvest.open(fake.path).batches("wide", 4000, with_rows=True):
        assert torch.equal(values, fake.rows["wide"][rows])


def test_damage_found_while_gathering_ahead_reaches_the_caller(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r")
    (Path(fake.path) / "shards" / fake.records[0].attempt / "mlp.1" / "c.0.0").unlink()
    with pytest.raises(DamageError, match=r"mlp\.1/c\.0\.0"):
        list(harvest.open(fake.path).batches("mlp.1", 4))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_loader_goes_on_without_the_threads_of_its_parent(run: Any) -> None:
    batches = run.batches("mlp.1", 10, with_rows=True)
    next(batches)
    state = batches.state_dict()
    child = os.fork()
    if child == 0:
        os._exit(0 if len(rows_of(batches)) == 37 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert batches.state_dict() == state
