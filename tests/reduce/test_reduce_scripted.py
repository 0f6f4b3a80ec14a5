"""Loops as TorchScript: the same bits as the loops themselves, whoever works beside them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from harvest.reduce.health import row_norms
from harvest.reduce.scripted import scripted
from harvest.reduce.sums import sums_of, visit_blocks

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CPU = torch.device("cpu")


def same(first: Any, second: Any) -> bool:
    return all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gap", [1, 7])
@pytest.mark.parametrize("step", [1, 56, 1000])
@pytest.mark.parametrize("centre", [True, False])
def test_a_scripted_loop_has_the_bits_of_the_function(dtype: torch.dtype, gap: int, step: int, centre: bool) -> None:
    rows = torch.randn((300, 24), generator=torch.Generator().manual_seed(gap)).to(dtype)
    index = torch.arange(300)[torch.arange(300) % gap != gap - 1] if gap > 1 else torch.arange(300)
    assert scripted(visit_blocks, CPU) is not visit_blocks
    for _ in range(4):  # TorchScript looks at the first calls and may do later ones in another way
        assert same(scripted(visit_blocks, CPU)(rows, index, step, centre), visit_blocks(rows, index, step, centre))
        assert torch.equal(scripted(row_norms, CPU)(rows, step), row_norms(rows, step))
    sums = visit_blocks(rows, index, len(index), centre)[0]
    np.testing.assert_allclose(sums[0] / len(index), rows[index].double().numpy().mean(axis=0), rtol=1e-13)


def test_names_reduced_side_by_side_have_the_bits_of_one_after_the_other() -> None:
    names = [torch.randn((500, 96), generator=torch.Generator().manual_seed(i)) * 10**i for i in range(12)]
    index = np.flatnonzero(np.arange(500) % 11)
    alone = [sums_of(rows, index) for rows in names]
    with ThreadPoolExecutor(6) as team:
        beside = list(team.map(lambda rows: sums_of(rows, index), names * 5))
    for one, two in zip(alone * 5, beside, strict=True):
        assert one.mean.tobytes() == two.mean.tobytes()
        assert one.m2.tobytes() == two.m2.tobytes()
        assert (one.norm_sum, one.norm_squares, one.low, one.high) == (
            two.norm_sum,
            two.norm_squares,
            two.low,
            two.high,
        )
