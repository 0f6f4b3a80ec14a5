"""Pools of documents: float64 sums in row order, the same bits however the rows are cut into blocks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harvest.reduce import pool as pooling
from harvest.reduce.pool import DocumentPool

POOLS = ["mean", "last", "max"]


def pooled(rows: torch.Tensor, document: np.ndarray, cuts: list[int]) -> dict[str, np.ndarray]:
    """All documents, the rows given block by block."""
    made, found = DocumentPool(POOLS, rows.shape[1]), []
    edges = [0, *sorted(cut % (len(rows) + 1) for cut in cuts), len(rows)]
    for start, stop in itertools.pairwise(edges):
        found += made.update(rows[start:stop], document[start:stop])
    found += made.finish()
    return {
        pool: np.concatenate([np.empty((0, rows.shape[1]), np.float32), *(f[pool] for f in found)]) for pool in POOLS
    }


def by_hand(rows: torch.Tensor, document: np.ndarray) -> dict[str, np.ndarray]:
    out: dict[str, list[np.ndarray]] = {pool: [] for pool in POOLS}
    for number in np.unique(document):
        values = rows.double().numpy()[document == number]
        total = np.zeros(rows.shape[1])
        for row in values:
            total = total + row
        out["mean"].append(total / len(values))
        out["last"].append(values[-1])
        out["max"].append(values.max(axis=0))
    return {pool: np.array(found, np.float32).reshape(-1, rows.shape[1]) for pool, found in out.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@given(
    lengths=st.lists(st.sampled_from([1, 1, 2, 3, 7, 40, 90]), max_size=12),
    cuts=st.lists(st.integers(0, 10_000), max_size=4),
    piece=st.sampled_from([1, 5, 64, 100_000]),
    seed=st.integers(0, 5),
)
@settings(max_examples=40, deadline=None)
def test_any_blocks_give_the_sums_of_the_rows_one_after_the_other(
    dtype: torch.dtype, lengths: list[int], cuts: list[int], piece: int, seed: int
) -> None:
    document = np.repeat(np.arange(len(lengths)) * 3 + 2**40, lengths)
    rows = (torch.randn(len(document), 4, generator=torch.Generator().manual_seed(seed)) * 100).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooling, "PIECE_BYTES", piece * 4 * 8)
        found = pooled(rows, document, cuts)
    for pool, expected in by_hand(rows, document).items():
        assert found[pool].dtype == np.float32
        assert found[pool].tobytes() == expected.tobytes(), pool


def test_a_small_difference_between_large_values_survives() -> None:
    rows = torch.tensor([[2.0**24, 0.0], [1.0, 0.0], [-(2.0**24), 0.0], [1.0, 0.0]])  # float32 sums give 1 or 0
    assert pooled(rows, np.zeros(4, np.int64), [])["mean"].tolist() == [[0.5, 0.0]]


def test_what_is_no_number_stays_in_its_own_document_and_shows() -> None:
    rows = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [float("inf"), 3.0], [-float("inf"), 4.0], [5.0, 6.0]])
    document = np.array([0, 0, 1, 1, 2])
    found = pooled(rows, document, [1, 3])
    assert np.isnan(found["mean"][:2, 0]).all()
    assert np.isnan(found["max"][0, 0])
    assert found["max"][1].tolist() == [np.inf, 4.0]
    assert found["mean"][:, 1].tolist() == [1.5, 3.5, 6.0]
    assert found["last"][2].tolist() == found["mean"][2].tolist() == [5.0, 6.0]


def test_documents_come_out_as_they_end_and_only_the_open_one_is_held() -> None:
    made = DocumentPool(["mean"], 2)
    first = list(made.update(torch.ones(3, 2), np.array([4, 5, 5])))
    assert [len(found["mean"]) for found in first] == [1]
    assert list(made.update(torch.ones(2, 2) * 4, np.array([5, 5]))) == []
    assert [found["mean"].tolist() for found in made.finish()] == [[[2.5, 2.5]]]
    assert list(made.finish()) == []
