"""Many names at once: the bits of one name after the other, whatever is odd about some of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harvest.errors import RequestError
from harvest.reduce import stacked
from harvest.reduce.concepts import COARSEST, Concepts
from harvest.reduce.labels import Labels, make_labels

SUMS = Concepts()
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def bits(state: Any) -> dict[str, bytes]:
    return {field: array.tobytes() for field, array in SUMS.arrays(state).items()}


def labels_of(rng: np.random.Generator, n: int, first: int, *, paired: bool, answers: bool) -> Labels:
    group = (first + np.arange(n)) % 2 if paired else rng.permutation(np.arange(n) % 2)
    weight = rng.choice([0.0, 0.5, 1.0, 3.0], n)
    keys = [f"p{(first + i) // 2}" for i in range(n)] if paired else None
    right = rng.random(n) < 0.7 if answers else None
    return make_labels(group, weight, keys, rows=n, right=right)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_names_at_once_have_the_bits_of_one_after_the_other(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    paired, answers = data.draw(st.booleans()), data.draw(st.booleans())
    dtype = data.draw(st.sampled_from(DTYPES))
    names = {f"n{i}": data.draw(st.sampled_from([3, 8, 512])) for i in range(data.draw(st.integers(1, 7)))}
    together = {name: SUMS.zero() for name in names}
    alone = dict(together)
    first = 0
    for _ in range(data.draw(st.integers(1, 3))):
        n = data.draw(st.sampled_from([1, 2, 5, 26, 70]))  # 70 rows of 512 are more than is summed in one go
        labels = labels_of(rng, n, first, paired=paired, answers=answers)
        first += n
        rows = {name: torch.from_numpy(rng.normal(3, 1, (n, width))).to(dtype) for name, width in names.items()}
        for block in rows.values():
            odd = data.draw(st.sampled_from(["nothing", "nan", "inf", "zero", "parallel"]))
            at = int(rng.integers(n))
            if odd == "parallel":
                block[at] = 2 * block[at - 1]
            elif odd != "nothing":
                block[at, :] = {"nan": torch.nan, "inf": torch.inf, "zero": 0.0}[odd]
        resolution = data.draw(st.sampled_from([0.0, COARSEST]))
        together = stacked.update_all(together, rows, labels, resolution)
        alone = {name: SUMS.update(alone[name], block, labels, resolution) for name, block in rows.items()}
    assert list(together) == list(alone)
    for name in names:
        assert bits(together[name]) == bits(alone[name])
        assert together[name].waiting.keys() == alone[name].waiting.keys()


def test_names_at_once_are_taken_together_and_few_values_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    weighted = stacked.weighted_stack
    monkeypatch.setattr(stacked, "weighted_stack", lambda x, weight: sizes.append(x.shape) or weighted(x, weight))
    rows = {f"n{i}": torch.randn(20, 500) for i in range(30)}
    labels = make_labels(np.arange(20) % 2, rows=20)
    stacked.update_all({name: SUMS.zero() for name in rows}, rows, labels)
    assert sizes == [(13, 10, 500)] * 4 + [(4, 10, 500)] * 2


def test_a_third_row_of_a_pair_is_refused() -> None:
    rows = {"a": torch.randn(2, 4), "b": torch.randn(2, 4)}
    labels = make_labels([0, 1], pairs=["p", "p"], rows=2)
    states = stacked.update_all({name: SUMS.zero() for name in rows}, rows, labels)
    with pytest.raises(RequestError, match="'p'"):
        stacked.update_all(states, rows, labels)


def test_no_examples_change_nothing() -> None:
    states = {"a": SUMS.zero()}
    nothing = make_labels(np.zeros(0, np.int64), rows=0)
    assert stacked.update_all(states, {"a": torch.zeros(0, 4)}, nothing) == states
