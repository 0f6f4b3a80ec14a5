"""Sums of values of 16 bits against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harvest.reduce.sums import centred, sums_of

SHORT = [torch.bfloat16, torch.float16]


def exact(column: torch.Tensor) -> tuple[Fraction, Fraction]:
    """Mean and summed squared deviations, without any rounding."""
    values = [Fraction(value) for value in column.double().tolist()]
    mean = sum(values, Fraction(0)) / len(values)
    return mean, sum(((value - mean) ** 2 for value in values), Fraction(0))


def require_exact(rows: torch.Tensor, tolerance: float) -> None:
    sums = sums_of(rows, np.arange(len(rows)))
    for column in range(rows.shape[1]):
        mean, m2 = exact(rows[:, column])
        assert abs(Fraction(float(sums.mean[column])) - mean) <= Fraction(tolerance) * abs(mean)
        assert abs(Fraction(float(sums.m2[column])) - m2) <= Fraction(tolerance) * m2


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize(("offset", "scale"), [(0, 1), (1000, 0.5), (3000, 8), (1, 1e-3), (0, 1e-4)])
def test_deviations_of_short_values_lose_no_digit_to_a_common_offset(
    dtype: torch.dtype, offset: float, scale: float
) -> None:
    generator = torch.Generator().manual_seed(7)
    rows = (torch.randn((400, 5), generator=generator) * scale + offset).to(dtype)
    rows[5, 3] = 3000  # a massive activation in one row of one column
    require_exact(rows, 1e-15)  # a handful of roundings of 2^-53 each


@pytest.mark.parametrize("dtype", SHORT)
def test_a_column_that_is_the_same_everywhere_has_no_deviation_at_all(dtype: torch.dtype) -> None:
    rows = torch.tensor([0.1, -1234.5, 3e-5]).to(dtype).expand(5000, 3).contiguous()
    assert sums_of(rows, np.arange(5000)).m2.tolist() == [0.0, 0.0, 0.0]
    require_exact(rows[:300], 1e-15)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=200), st.sampled_from(SHORT))
def test_any_bits_that_are_finite_sum_to_what_they_are(bits: list[int], dtype: torch.dtype) -> None:
    """Whatever a column spans: 8n of a float64's roundings at most where it spans more than 2^9."""
    values = torch.tensor(bits, dtype=torch.int32).to(torch.uint16).view(dtype)
    values = values[torch.isfinite(values)].reshape(-1, 1)
    if len(values):
        sums = sums_of(values, np.arange(len(values)))
        mean, m2 = exact(values[:, 0])
        largest = max(abs(Fraction(value)) for value in values.double().flatten().tolist())
        assert abs(Fraction(float(sums.mean[0])) - mean) <= Fraction(2.0**-45) * largest
        assert abs(Fraction(float(sums.m2[0])) - m2) <= Fraction(8 * len(values) * 2.0**-50) * m2


def test_both_products_keep_what_plain_rounding_would_lose() -> None:
    """Three values of 2^26 + 1, as a sum of squares and a sum: plain float64 makes a deviation of them."""
    value, n = float(2**26 + 1), 3
    sums, squares = np.array([n * value]), np.array([n * value**2])
    plain = squares - sums**2 / n
    exactly = Fraction(float(squares[0])) - Fraction(n * value) ** 2 / n
    mean, m2 = centred(sums, squares, n)
    assert mean.tolist() == [value]
    assert m2[0] == pytest.approx(max(float(exactly), 0.0), abs=1e-30)
    assert plain[0] != m2[0]
