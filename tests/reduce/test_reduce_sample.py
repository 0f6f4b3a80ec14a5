"""The sample of examples: whatever the shards, the same ones; sorting all hashes at once is the judge."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvest.reduce.sample import ExampleKeys, held_out, join_keys, smallest, unit_hashes


def keys(n: int, seed: int = 0, paired: bool = False) -> ExampleKeys:
    generator = np.random.default_rng(seed)
    document = np.sort(generator.integers(0, 2**41, n))
    pair = tuple(f"p{i // 2}" for i in range(n)) if paired else None
    return ExampleKeys(
        document=document,
        variant=generator.integers(0, 2, n).astype(np.int8),
        position=generator.integers(0, 2000, n).astype(np.int32),
        group=(np.arange(n) % 2 if paired else generator.integers(-1, 2, n)).astype(np.int8),
        held_out=held_out(document, pair, 0.3),
        pair=pair,
    )


def same(one: ExampleKeys, two: ExampleKeys) -> bool:
    fields = ("document", "variant", "position", "group", "held_out")
    return one.pair == two.pair and all(np.array_equal(getattr(one, f), getattr(two, f)) for f in fields)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    limit=st.integers(1, 12),
    paired=st.booleans(),
    seed=st.integers(0, 3),
)
def test_samples_of_shards_joined_and_cut_again_are_the_sample_of_the_whole(
    n: int, cuts: list[int], limit: int, paired: bool, seed: int
) -> None:
    whole = keys(n, seed, paired)
    edges = [0, *sorted(min(cut, n) for cut in cuts), n]
    shards = [whole.take(np.arange(a, b)) for a, b in zip(edges, edges[1:])]  # noqa: RUF007
    kept = [shard.take(smallest(shard, limit)) for shard in shards]
    joined = join_keys(kept)
    assert same(joined.take(smallest(joined, limit)), whole.take(smallest(whole, limit)))


def test_at_most_so_many_of_each_group_and_part_and_all_where_there_are_fewer() -> None:
    whole = keys(5000, 1)
    index = smallest(whole, 300)
    assert (np.diff(index) > 0).all()
    kept = whole.take(index)
    assert Counter(zip(kept.group.tolist(), kept.held_out.tolist())) == {
        (g, h): 300 for g in (0, 1) for h in (False, True)
    }
    assert (whole.take(smallest(whole, 5000)).group >= 0).all()
    assert len(smallest(whole, 5000)) == (whole.group >= 0).sum()
    more = set(smallest(whole, 400).tolist())
    assert set(index.tolist()) < more


def test_the_order_of_examples_does_not_matter() -> None:
    whole = keys(400, 2)
    order = np.random.default_rng(0).permutation(400)
    mixed = whole.take(order)
    assert set(order[smallest(mixed, 30)].tolist()) == set(smallest(whole, 30).tolist())


def test_both_members_of_a_pair_are_sampled_or_neither() -> None:
    kept = keys(1000, 3, paired=True)
    index = smallest(kept, 50)
    sides = Counter(kept.take(index).pair)
    assert set(sides.values()) == {2}
    assert len(sides) == 100  # 50 to fit with, 50 held out


def test_the_sample_does_not_follow_the_order_of_the_data() -> None:
    """Neither documents, nor positions, nor variants: the middle of what is kept is the middle of all."""
    n = 20_000
    document, position = np.arange(n) // 20, np.arange(n) % 20
    whole = ExampleKeys(
        document=document,
        variant=(np.arange(n) % 2).astype(np.int8),
        position=position.astype(np.int32),
        group=np.zeros(n, np.int8),
        held_out=np.zeros(n, bool),
    )
    index = smallest(whole, 2000)
    assert abs(document[index].mean() / document.mean() - 1) < 0.05
    assert abs(position[index].mean() / position.mean() - 1) < 0.05
    assert len(np.unique(document[index])) > 800


@pytest.mark.parametrize("pairs", [None, "pairs"])
def test_the_held_out_share_is_by_document_or_pair_alone(pairs: Any) -> None:
    document = np.repeat(np.arange(20_000) + 2**40, 2)
    pair = [f"p{i % 10_000}" for i in range(40_000)] if pairs else None
    kept = held_out(document, pair, 0.2)
    assert kept.mean() == pytest.approx(0.2, abs=0.01)
    assert (kept[::2] == kept[1::2]).all() if pair is None else (kept[:10_000] == kept[10_000:20_000]).all()
    assert not held_out(document, pair, 0.0).any()
    assert held_out(document, pair, 1.0).all()
    assert (held_out(document, pair, 0.3) >= kept).all()


def test_what_is_sampled_does_not_depend_on_what_is_held_out() -> None:
    n = 20_000
    document = np.arange(n)
    part = held_out(document, None, 0.5)
    whole = ExampleKeys(
        document=document,
        variant=np.zeros(n, np.int8),
        position=np.zeros(n, np.int32),
        group=np.zeros(n, np.int8),
        held_out=np.zeros(n, bool),
    )
    assert part[smallest(whole, 2000)].mean() == pytest.approx(0.5, abs=0.05)


def test_hashes_are_what_they_were() -> None:
    """A run must hold out tomorrow what it holds out today."""
    assert unit_hashes(np.array([0, 1, 2**40]), None).tolist() == [
        12035550249420947055,
        627405149472732430,
        14485895299514490415,
    ]
    assert unit_hashes(np.array([0, 0]), ["a", "\ud800"]).tolist() == [3405396810240292928, 7497787021708494914]
    assert np.flatnonzero(held_out(np.arange(20), None, 0.3)).tolist() == [0, 3, 5, 9]
