"""Directions out of the examples: numpy.linalg on full matrices, scikit-learn and the definitions themselves judge."""

from __future__ import annotations

import builtins
import re
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.covariance import ledoit_wolf as reference_shrinkage
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

import harvest
from harvest.errors import RequestError
from harvest.reduce.direction import EXAMPLES
from harvest.reduce.examples import Examples, ready
from harvest.reduce.labels import as_rows, make_labels
from harvest.reduce.logistic import STRENGTHS, fold_indices


def data(n: int = 200, width: int = 8, seed: int = 0, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Correlated rows with two massive columns, groups of unequal size."""
    generator = np.random.default_rng(seed)
    groups = (generator.random(n) < 0.4).astype(np.int64)
    rows = generator.normal(size=(n, width)) @ generator.normal(size=(width, width))
    rows += np.outer(groups == 0, generator.normal(size=width)) * scale
    rows[:, [0, 3]] += 300
    return rows, groups


def as_examples(rows: Any, groups: Any, weights: Any = None, pairs: Any = None, unit: Any = None) -> Examples:
    return ready(as_rows(rows), make_labels(groups, weights, pairs, rows=len(rows)), unit)


def parallel(found: Any, exact: np.ndarray, tolerance: float = 1e-8) -> None:
    """The same direction, sign included."""
    assert found.status == "ok"
    assert np.linalg.norm(found.vector - exact / np.linalg.norm(exact)) < tolerance


def group_means(rows: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a, b = (np.average(rows[groups == g], axis=0, weights=weights[groups == g]) for g in (0, 1))
    return a, b


@pytest.mark.parametrize("n", [200, 6], ids=["many rows", "fewer rows than columns"])
@pytest.mark.parametrize("weighted", [False, True])
def test_leace_is_the_projection_of_the_paper_on_full_matrices(n: int, weighted: bool) -> None:
    """P = W^+ U U^T W with W = C^(-1/2), U a basis of the range of W times the cross-covariance with the group."""
    rows, groups = data(n, seed=1)
    groups[:2] = 0, 1
    weights = np.random.default_rng(2).random(n) + 0.1 if weighted else np.ones(n)
    found = harvest.concept_direction(rows, groups, weights, mode="leace")
    share = weights / weights.sum()
    mean = share @ rows
    covariance = (rows - mean).T @ np.diag(share) @ (rows - mean)
    target = (groups == 0) - share @ (groups == 0)
    values, vectors = np.linalg.eigh(covariance)
    kept = values > values.max() * max(rows.shape) * np.finfo(float).eps
    values, vectors = values[kept], vectors[:, kept]
    whiten, back = vectors / np.sqrt(values) @ vectors.T, vectors * np.sqrt(values) @ vectors.T
    u = whiten @ ((rows - mean).T @ (share * target))
    u /= np.linalg.norm(u)
    projection = back @ np.outer(u, u) @ whiten
    assert np.linalg.norm(found.eraser.matrix - projection) < 1e-8 * np.linalg.norm(projection)
    parallel(found, back @ u)
    np.testing.assert_allclose(found.eraser.mean, mean, rtol=1e-12)


def test_what_leace_erases_no_linear_classifier_finds() -> None:
    rows, groups = data(seed=3, scale=2)
    weights = np.random.default_rng(4).random(len(rows))
    found = harvest.concept_direction(rows.astype(np.float32), groups, weights, mode="leace")
    assert found.eraser is not None
    erased = found.eraser(rows.astype(np.float32))
    before, after = (np.subtract(*group_means(x, groups, weights)) for x in (rows, erased))
    assert np.linalg.norm(after) < 1e-9 * np.linalg.norm(before)
    assert np.linalg.matrix_rank(found.eraser.matrix) == 1
    np.testing.assert_allclose(found.eraser(erased), erased, atol=1e-8)
    score = LogisticRegression(C=1e3, tol=1e-10).fit(StandardScaler().fit_transform(erased), groups, weights)
    assert np.abs(score.coef_).max() < 1e-3


def test_whitened_solves_the_covariance_within_groups_shrunk_as_ledoit_and_wolf_say() -> None:
    rows, groups = data(seed=5)
    found = harvest.concept_direction(rows, groups, mode="whitened")
    a, b = group_means(rows, groups, np.ones(len(rows)))
    away = rows - np.where((groups == 0)[:, None], a, b)
    shrunk, shrinkage = reference_shrinkage(away, assume_centered=True)
    assert found.fit["shrinkage"] == pytest.approx(shrinkage, rel=1e-9)
    parallel(found, np.linalg.inv(shrunk) @ (a - b))
    # The distance of the means along it is its length, whatever the matrix
    assert found.norm == pytest.approx(np.asarray(found.vector) @ (a - b), rel=1e-10)
    assert found.midpoint == pytest.approx(np.asarray(found.vector) @ (a + b) / 2, rel=1e-10)


def test_whitened_weights_are_repetitions() -> None:
    """Doubling every weight changes nothing; leaving a row out is weight 0."""
    rows, groups = data(seed=6)
    weights = np.random.default_rng(7).integers(0, 3, len(rows)).astype(float)
    found = harvest.concept_direction(rows, groups, weights, mode="whitened")
    parallel(harvest.concept_direction(rows, groups, weights * 2, mode="whitened"), np.asarray(found.vector), 1e-10)
    left, kept = rows[weights > 0], weights > 0
    parallel(
        harvest.concept_direction(left, groups[kept], weights[kept], mode="whitened"), np.asarray(found.vector), 1e-10
    )


def test_whitened_beats_the_mean_difference_where_noise_lies_along_it() -> None:
    generator = np.random.default_rng(8)
    groups = np.arange(2000) % 2
    rows = generator.normal(size=(2000, 6)) * [10, 1, 1, 1, 1, 1] + np.outer(groups == 0, [3, 1, 0, 0, 0, 0])
    truth = np.array([3 / 100, 1, 0, 0, 0, 0])
    found = harvest.concept_direction(rows, groups, mode="whitened")
    assert np.asarray(found.vector) @ truth / np.linalg.norm(truth) > 0.97
    assert np.asarray(harvest.concept_direction(rows, groups).vector) @ truth / np.linalg.norm(truth) < 0.5


@pytest.mark.parametrize(("n", "width"), [(200, 8), (8, 20)])
def test_pca_of_pairs_is_the_first_singular_vector_of_their_differences(n: int, width: int) -> None:
    generator = np.random.default_rng(9)
    a, b = generator.normal(size=(n, width)) + 0.7, generator.normal(size=(n, width))
    weights = generator.random(2 * n)
    order = generator.permutation(2 * n)
    rows, groups, pairs = np.r_[a, b][order], np.repeat([0, 1], n)[order], np.tile(np.arange(n), 2)[order]
    found = harvest.concept_direction(rows, groups, weights[order], pairs, "pca")
    share = (weights[:n] + weights[n:]) / 2
    matrix = (a - b).T @ np.diag(share / share.sum()) @ (a - b)
    values, vectors = np.linalg.eigh(matrix)
    gap = np.subtract(*group_means(np.r_[a, b], np.repeat([0, 1], n), weights))
    parallel(found, vectors[:, -1] * np.sign(vectors[:, -1] @ gap))
    assert found.fit["share"] == pytest.approx(values[-1] / values.sum(), rel=1e-9)


def test_pca_without_pairs_is_that_of_rows_around_the_middle_of_the_means_with_equal_halves() -> None:
    rows, groups = data(seed=10, scale=4)
    rows[:, [0, 3]] -= 300
    weights = np.random.default_rng(11).random(len(rows))
    a, b = group_means(rows, groups, weights)
    matrix = np.zeros((8, 8))
    for group in (0, 1):
        away = rows[groups == group] - (a + b) / 2
        matrix += (away.T * weights[groups == group]) @ away / weights[groups == group].sum() / 2
    vector = np.linalg.eigh(matrix)[1][:, -1]
    parallel(harvest.concept_direction(rows, groups, weights, mode="pca"), vector * np.sign(vector @ (a - b)))


@pytest.mark.parametrize("pairs", [None, "order"])
def test_pca_points_to_a_keeps_the_scale_and_turns_with_swapped_labels(pairs: str | None) -> None:
    """Positive rows at +2u, negative at -2u, noise 0.1: the length is that of the mean difference, about 4."""
    generator = np.random.default_rng(12)
    groups = np.repeat([0, 1], 20)
    rows = generator.normal(size=(40, 8)) * 0.1
    rows[:, 0] += np.where(groups == 0, 2, -2)
    found = harvest.concept_direction(rows, groups, pairs=pairs, mode="pca")
    assert np.asarray(found.vector)[0] > 0.99
    assert found.norm == pytest.approx(4, abs=0.2)
    swapped = harvest.concept_direction(rows, 1 - groups, pairs=pairs, mode="pca")
    np.testing.assert_allclose(swapped.raw, -np.asarray(found.raw), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("width", [12, 60], ids=["more rows", "more columns"])
def test_logistic_is_scikit_learns_own_result_for_the_chosen_strength(width: int) -> None:
    rows, groups = data(120, width, seed=13, scale=0.5)
    weights = np.random.default_rng(14).random(120) + 0.2
    found = harvest.concept_direction(rows, groups, weights, mode="logistic")
    assert found.fit["C"] in STRENGTHS
    scaler = StandardScaler().fit(rows, sample_weight=weights)
    model = LogisticRegression(C=found.fit["C"], tol=1e-10, max_iter=10_000)
    model.fit(scaler.transform(rows), groups == 0, sample_weight=weights)
    parallel(found, model.coef_[0] / scaler.scale_, 1e-6)
    assert found.fit["intercept"] == pytest.approx(
        model.intercept_[0] - model.coef_[0] / scaler.scale_ @ scaler.mean_, abs=1e-5
    )


def test_logistic_chooses_the_strength_that_judges_whole_pairs_best() -> None:
    """Every example is there eight times over: split by rows, the weakest penalty would seem best."""
    generator = np.random.default_rng(15)
    groups = np.repeat(np.arange(40) % 2, 8)
    rows = np.repeat(generator.normal(size=(40, 60)), 8, axis=0) + 0.01 * generator.normal(size=(320, 60))
    unit = np.repeat(np.arange(40), 8)
    from harvest.reduce.fitted import fit

    whole, split = (fit(as_examples(rows, groups, unit=u), "logistic") for u in (unit, np.arange(320)))
    assert whole.fit["C"] < split.fit["C"]


def test_folds_hold_both_groups_and_never_split_a_unit() -> None:
    generator = np.random.default_rng(16)
    unit = np.sort(generator.integers(0, 30, 200))
    groups = (unit % 7 == 0).astype(np.int64)  # five rare units
    folds = list(fold_indices(as_examples(generator.normal(size=(200, 2)), groups, unit=unit), 5))
    assert len(folds) == 5
    assert sorted(np.concatenate([judge for _, judge in folds]).tolist()) == list(range(200))
    for others, judge in folds:
        assert not set(unit[others]) & set(unit[judge])
        assert set(groups[others]) == set(groups[judge]) == {0, 1}
    assert not list(fold_indices(as_examples(np.ones((3, 1)), [0, 0, 1]), 5))
    assert len(list(fold_indices(as_examples(np.ones((4, 1)), [0, 0, 1, 1]), 5))) == 2
    assert not list(fold_indices(as_examples(np.ones((4, 1)), [0, 0, 1, 1], [1, 1, 1, 0]), 5))


def test_without_scikit_learn_logistic_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, groups = data(20)
    found = builtins.__import__

    def no_sklearn(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("sklearn"):
            raise ImportError(name)
        return found(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", no_sklearn)
    with pytest.raises(RequestError, match=r"mode = 'logistic': needs scikit-learn.*harvest\[logistic\]"):
        harvest.concept_direction(rows, groups, mode="logistic")
    assert harvest.concept_direction(rows, groups, mode="whitened").status == "ok"


@pytest.mark.parametrize("mode", EXAMPLES)
def test_results_are_the_same_bits_each_time(mode: str) -> None:
    rows, groups = data(60)
    one, two = (harvest.concept_direction(rows, groups, mode=mode) for _ in range(2))
    assert np.asarray(one.raw).tobytes() == np.asarray(two.raw).tobytes()


@pytest.mark.parametrize("mode", EXAMPLES)
@pytest.mark.parametrize(
    ("rows", "groups", "weights", "why"),
    [
        ([[1.0, 2], [3, 4]], [0, 0], None, r"group B is empty \(A 2 rows, B 0"),
        ([[1.0, 2], [3, 4]], [0, 1], [1, 0], "group B has no weight"),
        ([[1.0, 2], [3, 4], [1, 2], [3, 4]], [0, 0, 1, 1], None, "no difference between the groups"),
        (np.zeros((0, 2)), [], None, "group A is empty"),
    ],
)
def test_an_undefined_direction_says_why_in_every_mode(
    mode: str, rows: Any, groups: Any, weights: Any, why: str
) -> None:
    found = harvest.concept_direction(rows, groups, weights, mode=mode)
    assert found.vector is None
    assert re.search(why, found.status)


@pytest.mark.parametrize(
    ("mode", "rows", "groups", "pairs", "why"),
    [
        ("whitened", [[1.0, 2], [3, 4]], [0, 1], None, "no spread within the groups"),
        ("logistic", [[1.0, 2], [3, 4], [5, 5]], [0, 1, 1], None, "too few examples to choose a regularisation"),
        ("pca", [[1.0, 0], [0, 0], [0, 1], [0, 0]], [0, 1, 0, 1], [1, 1, 2, 2], "the same variance"),
        (
            "pca",
            [[9.0, 1], [0, 0], [-9, 1], [0, 0], [9, 1], [0, 0], [-9, 1], [0, 0]],
            [0, 1] * 4,
            [1, 1, 2, 2, 3, 3, 4, 4],
            "the same mean along it",
        ),
        ("pca", [[1.0, 0], [0, 0]], [0, 1], [1, 2], "no complete pair"),
    ],
)
def test_each_mode_has_its_own_ways_to_be_undefined(mode: str, rows: Any, groups: Any, pairs: Any, why: str) -> None:
    found = harvest.concept_direction(rows, groups, pairs=pairs, mode=mode, unmatched="count")
    assert found.vector is None
    assert why in found.status


def test_pca_refuses_rows_without_a_partner_unless_they_are_counted() -> None:
    rows, groups = data(21)
    groups = np.arange(21) % 2
    with pytest.raises(RequestError, match="1 rows of A and 0 of B have no partner"):
        harvest.concept_direction(rows, groups, pairs="order", mode="pca")
    found = harvest.concept_direction(rows, groups, pairs="order", mode="pca", unmatched="count")
    assert (found.counts.pairs, found.counts.unmatched) == (10, (1, 0))


def test_a_pair_with_an_unusable_member_is_dropped_whole_from_the_examples_too() -> None:
    rows, _ = data(20)
    rows[7, 1] = np.nan
    groups, pairs = np.arange(20) % 2, np.arange(20) // 2
    kept = np.delete(np.arange(20), [6, 7])
    found = ready(torch.from_numpy(rows), make_labels(groups, None, pairs, rows=20))
    np.testing.assert_array_equal(found.states, rows[kept])
    np.testing.assert_array_equal(found.states[found.a], rows[kept[::2]])
    np.testing.assert_array_equal(found.states[found.b], rows[kept[1::2]])
    assert (found.counts.pairs, found.counts.dropped_pairs, found.counts.excluded) == (9, 1, (0, 1))


@pytest.mark.parametrize("mode", EXAMPLES)
def test_the_bits_do_not_depend_on_the_number_of_threads(mode: str) -> None:
    rows, groups = data(1500, 300, seed=17)
    found = []
    for threads in (1, 2):
        with threadpool_limits(limits=threads):
            found.append(np.asarray(harvest.concept_direction(rows, groups, mode=mode).raw).tobytes())
    assert found[0] == found[1]
