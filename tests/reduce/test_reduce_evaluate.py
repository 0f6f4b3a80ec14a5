"""Held-out figures: scikit-learn, counting by hand and repeated sampling judge; nothing sees what it must not see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

import harvest
from harvest.reduce.compare import best_name, cosines, cross_validated, refit, shuffled, shuffled_control
from harvest.reduce.direction import MODES
from harvest.reduce.evaluate import LEAST, Evaluation, auroc, evaluate
from harvest.reduce.examples import Examples, ready
from harvest.reduce.labels import as_rows, make_labels


def as_examples(rows: Any, groups: Any, pairs: Any = None, unit: Any = None) -> Examples:
    return ready(as_rows(rows), make_labels(groups, None, pairs, rows=len(rows)), unit)


def two_groups(n: int, apart: float, seed: int, width: int = 6) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    groups = np.arange(n) % 2
    rows = generator.normal(size=(n, width)) + 5
    rows[:, 0] += apart * (groups == 0)
    return rows, groups


def judged(rows: np.ndarray, groups: np.ndarray, unit: Any = None, **given_: Any) -> Evaluation:
    vector = given_.pop("vector", np.eye(rows.shape[1])[0])
    unit = np.arange(len(rows)) if unit is None else unit
    return evaluate(rows, groups, unit, vector=vector, midpoint=given_.pop("midpoint", 5.5), **given_)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1)), min_size=2, max_size=30))
def test_auroc_is_scikit_learns_ties_included_and_counts_pairs(values: list[tuple[int, int]]) -> None:
    along, group = np.array([v for v, _ in values], float), np.array([g for _, g in values])
    a, b = along[group == 0], along[group == 1]
    found = auroc(along, group)
    if not len(a) or not len(b):
        assert np.isnan(found)
        return
    assert found == pytest.approx(roc_auc_score(group == 0, along), abs=1e-12)
    assert found == pytest.approx(np.mean([(x > y) + (x == y) / 2 for x in a for y in b]), abs=1e-12)


def test_figures_are_their_definitions_at_a_large_offset() -> None:
    rows, groups = two_groups(400, 1.0, 1)
    rows += 3000
    found = judged(rows, groups, midpoint=3005.5)
    a, b = rows[groups == 0, 0], rows[groups == 1, 0]
    assert found.examples == (200, 200)
    assert found.accuracy.value == pytest.approx(((a > 3005.5).sum() + (b < 3005.5).sum()) / 400)
    pooled = np.sqrt((a.var(ddof=1) + b.var(ddof=1)) / 2)
    assert found.cohens_d.value == pytest.approx((a.mean() - b.mean()) / pooled, rel=1e-9)
    assert found.explained.value == pytest.approx(rows[:, 0].var() / rows.var(axis=0).sum(), rel=1e-9)
    assert found.auroc.value == pytest.approx(roc_auc_score(groups == 0, rows[:, 0]))
    assert found.reason is None


def test_a_constant_projection_has_an_auroc_of_a_half_and_no_effect_size() -> None:
    rows, groups = two_groups(40, 1.0, 2)
    rows[:, 0] = 5.5
    found = judged(rows, groups)
    assert (found.auroc.value, found.accuracy.value, found.explained.value) == (0.5, 0.5, 0.0)
    assert found.cohens_d.value is None


def test_intervals_are_seeded_hold_the_value_and_cover_the_truth_about_as_often_as_they_say() -> None:
    truth = 0.7602499389  # AUROC of two normals a standard deviation apart: Phi(1 / sqrt 2)
    inside = 0
    for seed in range(40):
        rows, groups = two_groups(120, 1.0, 100 + seed)
        found = judged(rows, groups).auroc
        assert found.low <= found.value <= found.high
        inside += found.low <= truth <= found.high
    assert 34 <= inside <= 40
    assert judged(rows, groups) == judged(rows, groups) != judged(rows, groups, seed=1)


def test_intervals_resample_whole_units() -> None:
    """Each document read at 20 places: the interval is that of the documents, not of 20 times as many."""
    rows, groups = two_groups(40, 1.0, 3)
    once = judged(rows, groups).auroc
    often = judged(np.repeat(rows, 20, axis=0), np.repeat(groups, 20), np.repeat(np.arange(40), 20)).auroc
    loose = judged(np.repeat(rows, 20, axis=0), np.repeat(groups, 20)).auroc
    assert often.value == pytest.approx(once.value)
    assert (often.low, often.high) == pytest.approx((once.low, once.high))
    assert loose.high - loose.low < (once.high - once.low) / 2


@pytest.mark.parametrize("short", [0, 1])
def test_too_few_of_a_group_give_no_figure_but_a_reason(short: int) -> None:
    rows, groups = two_groups(100, 1.0, 4)
    keep = np.flatnonzero((groups != short) | (np.cumsum(groups == short) < LEAST))
    found = judged(rows[keep], groups[keep])
    assert found.auroc.value is found.accuracy.value is found.cohens_d.value is found.explained.value is None
    assert f"too few held out: {'A 4, B 50' if short == 0 else 'A 50, B 4'}" in str(found.reason)
    one_document = judged(rows, groups, np.where(groups == short, 0, np.arange(100) + 1))
    assert "too few" in str(one_document.reason)


def test_an_undefined_direction_and_one_of_a_single_group_say_what_is_missing() -> None:
    rows, groups = two_groups(40, 1.0, 5)
    assert judged(rows, groups, vector=None).reason == "the direction is undefined"
    found = judged(rows, groups, midpoint=None)
    assert "no midpoint" in str(found.reason)
    assert found.accuracy.value is None
    assert found.auroc.value is not None


def test_a_direction_shows_its_evaluation() -> None:
    from dataclasses import replace

    rows, groups = two_groups(200, 2.0, 6)
    made = harvest.concept_direction(rows[:100], groups[:100])
    found = evaluate(rows[100:], groups[100:], np.arange(100), vector=made.vector, midpoint=made.midpoint)
    shown = replace(made, name="sentiment", evaluation=found)
    assert (shown.auroc, shown.accuracy) == (found.auroc.value, found.accuracy.value)
    assert (shown.cohens_d, shown.explained) == (found.cohens_d.value, found.explained.value)
    assert f"sentiment mean_difference: norm {made.norm:.4g}" in repr(shown)
    assert f"AUROC {found.auroc.value:.2f} [{found.auroc.low:.2f}, {found.auroc.high:.2f}]" in repr(shown)
    assert shown.card()["evaluation"]["auroc"]["value"] == found.auroc.value


def test_cosines_of_modes_leave_out_what_is_undefined() -> None:
    rows, groups = two_groups(100, 1.0, 7)
    found = {mode: harvest.concept_direction(rows, groups, mode=mode) for mode in ("mean_difference", "leace", "pca")}
    found["single_group"] = harvest.concept_direction(rows[:0], [], mode="single_group")
    agreement = cosines(found)
    assert agreement.keys() == {("mean_difference", "leace"), ("mean_difference", "pca"), ("leace", "pca")}
    assert agreement["mean_difference", "leace"] == pytest.approx(1)
    a, b = found["mean_difference"].vector, found["pca"].vector
    assert agreement["mean_difference", "pca"] == pytest.approx(float(np.asarray(a) @ np.asarray(b)))


@pytest.mark.parametrize("mode", MODES)
def test_a_direction_made_again_from_its_examples_is_itself(mode: str) -> None:
    rows, groups = two_groups(80, 1.0, 8)
    again = refit(as_examples(rows, groups, np.arange(80) // 2), mode)
    whole = harvest.concept_direction(rows, groups, pairs="order", mode=mode)
    np.testing.assert_allclose(again.raw, np.asarray(whole.raw), rtol=1e-9, atol=1e-12)


def test_the_best_name_is_where_unseen_training_examples_are_told_apart_best() -> None:
    """In 300 columns of noise every direction separates what it was made from: folds tell the concept from noise."""
    scores = {}
    for name, apart in (("residual.0", 0.0), ("residual.1", 1.0), ("residual.2", 3.0), ("residual.3", 3.0)):
        rows, groups = two_groups(120, apart, 9, width=300)
        assert auroc(rows @ np.asarray(harvest.concept_direction(rows, groups).vector), groups) > 0.95
        scores[name] = cross_validated(as_examples(rows, groups), "mean_difference")
    assert scores["residual.0"] == pytest.approx(0.5, abs=0.15)
    assert scores["residual.0"] < scores["residual.1"] < scores["residual.2"] == scores["residual.3"]
    assert best_name(scores) == "residual.2"
    assert best_name({"residual.0": None}) is None
    assert cross_validated(as_examples(np.ones((2, 3)), [0, 1]), "mean_difference") is None


@pytest.mark.parametrize("mode", ["mean_difference", "whitened", "leace", "pca", "logistic"])
def test_shuffled_labels_land_at_a_half_where_true_ones_do_not(mode: str) -> None:
    rows, groups = two_groups(240, 2.0, 10)
    pairs = np.arange(240) // 2 if mode == "pca" else None
    training, held_out = (
        as_examples(rows[part], groups[part], None if pairs is None else pairs[part])
        for part in (slice(0, 160), slice(160, 240))
    )
    true = auroc(held_out.states @ np.asarray(refit(training, mode).vector), held_out.group)
    control = shuffled_control(training, held_out, mode)
    assert control is not None
    mean, error = control
    assert true > 0.8
    assert abs(mean - 0.5) < max(4 * error, 0.02)
    assert shuffled_control(training, held_out, mode) == control


@pytest.mark.parametrize("mode", ["single_group", "paired_rejection"])
def test_modes_that_lean_to_the_mean_of_all_rows_have_no_control(mode: str) -> None:
    """They tell the groups apart with any labels, as is shown here: a figure would look like a leak."""
    rows, groups = two_groups(240, 2.0, 10)
    training, held_out = (as_examples(rows[i : i + 120], groups[i : i + 120], np.arange(120) // 2) for i in (0, 120))
    assert shuffled_control(training, held_out, mode) is None
    random = np.random.default_rng(0)
    mixed = refit(training.take(np.arange(120), shuffled(training, random)), mode)
    assert auroc(held_out.states @ np.asarray(mixed.vector), held_out.group) > 0.6


def test_shuffling_turns_whole_pairs_and_keeps_the_size_of_groups() -> None:
    rows, groups = two_groups(100, 1.0, 11)
    random = np.random.default_rng(0)
    paired = as_examples(rows, groups, np.arange(100) // 2)
    turned = shuffled(paired, random)
    assert set((turned[::2] + turned[1::2]).tolist()) == {1}
    assert 10 < (turned[::2] == 1).sum() < 40
    mixed = paired.take(np.arange(100), turned)
    assert (mixed.group[mixed.a] == 0).all()
    assert (mixed.group[mixed.b] == 1).all()
    documents = as_examples(rows, np.repeat(groups[:20], 5), unit=np.repeat(np.arange(20), 5))
    dealt = shuffled(documents, random).reshape(20, 5)
    assert (dealt == dealt[:, :1]).all()
    assert dealt[:, 0].sum() == 10
    assert (dealt[:, 0] != groups[:20]).any()


def test_taking_examples_keeps_whole_pairs_only() -> None:
    rows, groups = two_groups(10, 1.0, 12)
    part = as_examples(rows, groups, np.arange(10) // 2).take(np.array([0, 2, 3, 5, 8, 9]))
    np.testing.assert_array_equal(part.states[part.a], rows[[2, 8]])
    np.testing.assert_array_equal(part.states[part.b], rows[[3, 9]])
