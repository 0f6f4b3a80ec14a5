"""Closed-form directions: numpy in float64 on the whole data is the judge, whatever the blocks, shards and order."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import harvest
from harvest.errors import RequestError
from harvest.reduce.base import load_states, save_states
from harvest.reduce.concepts import Concepts, ConceptState
from harvest.reduce.direction import Direction, of_sums
from harvest.reduce.labels import make_labels, order_pairs

SUMS = Concepts()
MODES = ("mean_difference", "single_group", "paired_rejection")
NAN = float("nan")


def block(rows: Any, groups: Any, weights: Any = None, pairs: Any = None) -> ConceptState:
    tensor = torch.as_tensor(np.asarray(rows)) if not isinstance(rows, torch.Tensor) else rows
    labels = make_labels(groups, weights, pairs, rows=len(tensor), unknown="count")
    return SUMS.update(SUMS.zero(), tensor, labels)


def bits(state: ConceptState) -> dict[str, tuple[bytes, tuple[int, ...], str]]:
    return {key: (a.tobytes(), a.shape, a.dtype.str) for key, a in SUMS.arrays(state).items()}


def right(mode: str, rows: np.ndarray, groups: np.ndarray, weights: np.ndarray, pairs: Sequence[Any] | None) -> Any:
    """The formulas of the three modes, by numpy over everything at once; None where they divide by nothing.

    Unusable rows are left out; with pairs so are their partners.
    """
    rows = rows.astype(np.float64)
    good = np.isfinite(rows).all(axis=1)
    table: dict[Any, dict[int, int]] = {}
    if pairs is not None:
        for i, (key, group) in enumerate(zip(pairs, groups)):
            if group in (0, 1):
                table.setdefault(key, {})[int(group)] = i
        for members in table.values():
            if not all(good[i] for i in members.values()):
                good[list(members.values())] = False
    means = []
    for group in (0, 1):
        at = good & (groups == group)
        means.append((weights[at, None] * rows[at]).sum(axis=0) / weights[at].sum() if weights[at].sum() else None)
    if mode == "single_group":
        return means[0]
    if mode == "mean_difference":
        return None if means[0] is None or means[1] is None else means[0] - means[1]
    total, mass = np.zeros(rows.shape[1]), 0.0
    for members in table.values():
        if len(members) == 2 and good[members[0]]:
            a, b = rows[members[0]], rows[members[1]]
            if b.any():
                weight = (weights[members[0]] + weights[members[1]]) / 2
                total += weight * (a - (a @ b) / (b @ b) * b)
                mass += weight
    return total / mass if mass else None


def close(found: Direction, exact: np.ndarray, rtol: float = 1e-10) -> None:
    assert found.status == "ok"
    assert found.raw is not None
    assert found.vector is not None
    assert found.norm is not None
    length = np.linalg.norm(exact)
    assert np.linalg.norm(found.raw - exact) <= rtol * length
    assert found.norm == pytest.approx(length, rel=rtol)
    assert np.linalg.norm(found.vector - exact / length) <= rtol
    assert np.linalg.norm(found.vector) == pytest.approx(1, abs=1e-15)
    assert found.vector.dtype == found.raw.dtype == np.float64


VALUES = st.sampled_from([0.0, 1.0, -2.0, 3.5, 1e-3, 1000.0, 1000.5, -3000.0, 7.0, NAN, math.inf])
WEIGHTS = st.sampled_from([0.0, 1.0, 0.5, 3.0])


@settings(max_examples=200, deadline=None)
@given(data=st.data(), n=st.integers(0, 16), width=st.integers(1, 4), paired=st.booleans())
def test_any_partition_merged_in_any_order_and_grouping_is_what_numpy_says_of_the_whole(
    data: st.DataObject, n: int, width: int, paired: bool
) -> None:
    rows = np.array(data.draw(st.lists(VALUES, min_size=n * width, max_size=n * width)), np.float32).reshape(n, width)
    weights = np.array(data.draw(st.lists(WEIGHTS, min_size=n, max_size=n)))
    if paired:  # a shuffled choice of (key, side), so that some have a partner and some have not
        sides = data.draw(st.permutations([(f"k{i}", g) for i in range(n) for g in (0, 1)]))[:n]
        pairs: list[str] | None = [key for key, _ in sides]
        groups = np.array([g for _, g in sides], np.int64)
    else:
        pairs, groups = None, np.array(data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)), np.int64)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    parts = [
        block(rows[a:b], groups[a:b], weights[a:b], None if pairs is None else pairs[a:b])
        for a, b in zip([0, *cuts], [*cuts, n])
    ]
    parts = data.draw(st.permutations(parts))
    while len(parts) > 1:
        at = data.draw(st.integers(0, len(parts) - 2))
        parts[at : at + 2] = [SUMS.merge(parts[at], parts[at + 1])]
    whole = block(rows, groups, weights, pairs)
    for mode in MODES:
        found, once = (of_sums(state, mode, "count") for state in (parts[0], whole))
        assert found.counts == once.counts
        assert found.status.split("(")[0] == once.status.split("(")[0]
        exact, scale = right(mode, rows, groups, weights, pairs), np.abs(rows[np.isfinite(rows)]).max(initial=1)
        if found.status == "ok":
            assert np.linalg.norm(found.raw - exact) <= 1e-9 * scale
            assert np.linalg.norm(found.raw - once.raw) <= 1e-9 * scale
        else:
            assert exact is None or np.linalg.norm(exact) <= 1e-5 * scale
    good = np.isfinite(rows).all(axis=1)
    assert parts[0].excluded == tuple(int((~good & (groups == g)).sum()) for g in (0, 1))
    assert parts[0].unknown == int((groups == 2).sum())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_matches_numpy_to_1e_10_in_every_dtype(mode: str, dtype: torch.dtype) -> None:
    generator = np.random.default_rng(1)
    groups, pairs = np.tile([0, 1], 1500), np.repeat(np.arange(1500), 2)
    rows = torch.from_numpy(generator.normal(size=(3000, 40)) + 3 + groups[:, None] * generator.normal(size=40)).to(
        dtype
    )
    weights = generator.random(3000)
    found = harvest.concept_direction(rows, groups, weights, pairs, mode)
    close(found, right(mode, rows.double().numpy(), groups, weights, pairs))
    assert (found.counts.rows, found.counts.pairs) == ((1500, 1500), 1500)
    assert found.counts.weights == pytest.approx((weights[::2].sum(), weights[1::2].sum()))


def test_the_formulas_on_numbers_worked_by_hand() -> None:
    """A: (2, 0) of weight 3 and (0, 4) of weight 1, mean (1.5, 1); B: (1, 1) twice as heavy as (4, 1), mean (2, 1).

    Pairs: (2,0) along (1,1) leaves (1,-1), weight 2.5; (0,4) along (4,1): 4/17 (4,1), leaves (-16,64)/17, weight 1.
    """
    rows, groups, weights, pairs = [[2, 0], [0, 4], [1, 1], [4, 1]], [0, 0, 1, 1], [3, 1, 2, 1], ["p", "q", "p", "q"]
    close(harvest.concept_direction(rows, groups, weights), np.array([-0.5, 0.0]))
    close(harvest.concept_direction(rows, groups, weights, mode="single_group"), np.array([1.5, 1.0]))
    rest = (2.5 * np.array([1.0, -1.0]) + np.array([-16, 64]) / 17) / 3.5
    close(harvest.concept_direction(rows, groups, weights, pairs, "paired_rejection"), rest)


@pytest.mark.parametrize("mode", ["mean_difference", "paired_rejection"])
def test_swapped_groups_turn_the_difference_round(mode: str) -> None:
    rows = np.random.default_rng(2).normal(size=(60, 5))
    groups = np.arange(60) % 2
    found = harvest.concept_direction(rows, groups, pairs="order", mode=mode)
    other = harvest.concept_direction(rows, 1 - groups, pairs="order", mode=mode)
    if mode == "mean_difference":
        np.testing.assert_array_equal(found.vector, -np.asarray(other.vector))
    assert float(np.asarray(found.vector) @ (rows[::2].mean(0) - rows[1::2].mean(0))) > 0


def test_a_million_rows_with_a_large_offset_are_within_1e_9_of_the_exact_result() -> None:
    """Mean 1,000 and two dimensions at 3,000, a difference of 0.1; the exact sums of float32 values by math.fsum."""
    generator, sums = np.random.default_rng(3), SUMS.zero()
    width, offset = 6, np.full(6, 1000.0)
    offset[[1, 4]] = 3000.0
    groups = (np.arange(1_000_000) % 3 == 0).astype(np.int64)
    rows = generator.normal(0, 1, (1_000_000, width)).astype(np.float32)
    rows += (offset + 0.1 * (groups == 0)[:, None]).astype(np.float32)
    tensor = torch.from_numpy(rows)
    for start in range(0, len(rows), 50_000):
        part = slice(start, start + 50_000)
        sums = SUMS.update(sums, tensor[part], make_labels(groups[part], rows=50_000))
    a, b = (rows[groups == g].astype(np.float64) for g in (0, 1))
    exact = np.array([math.fsum(a[:, j]) / len(a) - math.fsum(b[:, j]) / len(b) for j in range(width)])
    close(of_sums(sums, "mean_difference"), exact, 1e-9)


def test_sorted_data_one_group_shards_and_shuffled_pairs_all_give_the_same_pairs() -> None:
    """All of A before all of B, in another order each: every pair waits, and no arrival order shows."""
    generator = np.random.default_rng(4)
    a, b = generator.normal(size=(200, 8)) + 1, generator.normal(size=(200, 8))
    exact = right("paired_rejection", np.r_[a, b], np.repeat([0, 1], 200), np.ones(400), [*range(200)] * 2)
    orders = generator.permutation(200), generator.permutation(200)
    shards = [block(a[part], [0] * 50, pairs=part) for part in np.split(orders[0], 4)]
    shards += [block(b[part], [1] * 50, pairs=part) for part in np.split(orders[1], 4)]
    found = of_sums(SUMS.merge_all(shards), "paired_rejection")
    close(found, exact)
    assert (found.counts.pairs, found.counts.unmatched) == (200, (0, 0))
    close(of_sums(SUMS.merge_all(shards), "mean_difference"), a.mean(0) - b.mean(0))


def test_merging_in_shard_order_gives_the_same_bits_however_it_is_done() -> None:
    generator = np.random.default_rng(5)
    rows, groups = generator.normal(size=(300, 8)).astype(np.float32), generator.integers(0, 2, 300)
    pairs = order_pairs(groups)
    cuts = np.r_[0:300:50, 300]
    shards = [block(rows[i:j], groups[i:j], None, pairs[i:j]) for i, j in itertools.pairwise(cuts)]
    saved = [
        dict(load_states(SUMS, save_states([(SUMS, {"d/residual.3": state})])))["d/residual.3"] for state in shards
    ]
    at_once, one_by_one = SUMS.merge_all(shards), SUMS.zero()
    for state in saved:
        one_by_one = SUMS.merge(one_by_one, state)
    assert bits(at_once) == bits(one_by_one)
    direct = [of_sums(state, "paired_rejection", "count").raw for state in (at_once, one_by_one)]
    assert np.asarray(direct[0]).tobytes() == np.asarray(direct[1]).tobytes()


def test_zero_is_the_identity_from_both_sides_and_merging_changes_no_argument() -> None:
    rows = np.random.default_rng(6).normal(size=(6, 3)).astype(np.float32)
    rows[4, 1] = NAN
    state = block(rows, [0, 1, 0, 1, 0, 7], [1, 2, 0, 1, 1, 1], ["a", "a", "b", "c", "d", ""])
    light = block(rows[:2], [0, 1], [0, 0])
    for one in (state, light, SUMS.zero()):
        before = bits(one)
        assert bits(SUMS.merge(SUMS.zero(), one)) == before == bits(SUMS.merge(one, SUMS.zero()))
        assert bits(SUMS.update(one, torch.zeros(0, 3), make_labels([], rows=0))) == before
    before = bits(state)
    SUMS.merge(state, block(rows[:3], [0, 1, 1], None, ["c", "d", "b"]))
    of_sums(state, "mean_difference")
    assert bits(state) == before


def test_saved_states_come_back_bit_for_bit_with_what_waits() -> None:
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    rows[3, 0] = NAN
    keys = ["weiß nicht", "\ud800", "", "x" * 50, "weiß nicht"]
    for states in (block(rows, [0, 0, 1, 1, 1], [0.5] * 5, keys), block(rows.double(), [0, 0, 1, 1, 1], None, keys)):
        ((name, found),) = load_states(SUMS, save_states([(SUMS, {"s/residual.1@-3": states})]))
        assert name == "s/residual.1@-3"
        assert bits(found) == bits(states)
        assert found.waiting.keys() == {"\ud800", "", "x" * 50}
        assert found.waiting["x" * 50].row is None
        assert found.done == {"weiß nicht"}
    for states in (SUMS.zero(), block(rows, [0] * 5)):
        ((_, found),) = load_states(SUMS, save_states([(SUMS, {"n": states})]))
        assert bits(found) == bits(states)


def test_a_pair_with_a_member_that_cannot_be_used_is_dropped_whole_and_the_others_stay() -> None:
    """Four pairs, the B of pair 1 is not a number; whether its A is in the same block or another one."""
    rows = np.random.default_rng(8).normal(size=(8, 4))
    rows[3, 2] = NAN
    groups, pairs = [0, 1] * 4, [0, 0, 1, 1, 2, 2, 3, 3]
    kept = [0, 4, 6], [1, 5, 7]
    for parts in ([slice(0, 8)], [slice(0, 3), slice(3, 8)], [slice(i, i + 1) for i in range(8)]):
        state = SUMS.merge_all(block(rows[p], groups[p], None, pairs[p]) for p in parts)
        found = of_sums(state, "mean_difference")
        close(found, (rows[kept[0]] - rows[kept[1]]).mean(axis=0))
        assert (found.counts.pairs, found.counts.dropped_pairs) == (3, 1)
        assert (found.counts.excluded, found.counts.rows, found.counts.unmatched) == ((0, 1), (3, 3), (0, 0))
        close(of_sums(state, "paired_rejection"), right("paired_rejection", rows, np.array(groups), np.ones(8), pairs))


def test_unequal_groups_are_refused_in_pairs_unless_they_are_counted() -> None:
    rows = np.random.default_rng(9).normal(size=(7, 3))
    groups = [0, 1, 0, 1, 0, 1, 0]
    with pytest.raises(RequestError, match="1 rows of A and 0 of B have no partner"):
        harvest.concept_direction(rows, groups, pairs="order", mode="paired_rejection")
    found = harvest.concept_direction(rows, groups, pairs="order", mode="paired_rejection", unmatched="count")
    close(found, right("paired_rejection", rows[:6], np.array(groups[:6]), np.ones(6), [0, 0, 1, 1, 2, 2]))
    assert (found.counts.unmatched, found.counts.rows) == ((1, 0), (3, 3))
    means = harvest.concept_direction(rows, groups, pairs="order")
    close(means, rows[::2].mean(0) - rows[1::2].mean(0))
    assert means.counts.unmatched == (1, 0)


@pytest.mark.parametrize(("first", "second"), [("AB", "A"), ("A", "A"), ("AB", "AB"), ("B", "AB"), ("ABA", "")])
def test_a_second_member_on_one_side_of_a_pair_is_refused_by_key(first: str, second: str) -> None:
    def part(sides: str) -> ConceptState:
        return block(np.ones((len(sides), 2)), ["AB".index(s) for s in sides], None, ["p 7"] * len(sides))

    with pytest.raises(RequestError, match=r"pair 'p 7': two examples of group [AB]; a pair has one of each"):
        SUMS.merge(part(first), part(second))


def test_order_pairs_count_over_shards_and_skip_what_is_in_neither_group() -> None:
    groups = np.array([1, 0, 7, 0, 1, 1])
    assert order_pairs(groups) == ("0", "0", "", "1", "1", "2")
    assert order_pairs(groups[3:], before=(1, 1)) == order_pairs(groups)[3:]


UNDEFINED: list[tuple[str, dict[str, Any], str]] = [
    ("mean_difference", {"states": [[1.0, 2]], "groups": [0]}, r"group B is empty \(A 1 rows, B 0"),
    ("mean_difference", {"states": [[1.0, 2], [NAN, 1]], "groups": [0, 1]}, "NaN or infinity: A 0, B 1"),
    ("single_group", {"states": [[1.0, 2]], "groups": [1]}, r"group A is empty \(A 0 rows, B 1"),
    ("single_group", {"states": np.zeros((0, 3)), "groups": []}, "group A is empty"),
    ("mean_difference", {"states": [[1.0], [2.0]], "groups": [0, 1], "weights": [0, 1]}, "group A has no weight"),
    ("single_group", {"states": [[1.0], [-1.0]], "groups": [0, 0]}, "the mean of A is zero"),
    ("mean_difference", {"states": [[0.0], [0.0]], "groups": [0, 1]}, "no difference"),
    (
        "paired_rejection",
        {"states": [[1.0], [NAN]], "groups": [0, 1], "pairs": [3, 3]},
        r"no complete pair .*dropped.* 1",
    ),
    ("paired_rejection", {"states": np.zeros((0, 2)), "groups": [], "pairs": []}, r"group A is empty \(A 0 rows, B 0"),
    (
        "paired_rejection",
        {"states": [[1.0], [2.0]], "groups": [0, 0], "pairs": [1, 2]},
        "group B is empty .A 2 rows, B 0",
    ),
    (
        "paired_rejection",
        {"states": [[1.0], [2.0]], "groups": [1, 1], "pairs": [1, 2]},
        "group A is empty .A 0 rows, B 2",
    ),
    ("pca", {"states": [[1.0], [2.0]], "groups": [0, 0], "pairs": [1, 2]}, "group B is empty .A 2 rows, B 0"),
    ("paired_rejection", {"states": [[1.0, 2], [0, 0]], "groups": [0, 1], "pairs": [3, 3]}, "b is zero in every one"),
    (
        "paired_rejection",
        {"states": [[1.0, 2], [1, 0]], "groups": [0, 1], "pairs": [3, 3], "weights": [0, 0]},
        "1 pairs weigh nothing",
    ),
    (
        "paired_rejection",
        {"states": [[0.3, 0.9, 2.1], [0.1, 0.3, 0.7]], "groups": [0, 1], "pairs": ["p", "p"]},
        "a is parallel to b in every one of 1 pairs",
    ),
]


@pytest.mark.parametrize(("mode", "given_", "why"), UNDEFINED)
def test_an_undefined_direction_says_why_and_has_no_vector(mode: str, given_: dict[str, Any], why: str) -> None:
    found = harvest.concept_direction(mode=mode, **given_)
    assert found.vector is None
    assert found.raw is None
    assert re.search(why, found.status)
    assert "undefined" in repr(found)
    assert len(found.status.splitlines()) == 1


def test_parallel_pairs_of_float32_rounding_are_no_direction_but_a_small_rest_is() -> None:
    b = np.random.default_rng(10).normal(size=(50, 16)).astype(np.float32)
    a = (b * np.float32(1.7)).astype(np.float32)  # parallel but for the rounding of the product
    groups, pairs = np.repeat([0, 1], 50), [*range(50)] * 2
    found = harvest.concept_direction(np.r_[a, b], groups, pairs=pairs, mode="paired_rejection")
    assert "parallel" in found.status
    assert found.counts.parallel_pairs == 50
    a[:, 0] += 1e-4
    found = harvest.concept_direction(np.r_[a, b], groups, pairs=pairs, mode="paired_rejection")
    close(found, right("paired_rejection", np.r_[a, b], groups, np.ones(100), pairs), 1e-9)


def test_a_tiny_partner_is_still_removed_and_a_tiny_weight_still_divides() -> None:
    """|b|^2 = 1e-14 beside |a| = 1 leaves (0, 1) of (1, 1); weights of 1e-13 and 1e-200 are only relative."""
    found = harvest.concept_direction([[1.0, 1.0], [1e-7, 0.0]], [0, 1], pairs=[1, 1], mode="paired_rejection")
    close(found, np.array([0.0, 1.0]))
    for weight in (1e-13, 1e-200):
        found = harvest.concept_direction([[3.0, 0.0], [0.0, 1.0]], [0, 1], [weight, weight])
        close(found, np.array([3.0, -1.0]))


def test_identical_groups_are_no_difference_whatever_rounding_did_to_them() -> None:
    generator = np.random.default_rng(11)
    rows = (generator.normal(size=(5, 64)) * 3).astype(np.float32)
    noisy = (rows * (1 + 1e-6 * generator.normal(size=rows.shape))).astype(np.float32)  # another batch's rounding
    for other in (rows, rows[::-1], noisy):
        found = harvest.concept_direction(np.r_[rows, other], [0] * 5 + [1] * 5)
        assert found.status.startswith("no difference between the groups")
        assert found.vector is None
        assert found.norm == pytest.approx(0, abs=1e-4)
    assert harvest.concept_direction(np.r_[rows, noisy + 0.01], [0] * 5 + [1] * 5).status == "ok"


def test_single_rows_that_differ_by_rounding_are_no_difference_in_their_dtype() -> None:
    row = (np.random.default_rng(20).normal(size=64) * 1000).astype(np.float32)
    near = np.nextafter(row, np.float32(np.inf))
    assert "no difference" in harvest.concept_direction(np.stack([near, row]), [0, 1]).status
    assert harvest.concept_direction(np.stack([near, row]).astype(np.float64), [0, 1]).status == "ok"
    assert (
        "the mean of A is zero"
        in harvest.concept_direction([[0.1], [0.2], [-0.3]], [0] * 3, mode="single_group").status
    )


def test_rows_that_wait_in_vain_add_up_to_the_same_bits_in_any_order() -> None:
    rows = np.random.default_rng(21).normal(size=(30, 4))
    parts = [block(rows[i : i + 1], [i % 2], None, [i]) for i in range(30)]
    one, two = (of_sums(SUMS.merge_all(order), "mean_difference").raw for order in (parts, parts[::-1]))
    assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


def test_differences_of_float64_rows_survive_that_float32_would_lose() -> None:
    close(harvest.concept_direction([[1 + 1e-9, 0.0], [1.0, 0.0]], [0, 1]), np.array([1 + 1e-9 - 1, 0.0]), 1e-6)
    huge = harvest.concept_direction(np.array([[1e30, 0], [0, 1e30]], np.float32), [0, 1])
    assert huge.vector is not None
    np.testing.assert_allclose(huge.vector, np.array([1, -1]) / np.sqrt(2), rtol=1e-12)


def test_the_standard_error_is_that_of_the_weighted_means() -> None:
    generator = np.random.default_rng(12)
    rows, groups, weights = generator.normal(size=(80, 3)), np.arange(80) % 2, generator.random(80)
    squared = 0.0
    for group in (0, 1):
        x, w = rows[groups == group], weights[groups == group] / weights[groups == group].sum()
        squared += (w @ (x - w @ x) ** 2).sum() * (w**2).sum()
    for parts in ([slice(0, 80)], [slice(0, 9), slice(9, 10), slice(10, 80)]):
        state = SUMS.merge_all(block(rows[p] + 100, groups[p], weights[p]) for p in parts)
        assert of_sums(state, "mean_difference").standard_error == pytest.approx(np.sqrt(squared), rel=1e-10)


def test_token_weights_and_document_means_differ_as_arithmetic_says() -> None:
    """One document of 1 token at 0, one of 9 at 10: tokens average to 9, document means to 5."""
    tokens = np.r_[np.zeros((1, 1)), np.full((9, 1), 10.0)]
    assert harvest.concept_direction(tokens, [0] * 10, mode="single_group").norm == pytest.approx(9)
    assert harvest.concept_direction([[0.0], [10.0]], [0, 0], mode="single_group").norm == pytest.approx(5)
