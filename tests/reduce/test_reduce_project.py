"""States along their context, against the formula written out; blocks may be cut anywhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harvest.reduce.project import Projection, along


def written_out(s: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.array([sum(a * b for a, b in zip(s, c)) / sum(b * b for b in c) * b for b in c])


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 9), st.integers(1, 5), st.integers(0, 2**31), st.lists(st.integers(0, 18), max_size=4))
def test_rows_come_in_twos_wherever_blocks_are_cut(count: int, width: int, seed: int, cuts: list[int]) -> None:
    random = np.random.default_rng(seed)
    rows, first = random.normal(size=(2 * count, width)), random.random(count) < 0.5
    bounds = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    whole = Projection(width, first)
    found = [
        block["projection"]
        for start, stop in itertools.pairwise(bounds)
        for block in whole.update(torch.from_numpy(rows[start:stop]), np.arange(start, stop) // 2)
    ]
    assert list(whole.finish()) == []
    states = np.concatenate([np.zeros((0, width)), *found])
    assert states.shape == (count, width)
    for i in range(count):
        c, s = rows[2 * i : 2 * i + 2] if first[i] else rows[2 * i : 2 * i + 2][::-1]
        expected = written_out(s, c)
        assert np.abs(states[i] - expected).max() <= 1e-12 * (np.abs(s).max() + np.abs(expected).max())


@pytest.mark.parametrize("size", [1e-160, 1e-9, 1.0, 1e160])
def test_a_small_or_a_large_context_has_a_direction_all_the_same(size: float) -> None:
    s, c = np.array([[3.0, 1.0, -2.0]]), np.array([[1.0, 1.0, 0.0]]) * size
    assert np.abs(along(s, c) - np.array([[2.0, 2.0, 0.0]])).max() <= 1e-14


def test_a_context_of_zeros_or_with_a_nan_gives_no_state() -> None:
    s = np.ones((3, 2))
    found = along(s, np.array([[0.0, 0.0], [np.nan, 1.0], [2.0, 0.0]]))
    assert np.isnan(found[:2]).all()
    assert found[2].tolist() == [1.0, 0.0]
