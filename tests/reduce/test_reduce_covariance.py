"""The covariance is what numpy says of all rows at once, however they come; symmetric, and the same on any threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits

from harvest.reduce.base import Block, load_states, save_states
from harvest.reduce.covariance import BLOCK_VALUES, Covariance, CovarianceState, saved_bytes
from harvest.reduce.moments import Moments

COVARIANCE = Covariance()


def block(rows: torch.Tensor) -> Block:
    n = len(rows)
    special = np.arange(n) % 3 == 0
    return Block(rows=rows, special=special, document=np.zeros(n, np.int64), position=np.arange(n, dtype=np.int32))


def summed(*parts: torch.Tensor) -> CovarianceState:
    state = COVARIANCE.zero()
    for part in parts:
        state = COVARIANCE.update(state, block(part))
    return state


def bits(state: CovarianceState) -> tuple[int, bytes, bytes]:
    return state.rows, state.mean.tobytes(), state.products.tobytes()


def correlated(n: int, d: int, seed: int = 0) -> np.ndarray:
    """float64 [n, d] with every pair of columns related."""
    generator = np.random.default_rng(seed)
    return generator.normal(size=(n, d)) @ generator.normal(size=(d, d)) / d**0.5


def assert_matches_numpy(state: CovarianceState, rows: np.ndarray, rtol: float = 1e-10) -> None:
    """`rows` float64; the error is judged by the deviations of both columns, as that of a correlation."""
    found = COVARIANCE.finalise(state)
    good = rows[np.isfinite(rows).all(axis=1)]
    assert found.count == len(good)
    if not len(good):
        assert found.matrix.shape == (0, 0)
        return
    expected = np.atleast_2d(np.cov(good.T, bias=True))
    deviations = np.sqrt(np.diag(expected))
    assert (found.matrix.shape, found.matrix.dtype) == (expected.shape, np.float64)
    assert (np.abs(found.matrix - expected) <= rtol * np.outer(deviations, deviations) + 1e-300).all()
    np.testing.assert_allclose(found.mean, good.mean(axis=0), rtol=1e-12, atol=1e-13 * np.abs(good).max())
    assert np.array_equal(found.matrix, found.matrix.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_matches_numpy_on_the_exact_values_it_stores(dtype: torch.dtype) -> None:
    rows = torch.from_numpy(correlated(3000, 48) * 3 + 5).to(dtype)
    assert_matches_numpy(summed(rows[:1700], rows[1700:]), rows.double().numpy())


@pytest.mark.parametrize(("width", "rows"), [(1, 500), (300, 2 * BLOCK_VALUES // 300 + 17), (2000, 2100)])
def test_rows_of_many_blocks_match_numpy(width: int, rows: int) -> None:
    values = torch.from_numpy(correlated(rows, width).astype(np.float32))
    assert_matches_numpy(summed(values), values.double().numpy())


def test_a_large_offset_costs_no_digits_and_neither_do_blocks_around_different_means() -> None:
    """Judged around the offset, which float32 holds exactly, so that the judge has lost none either."""
    offset = np.full(16, 4096.0)
    steps = [correlated(400, 16, seed).astype(np.float32).astype(np.float64) for seed in range(6)]
    rows = [((part * 2**-10).round(6) + offset).astype(np.float32) for part in steps]
    around = np.concatenate(rows).astype(np.float64) - offset
    state = summed(*map(torch.from_numpy, rows))
    expected = np.cov(around.T, bias=True)
    assert np.abs(COVARIANCE.finalise(state).matrix - expected).max() <= 1e-10 * expected.max()
    apart = [
        torch.full((50, 2), float(at)) + torch.randn(50, 2, generator=torch.manual_seed(3)) for at in (-900, 0, 7e3)
    ]
    assert_matches_numpy(summed(*apart), torch.cat(apart).double().numpy())


def test_rows_that_are_not_finite_are_left_out_and_the_rest_is_that_of_moments() -> None:
    rows = torch.from_numpy(correlated(400, 6).astype(np.float32))
    rows[3, 1], rows[200, 0], rows[200, 5], rows[399, 2] = float("nan"), float("inf"), -float("inf"), float("inf")
    state, moments = summed(rows[:150], rows[150:]), Moments()
    assert_matches_numpy(state, rows.double().numpy())
    known, found = moments.finalise(moments.update(moments.zero(), block(rows))), COVARIANCE.finalise(state)
    assert found.count == known.count == 397
    np.testing.assert_allclose(np.diag(found.matrix), known.variance, rtol=1e-12)
    assert bits(summed(rows[3:4])) == bits(COVARIANCE.zero())


def test_values_whose_products_overflow_float32_do_not() -> None:
    rows = torch.tensor([[3e38, -3e38], [-3e38, 3e38], [3e38, 3e38]])
    assert_matches_numpy(summed(rows), rows.double().numpy())


VALUES = st.sampled_from([0.0, 1.0, -1.0, 3.5, 1e-3, 1000.0, 1000.5, -3000.0, 7.0, float("nan"), float("inf")])


@settings(max_examples=100, deadline=None)
@given(data=st.data(), width=st.integers(1, 5), n=st.integers(0, 24))
def test_any_partition_merged_in_any_order_and_grouping_matches_the_whole(
    data: st.DataObject, width: int, n: int
) -> None:
    rows = np.array(data.draw(st.lists(VALUES, min_size=n * width, max_size=n * width)), np.float32).reshape(n, width)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=5)))
    tensor = torch.from_numpy(rows)
    parts = data.draw(st.permutations([summed(tensor[a:b]) for a, b in zip([0, *cuts], [*cuts, n])]))
    while len(parts) > 1:
        at = data.draw(st.integers(0, len(parts) - 2))
        parts[at : at + 2] = [COVARIANCE.merge(parts[at], parts[at + 1])]
    exact = rows.astype(np.float64)
    assert_matches_numpy(parts[0], exact, 1e-9)
    assert_matches_numpy(summed(tensor), exact, 1e-9)


def test_zero_is_the_identity_and_arguments_stay_as_they_were() -> None:
    first, second, zero = summed(torch.randn(50, 7)), summed(torch.randn(30, 7)), COVARIANCE.zero()
    before = bits(first), bits(second)
    assert bits(COVARIANCE.merge(zero, first)) == bits(first) == bits(COVARIANCE.merge(first, zero))
    assert bits(COVARIANCE.update(first, block(torch.zeros(0, 7)))) == bits(first)
    rows = torch.randn(20, 7)
    assert bits(COVARIANCE.update(first, block(rows))) == bits(COVARIANCE.merge(first, summed(rows)))
    COVARIANCE.merge(first, second)
    COVARIANCE.finalise(first)
    assert before == (bits(first), bits(second))
    with pytest.raises(ValueError, match="width 7 and 3"):
        COVARIANCE.merge(first, summed(torch.randn(5, 3)))


def test_the_bits_are_the_same_on_one_thread_on_two_and_side_by_side_and_the_limit_is_put_back() -> None:
    rows = torch.from_numpy(correlated(3000, 400).astype(np.float32) + 3)
    found, before = set(), torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with threadpool_limits(limits=threads):
            known = threadpool_info()
            found.add(bits(summed(rows)))
            with ThreadPoolExecutor(3) as team:
                found.update(bits(state) for state in team.map(summed, [rows] * 5))
            assert threadpool_info() == known
    torch.set_num_threads(before)
    assert len(found) == 1


def test_a_saved_state_comes_back_to_the_bit_in_half_the_room() -> None:
    state = summed(torch.from_numpy(correlated(90, 33).astype(np.float32)))
    blob = save_states([(COVARIANCE, {"residual.3": state, "none": COVARIANCE.zero()})])
    loaded = dict(load_states(COVARIANCE, blob))
    assert {name: bits(one) for name, one in loaded.items()} == {
        "residual.3": bits(state),
        "none": bits(COVARIANCE.zero()),
    }
    assert sum(array.nbytes for array in COVARIANCE.arrays(state).values()) == saved_bytes(33) < 33 * 33 * 8
    with pytest.raises(ValueError, match="none of width 33"):
        COVARIANCE.from_arrays({**COVARIANCE.arrays(state), "upper": np.zeros(5)})
