"""int8 rows: the error bound, ties to even, what has no scale of its own; numpy in float64 is the judge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from harvest.store.int8 import BLOCK_BYTES, codes_of, quantise, values_of

ROUNDING = 1e-6
"""Relative, of float32: of the scale, of the quotient and of the product."""


def stored(rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scales [n, 1], the rows as `quantise` leaves them)."""
    block = torch.from_numpy(rows.copy())
    scales = quantise(block)
    return codes_of(block, scales), scales[:, None], block


ROWS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=9),
    elements=st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False),
        st.floats(-3, 3, width=32),
        st.sampled_from([0.0, -0.0, 2.0**-149, -(2.0**-130), float(np.finfo(np.float32).max)]),
    ),
)


@settings(max_examples=400, deadline=None)
@given(ROWS)
def test_every_value_is_off_by_at_most_its_rows_largest_over_254(rows: np.ndarray) -> None:
    codes, scales, kept = stored(rows)
    read = values_of(codes, scales)
    largest = np.abs(rows.astype(np.float64)).max(axis=1, keepdims=True)
    error = np.abs(read.numpy().astype(np.float64) - rows)
    room = largest / 254 + ROUNDING * largest + 127 * 2.0**-149  # float32 has no smaller steps
    assert (error <= room).all(), (error / room).max()
    assert torch.isfinite(read).all()
    assert torch.equal(read.view(torch.int32), kept.view(torch.int32)), "what is reduced is what is read, to the bit"
    assert codes.dtype == torch.int8
    assert int(codes.min()) >= -127


@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_ordinary_rows_have_the_codes_that_float64_gives(rows: np.ndarray) -> None:
    rows = rows[np.abs(rows).max(axis=1) > 1e-30]
    codes, scales, _ = stored(rows)
    exact = np.abs(rows.astype(np.float64)).max(axis=1, keepdims=True) / 127
    np.testing.assert_allclose(scales.numpy(), exact, rtol=2e-7)
    quotient = rows / exact
    clear = np.abs(np.abs(quotient - np.trunc(quotient)) - 0.5) > 1e-4  # no tie within rounding
    np.testing.assert_array_equal(codes.numpy()[clear], np.rint(quotient)[clear])


def test_ties_go_to_even_codes() -> None:
    row = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], np.float32)
    codes, scales, _ = stored(row)
    assert scales.tolist() == [[1.0]]
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_value_that_is_no_finite_number_is_nan_throughout_and_alone(odd: float) -> None:
    rows = np.array([[1, 2, 3], [4, odd, 6], [0, 0, 0], [7, 8, 9]], np.float32)
    codes, scales, kept = stored(rows)
    read = values_of(codes, scales)
    assert torch.isnan(read[1]).all()
    assert torch.isnan(kept[1]).all()
    assert torch.isfinite(read[[0, 2, 3]]).all()
    assert codes[1].tolist() == [0, 0, 0]
    assert (read[2].tolist(), scales[2].tolist()) == ([0, 0, 0], [0])


def test_rows_beyond_one_block_are_all_done() -> None:
    rows = np.random.default_rng(0).normal(size=(BLOCK_BYTES // 400 + 77, 100)).astype(np.float32)
    codes, scales, _ = stored(rows)
    np.testing.assert_array_equal(scales[:, 0].numpy(), np.abs(rows).max(axis=1) / np.float32(127))
    np.testing.assert_array_equal(np.abs(codes.numpy()).max(axis=1), 127)
