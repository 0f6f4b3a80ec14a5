"""The model of scale: the longest line decides, more workers never hurt, and the page's figures are its own."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvest.planning.scale import Costs, Limits, overview, predict

PAGE = (Path(__file__).parents[2] / "docs/pages/howto/scale.md").read_text(encoding="utf-8")
TINY = st.floats(1e-9, 1e-2)
COSTS = st.builds(
    Costs, model=TINY, read=TINY, write=TINY, cores=TINY, model_shard=TINY, write_shard=TINY, bytes=st.floats(1, 1e5)
)
LIMITS = st.builds(
    Limits,
    workers_per_node=st.integers(1, 16),
    cores=st.integers(1, 128),
    disk=st.floats(1e6, 1e11),
    network=st.floats(1e6, 1e11),
    store=st.floats(1e6, 1e12),
    commits=st.floats(1, 1e4),
)


@given(costs=COSTS, limits=LIMITS, workers=st.integers(1, 2000), tokens=st.integers(1, 10**12))
def test_a_run_takes_as_long_as_its_longest_line(costs: Costs, limits: Limits, workers: int, tokens: int) -> None:
    shards = max(1, tokens // 100_000)
    found = predict(costs, limits, workers=workers, tokens=tokens, shards=shards)
    assert found.seconds == max(found.lines.values()) == found.lines[found.limit]
    assert found.tokens_per_second * found.seconds == pytest.approx(tokens)
    assert found.bytes_per_second * found.seconds == pytest.approx(tokens * costs.bytes)
    assert found.bytes_per_second_per_node * found.nodes == pytest.approx(found.bytes_per_second)
    assert found.nodes == -(-workers // limits.workers_per_node)
    assert 0 < found.share <= 1


@given(costs=COSTS, limits=LIMITS, nodes=st.integers(1, 200), more=st.integers(2, 9))
def test_more_nodes_never_make_a_run_slower_and_never_more_than_so_many_times_as_fast(
    costs: Costs, limits: Limits, nodes: int, more: int
) -> None:
    """Of equal nodes that are full; and only what all of them share stands in the way of `more` times the speed."""
    own = limits.workers_per_node
    few = predict(costs, limits, workers=nodes * own, tokens=1e10, shards=1e5)
    many = predict(costs, limits, workers=nodes * own * more, tokens=1e10, shards=1e5)
    assert few.seconds / more * (1 - 1e-9) <= many.seconds <= few.seconds * (1 + 1e-9)
    alone = replace(limits, store=math.inf, commits=math.inf)
    few = predict(costs, alone, workers=nodes * own, tokens=1e10, shards=1e5)
    many = predict(costs, alone, workers=nodes * own * more, tokens=1e10, shards=1e5)
    assert many.seconds == pytest.approx(few.seconds / more)


def test_each_limit_binds_where_it_is_small() -> None:
    costs = Costs(model=1e-4, read=1e-6, write=1e-6, cores=1e-6, bytes=1000)
    wide = Limits(workers_per_node=4, commits=1e9)

    def limit(**changes: float) -> str:
        return predict(costs, replace(wide, **changes), workers=8, tokens=1e8, shards=1e3).limit  # type: ignore[arg-type]

    assert limit() == "the model"
    assert limit(disk=1e6) == "the disk of a node"
    assert limit(network=1e6) == "the network of a node"
    assert limit(store=1e6) == "the object store"
    assert limit(commits=0.1) == "the ledger"
    assert limit(cores=0.01) == "the cores of a node"


def test_the_table_of_the_page_is_the_one_that_the_code_computes() -> None:
    assert overview() in PAGE.partition("<!-- scale -->")[2]


def test_every_figure_of_that_table_follows_from_the_assumptions_that_the_page_states() -> None:
    """Recomputed from the figures in the page's own words, without the code."""
    text = " ".join(PAGE.partition("<!-- scale -->")[0].partition("## How far it goes")[2].split())

    def stated(pattern: str) -> float:
        found = re.search(pattern, text)
        assert found is not None, pattern
        return float(found[1].replace(",", ""))

    flops = stated(r"([\d,]+) TFLOPS") * 1e12 * stated(r"at ([\d.]+) % of") / 100
    writer, upload = stated(r"([\d.]+) GB/s for writing a name") * 1e9, stated(r"([\d.]+) GB/s for its upload") * 1e9
    writers, uploads = stated(r"up to (\d+) names side by side"), stated(r"for its upload, up to (\d+);")
    disk, network = stated(r"disks of ([\d.]+) GB/s") * 1e9, stated(r"network of ([\d.]+) GB/s") * 1e9
    store, commits = stated(r"a store of ([\d.]+) GB/s") * 1e9, stated(r"a ledger of ([\d,]+) records")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in overview().splitlines()[2:]]
    assert len(rows) == 2 * 2 * 3
    for model, names, gpus, size, speed, per_node, total, to_disks, to_store in rows:
        parameters, width = {"1B": (1e9, 2048), "8B": (8e9, 4096)}[model]
        workers = int(gpus.replace(",", ""))
        each, data = flops / (2 * parameters), int(names) * width * 2
        nodes = math.ceil(workers / min(8, workers))
        assert int(size.replace(",", "")) == data
        assert float(speed.replace(",", "")) == pytest.approx(each * workers, abs=1)
        assert float(per_node) == pytest.approx(each * workers * data / nodes / 1e9, abs=0.006)
        assert float(total.replace(",", "")) == pytest.approx(each * workers * data / 1e9, abs=0.006)
        in_shard = min(131_072, 2**30 / data)
        ledger = commits * in_shard / workers
        disks = {
            "writing": writer * min(int(names), writers) / data,
            "the disk of a node": disk * nodes / workers / data,
            "the ledger": ledger,
        }
        stores = {
            "writing": upload * min(int(names), uploads) / data,
            "the network of a node": network * nodes / workers / data,
            "the object store": store / workers / data,
            "the ledger": ledger,
        }
        for told, limits in ((to_disks, disks), (to_store, stores)):
            least = min(limits, key=lambda name: limits[name])
            share = limits[least] / each
            assert told == ("the model" if share > 0.995 else f"{least}, {share:.2f}")
