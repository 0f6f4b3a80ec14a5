"""Copies beside the forward: what they make of a batch, and in which order the streams are told to wait.

There is no CUDA here: its streams are stood in for by ones that note what they are asked, and copies are done at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harvest.model.aside import FEW_ROWS_PER_SPAN, SideCopies, sent
from harvest.records import Batch

CPU = torch.device("cpu")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the streams were asked, in order."""
    told: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None: ...

        def wait_stream(self, other: str) -> None:
            told.append(f"waits for {other}")

        def synchronize(self) -> None:
            told.append("host waits")

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        told.append("copies")
        yield
        told.append("copied")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the forward")
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: told.append("memory is kept"), raising=False
    )
    return told


@st.composite
def batches(draw: Any) -> tuple[Batch, int]:
    """Runs of kept tokens out of a batch's, on rows in another order with gaps; and how many rows there are."""
    counts = draw(st.lists(st.integers(1, 2 * FEW_ROWS_PER_SPAN), min_size=1, max_size=6))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(counts), max_size=len(counts)))
    order = draw(st.permutations(range(len(counts))))
    sources = np.cumsum([0, *counts[:-1]]) + np.cumsum(gaps)
    starts = np.zeros(len(counts), np.int64)
    row = 0
    for one in order:
        starts[one] = row
        row += counts[one] + gaps[one]
    spans = [(int(source), int(start), count) for source, start, count in zip(sources, starts, counts)]
    return (
        Batch(
            input_ids=np.zeros((1, int(sources[-1]) + counts[-1]), np.int64),
            lengths=np.array([int(sources[-1]) + counts[-1]]),
            source=np.concatenate([np.arange(source, source + count) for source, _, count in spans]),
            rows=np.concatenate([np.arange(start, start + count) for _, start, count in spans]),
            spans=spans,
            documents=np.zeros(sum(counts), np.int64),
        ),
        row,
    )


@given(batches(), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_kept_tokens_arrive_in_their_rows_and_nothing_else_is_touched(
    told: list[str], drawn: tuple[Batch, int], dtype: torch.dtype
) -> None:
    batch, rows = drawn
    flat = torch.arange(batch.input_ids.size * 3, dtype=torch.float32).reshape(-1, 3) + 1
    into = torch.zeros(rows, 3, dtype=dtype)
    copies = SideCopies(CPU)
    copies.copy(flat, batch, sent(batch.source, CPU), into)
    flat.zero_()  # the next module writes over it
    copies.wait()
    expected = torch.zeros(rows, 3, dtype=dtype)
    for token, row in zip(batch.source.tolist(), batch.rows.tolist()):
        expected[row] = torch.arange(token * 3, token * 3 + 3).to(torch.float32).add(1).to(dtype)
    assert torch.equal(into, expected)


@pytest.mark.parametrize("count", [1, FEW_ROWS_PER_SPAN])
def test_copies_wait_for_the_forward_and_the_host_for_copies(told: list[str], count: int) -> None:
    """Of few rows a run, what arrived is put in place once the host has waited, and once only."""
    tokens = np.arange(count)
    batch = Batch(
        input_ids=np.zeros((1, count), np.int64),
        lengths=np.array([count]),
        source=tokens,
        rows=tokens,
        spans=[(0, 0, count)],
        documents=tokens,
    )
    into, copies = torch.zeros(count, 2), SideCopies(CPU)
    copies.copy(torch.ones(count, 2), batch, sent(tokens, CPU), into)
    assert told == ["waits for the forward", "copies", "copied", "memory is kept"]
    copies.wait()
    assert told[4:] == ["host waits"]
    assert torch.equal(into, torch.ones(count, 2))
    into.zero_()
    copies.wait()
    assert not into.any()
