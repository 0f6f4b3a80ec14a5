"""Pooling over spans: numpy in float64 is the judge, and no dtype of the rows may spoil the sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harvest.errors import RequestError
from harvest.model.pooling import span_pool

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@settings(deadline=None)
@given(st.data(), st.integers(1, 12), st.integers(1, 4), st.sampled_from(DTYPES), st.sampled_from(["mean", "last"]))
def test_every_span_is_what_numpy_makes_of_its_rows(
    data: st.DataObject, length: int, width: int, dtype: torch.dtype, mode: str
) -> None:
    hidden = torch.randn(length, width, generator=torch.Generator().manual_seed(length)).mul(1000).to(dtype)
    edges = st.tuples(st.integers(0, length), st.integers(0, length)).filter(lambda pair: pair[0] != pair[1])
    spans = [tuple(sorted(pair)) for pair in data.draw(st.lists(edges, max_size=4))]
    rows = hidden.double().numpy()
    expected = [rows[start:stop].mean(0) if mode == "mean" else rows[stop - 1] for start, stop in spans]
    pooled = span_pool(hidden, spans, mode)
    assert pooled.shape == (len(spans), width)
    assert pooled.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    np.testing.assert_allclose(pooled.numpy(), np.reshape(expected, (len(spans), width)), rtol=1e-6, atol=1e-6)


def test_half_precision_rows_neither_overflow_nor_stall() -> None:  # sums beyond 65504; 1 + 4096 is 4096 in bfloat16
    large = torch.full((1000, 2), 100.0, dtype=torch.float16)
    assert span_pool(large, [(0, 1000)]).tolist() == [[100.0, 100.0]]
    many = torch.full((4096, 2), 1.0, dtype=torch.bfloat16)
    many[::2] += 2**-7
    assert span_pool(many, [(0, 4096)]).tolist() == [[1 + 2**-8, 1 + 2**-8]]
    offset = torch.full((3000, 1), 2.0**24)
    offset[0] += 3000  # a running sum in float32 would round it away
    assert float(span_pool(offset, [(0, 3000)])) == pytest.approx(2.0**24 + 1, abs=1)


def test_rows_outside_a_span_do_not_matter_even_if_they_are_no_numbers() -> None:
    hidden = torch.tensor([[float("nan")], [1.0], [3.0], [float("inf")]])
    assert span_pool(hidden, [(1, 3)]).tolist() == [[2.0]]


@pytest.mark.parametrize("mode", ["mean", "last"])
def test_gradients_reach_the_rows_of_the_span_and_no_others(mode: str) -> None:
    hidden = torch.zeros(4, 2, requires_grad=True)
    span_pool(hidden, [(1, 3)], mode).sum().backward()
    assert hidden.grad is not None
    assert (hidden.grad[:, 0] != 0).tolist() == [False, mode == "mean", True, False]


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([(0, 5)], r"span = \(0, 5\): the sequence has 4 tokens"),
        ([(-1, 2)], r"span = \(-1, 2\)"),
        ([(3, 2)], r"span = \(3, 2\)"),
        ([(0, 1), (2, 2)], r"span = \(2, 2\): it is empty"),
        ([(0.0, 1.0)], r"span = \(0\.0, 1\.0\): allowed is \(start, stop\)"),
        ([(0, 1, 2)], r"allowed is \(start, stop\)"),
        ([3], r"span = 3: allowed is \(start, stop\)"),
    ],
)
def test_a_bad_span_is_refused_by_its_value(spans: Any, says: str) -> None:
    for mode in ("mean", "last"):
        with pytest.raises(RequestError, match=says):
            span_pool(torch.zeros(4, 2), spans, mode)


def test_an_unknown_mode_and_anything_but_rows_of_floats_are_refused() -> None:
    with pytest.raises(RequestError, match="mode = 'max': allowed are 'mean', 'last'"):
        span_pool(torch.zeros(4, 2), [(0, 1)], "max")
    for hidden in (torch.zeros(4), torch.zeros(1, 4, 2), torch.zeros(4, 2, dtype=torch.long)):
        with pytest.raises(RequestError, match=r"allowed is \[seq, d\] of floats"):
            span_pool(hidden, [(0, 1)])
