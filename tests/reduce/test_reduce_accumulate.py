"""`concept_direction` and `ConceptAccumulator`: the same in one piece or in many; what is in doubt is refused."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import harvest
from harvest.errors import RequestError
from harvest.reduce.direction import MODES

NAN = float("nan")


def data(n: int = 60, width: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    generator = np.random.default_rng(seed)
    groups = np.tile([0, 1], n // 2)
    rows = generator.normal(size=(n, width)) + np.outer(groups == 0, np.arange(width))
    return rows.astype(np.float32), groups, generator.random(n) + 0.5, [f"pair {i // 2}" for i in range(n)]


@pytest.mark.parametrize("mode", MODES)
def test_blocks_merged_over_workers_give_what_one_call_gives(mode: str) -> None:
    rows, groups, weights, pairs = data()
    whole = harvest.concept_direction(rows, groups, weights, pairs, mode)
    workers = []
    for i in range(3):
        mine = harvest.ConceptAccumulator(mode, 5)
        for start in range(i * 20, i * 20 + 20, 7):  # cuts through pairs
            part = slice(start, min(start + 7, i * 20 + 20))
            mine = mine.update(torch.from_numpy(rows[part]), groups[part], weights[part], pairs[part])
        workers.append(mine)
    found = workers[0].merge(workers[1]).merge(workers[2]).finalise()
    assert whole.status == found.status == "ok"
    assert whole.counts.rows == found.counts.rows == (30, 30)
    assert whole.counts.pairs == found.counts.pairs == 30
    np.testing.assert_allclose(found.raw, np.asarray(whole.raw), rtol=0, atol=1e-10 * np.abs(whole.raw).max())


@pytest.mark.parametrize("mode", MODES)
def test_calls_give_new_accumulators_and_leave_the_old_ones_as_they_were(mode: str) -> None:
    rows, groups, weights, pairs = data()
    empty = harvest.ConceptAccumulator(mode, 5)
    half = empty.update(rows[:30], groups[:30], weights[:30], pairs[:30])
    before = half.finalise()
    changed = rows[30:].copy()
    full = half.update(changed, groups[30:], weights[30:], pairs[30:])
    expected = full.finalise()
    changed[:] = 0  # what was given belongs to the caller
    half.merge(full if mode not in ("mean_difference", "single_group", "paired_rejection") else empty)
    np.testing.assert_array_equal(half.finalise().raw, before.raw)
    np.testing.assert_array_equal(full.finalise().raw, expected.raw)
    assert empty.finalise().status != "ok"
    assert half.update(np.zeros((0, 5)), [], pairs=[] if mode == "paired_rejection" else None) is half


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 60), max_size=6), order=st.randoms(use_true_random=False))
def test_workers_may_merge_in_any_order(cuts: list[int], order: Any) -> None:
    rows, groups, weights, pairs = data()
    edges = [0, *sorted(cuts), 60]
    parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
    order.shuffle(parts)
    total = harvest.ConceptAccumulator("paired_rejection", 5)
    for part in parts:
        one = harvest.ConceptAccumulator("paired_rejection", 5)
        total = total.merge(one.update(rows[part], groups[part], weights[part], pairs[part]))
    whole = harvest.concept_direction(rows, groups, weights, pairs, "paired_rejection")
    np.testing.assert_allclose(total.finalise().raw, np.asarray(whole.raw), rtol=1e-12, atol=1e-13)


def test_a_block_of_one_group_is_no_error_and_the_result_waits_for_the_other() -> None:
    rows, groups, _, _ = data()
    only = harvest.ConceptAccumulator("mean_difference", 5).update(rows[groups == 1], [1] * 30)
    assert "group A is empty" in only.finalise().status
    assert only.update(rows[groups == 0], [0] * 30).finalise().status == "ok"


def test_further_dimensions_are_flattened_and_a_square_batch_is_no_exception() -> None:
    rows, groups, weights, _ = data(6, 6)
    flat = harvest.concept_direction(rows, groups, weights)
    deep = harvest.concept_direction(torch.from_numpy(rows).reshape(6, 2, 3), groups, weights)
    np.testing.assert_array_equal(deep.raw, flat.raw)


def test_tensors_with_gradients_read_only_and_foreign_arrays_and_lists_are_all_taken() -> None:
    rows, groups, weights, _ = data()
    exact = harvest.concept_direction(rows.astype(np.float64), groups, weights).raw
    locked = rows.copy()
    locked.setflags(write=False)
    with torch.inference_mode():
        inferred = torch.from_numpy(rows) * 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for states in (
            torch.from_numpy(rows).requires_grad_(),
            inferred,
            locked,
            rows[::-1][::-1],
            rows.astype(">f4"),
            np.asfortranarray(rows),
            rows.astype(np.longdouble),
            rows.tolist(),
        ):
            found = harvest.concept_direction(states, torch.from_numpy(groups), weights.tolist())
            np.testing.assert_array_equal(found.raw, exact)


def test_unknown_groups_are_refused_by_row_or_counted() -> None:
    rows, groups, _, _ = data()
    groups = groups.copy()
    groups[[5, 9]] = 2, -1
    with pytest.raises(RequestError, match=r"groups: row 5 has 2; allowed are 0 for A and 1 for B"):
        harvest.concept_direction(rows, groups)
    found = harvest.concept_direction(rows, groups, unknown="count")
    assert (found.counts.unknown, found.counts.rows) == (2, (30, 28))
    for counting in (
        harvest.ConceptAccumulator("mean_difference", 5, unknown="count").update(rows, groups),
        harvest.ConceptAccumulator("mean_difference", 5).update(rows, groups, unknown="count"),
    ):
        np.testing.assert_array_equal(counting.finalise().raw, found.raw)


def test_rows_that_are_no_numbers_are_counted_by_group_in_every_mode() -> None:
    rows, groups, weights, _ = data()
    bad = np.r_[rows, [[NAN] * 5, [0, np.inf, 0, 0, -np.inf], [NAN] * 5]].astype(np.float32)
    for mode in MODES:
        if mode == "paired_rejection":
            continue
        clean = harvest.concept_direction(rows, groups, weights, mode=mode)
        found = harvest.concept_direction(bad, [*groups, 0, 1, 1], [*weights, 1, 1, 1], mode=mode)
        assert found.counts.excluded == (1, 2)
        np.testing.assert_allclose(found.raw, np.asarray(clean.raw), rtol=1e-12)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"weights": [1, -1]}, r"weights: row 1 has -1.0; allowed are finite numbers of at least 0"),
    ({"weights": [NAN, 1]}, "weights: row 0 has nan"),
    ({"weights": [1]}, r"weights: shape \(1,\); allowed is \(2,\)"),
    ({"weights": ["heavy", "light"]}, "weights: .*allowed are finite numbers"),
    ({"groups": [0.9, 1]}, "groups: float64; allowed are whole numbers"),
    ({"groups": [True, False]}, "groups: bool; allowed are whole numbers"),
    ({"groups": [0]}, r"groups: shape \(1,\); allowed is \(2,\)"),
    ({"groups": [[0], [1]]}, "groups: shape"),
    ({"pairs": [1]}, "pairs: 1 keys; allowed are 2"),
    ({"pairs": [None, 1]}, "pairs: row 0 has None"),
    ({"pairs": [0.5, 1]}, "pairs: row 0 has 0.5"),
    ({"pairs": "ab"}, "pairs = 'ab'"),
    ({"mode": "median"}, "mode = 'median': allowed are mean_difference"),
    ({"mode": "paired_rejection"}, "pairs: needed by mode 'paired_rejection'"),
    ({"unknown": "skip"}, "unknown = 'skip': allowed are error, count"),
    ({"unmatched": "skip"}, "unmatched = 'skip': allowed are error, count"),
    ({"states": [1.0, 2.0]}, r"states: shape \(2,\); allowed are \[n, d\]"),
    ({"states": np.ones((2, 2), np.int64)}, "states: int64; allowed are floating-point"),
    ({"states": torch.ones(2, 2, dtype=torch.int32)}, r"states: torch.int32; allowed are floating-point"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_what_is_in_doubt_is_refused_in_one_line(changed: dict[str, Any], message: str) -> None:
    asked = {"states": [[1.0, 2.0], [3.0, 5.0]], "groups": [0, 1], **changed}
    with pytest.raises(RequestError, match=message) as caught:
        harvest.concept_direction(**asked)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value).splitlines()) == 1


def test_widths_and_modes_are_fixed_from_the_start() -> None:
    begun = harvest.ConceptAccumulator("mean_difference", 3)
    with pytest.raises(RequestError, match="rows of 2 values; allowed are 3"):
        begun.update(np.ones((1, 2)), [0])
    with pytest.raises(
        RequestError, match="merge: mean_difference of width 4 does not go with mean_difference of width 3"
    ):
        begun.merge(harvest.ConceptAccumulator("mean_difference", 4))
    with pytest.raises(RequestError, match="merge: pca"):
        begun.merge(harvest.ConceptAccumulator("pca", 3))
    for dim in (0, -1, True, 2.0):
        with pytest.raises(RequestError, match="dim = "):
            harvest.ConceptAccumulator("pca", dim)  # type: ignore[arg-type]


def test_a_refused_block_changes_nothing() -> None:
    rows, groups, _, pairs = data()
    begun = harvest.ConceptAccumulator("paired_rejection", 5).update(rows, groups, pairs=pairs)
    before = begun.finalise()
    with pytest.raises(RequestError, match="pair 'pair 0': two examples of group A"):
        begun.update(rows[:1], [0], pairs=["pair 0"])  # the same block again
    np.testing.assert_array_equal(begun.finalise().raw, before.raw)


def test_the_repr_tells_the_essentials_in_a_line_and_arrays_cannot_be_written() -> None:
    rows, groups, _, _ = data()
    found = harvest.concept_direction(rows, groups)
    assert repr(found) == f"Direction(mean_difference: norm {found.norm:.4g}, A 30 rows, B 30)"
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(found.vector)[0] = 0
    assert found.auroc is None
    card = found.card()
    assert (card["counts"]["rows"], card["evaluation"]) == ((30, 30), None)
