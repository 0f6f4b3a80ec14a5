"""What peers do in the benchmarks, by their own code on a tiny model: each captures the rows that Harvest does.

HARVEST_PEERS names the folder of the environments; without it the tests are skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benchwork import tiny_work  # first: it says where the benchmarks are

import bench_peers  # isort: skip
import bench_store  # isort: skip
import peer  # isort: skip

pytestmark = pytest.mark.skipif("HARVEST_PEERS" not in os.environ, reason="make test-peers has the environments")


@pytest.fixture(autouse=True)
def environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "ENVIRONMENTS", Path(os.environ["HARVEST_PEERS"]))


@pytest.mark.parametrize(
    ("environment", "script", "sites"),
    [
        ("nnsight", "nnsight_trace.py", ["residual"]),
        ("interlens", "interlens_capture.py", ["residual"]),
        ("saelens", "saelens_caching.py", bench_peers.SITES),
    ],
)
def test_a_peer_captures_what_is_harvested_every_time_it_is_told(
    environment: str, script: str, sites: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench_peers.started(tiny_work(monkeypatch, 1), environment, script, sites) as process:
        assert process.seconds() > 0
        assert process.seconds() > 0


def test_saelens_reads_batches_of_an_export_that_was_made_for_the_benchmark() -> None:
    found = bench_store.against_saelens(3 * bench_store.BATCH, 3, 1)
    assert found.figures[0] > 0
