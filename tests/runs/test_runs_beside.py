"""Sums made beside the next rows' forward, as on an accelerator: bits, errors and account of the plain order.

There is none here; what decides it is `sets_for`, which these tests answer in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_family
from runcase import job

import harvest
from harvest.errors import WorkError
from harvest.pipeline import Pipeline
from harvest.reduce.moments import Moments
from harvest.shardwork import ShardWork
from harvest.stages import stages_of

ODD = 50
"""The id whose embedding is no number."""
DOCUMENTS = [
    {"i": [(7 * number + place) % 40 + 3 for place in range(number % 9 + 1)], "label": str(number % 2)}
    for number in range(40)
]
DIRECTION = {"name": "d", "column": "label", "positive": ["1"], "negative": ["0"], "modes": ["mean_difference", "pca"]}
TABLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"store": {"dtype": "int8"}},
    "some rows, pooled, with a direction": {
        "capture": {"positions": {"every": 2}, "pool": ["mean"]},
        "directions": [DIRECTION],
    },
    "sums alone, with covariance": {
        "capture": {"store": False},
        "statistics": {"covariance": True},
        "store": {"shard_documents": 64},
    },
}


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Small windows from the start; sums beside the forward once it is called."""
    monkeypatch.setattr("harvest.plan.SORT_WINDOW_BYTES", 16 * 4 * 20)
    return lambda: monkeypatch.setattr("harvest.pipeline.sets_for", lambda device: 3)


def harvested(path: Path, documents: list[dict[str, Any]] = DOCUMENTS, model: Any = None, **tables: Any) -> Path:
    tables = {"tokens": {"batch": 16}, **tables, "data": {"ids": "i"}}
    tables["store"] = {"shard_documents": 16, **tables.get("store", {})}
    harvest.run(job(path, **tables), model=model or tiny_family("llama"), data=documents)
    return path


def files(path: Path) -> dict[str, bytes]:
    """What every shard, the directions and the statistics hold; attempts are called by their shard alone."""
    found = {}
    for file in sorted(
        [*path.glob("shards/**/*"), *path.glob("directions/*.safetensors"), path / "statistics.parquet"]
    ):
        if file.is_file():
            place = file.relative_to(path).parts
            found["/".join(part.partition(".")[0] if at == 1 else part for at, part in enumerate(place))] = (
                file.read_bytes()
            )
    return found


@pytest.mark.parametrize("kind", TABLES)
def test_the_bits_are_those_of_the_plain_order(kind: str, tmp_path: Path, beside: Any) -> None:
    expected = files(harvested(tmp_path / "clean", 4 * DOCUMENTS, **TABLES[kind]))
    beside()
    found = files(harvested(tmp_path / "beside", 4 * DOCUMENTS, **TABLES[kind]))
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []
    assert len(found) > 6


def test_the_next_rows_are_in_the_model_while_sums_are_made(
    tmp_path: Path, beside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of the first rows wait for it: in the plain order they would for ever."""
    beside()
    take, forward = ShardWork.take, Pipeline.forward
    began, others = threading.Semaphore(0), []

    def counted(self: Pipeline, *arguments: Any) -> None:
        began.release()
        forward(self, *arguments)

    def waiting(self: ShardWork, *arguments: Any) -> None:
        if not others:
            others.extend([began.acquire(timeout=30), began.acquire(timeout=30)])
        assert threading.current_thread() is not threading.main_thread()
        take(self, *arguments)

    monkeypatch.setattr(Pipeline, "forward", counted)
    monkeypatch.setattr(ShardWork, "take", waiting)
    harvested(tmp_path / "run")
    assert others == [True, True]


def test_what_is_no_number_runs_again_between_the_forwards_of_later_rows(tmp_path: Path, beside: Any) -> None:
    documents = [{"i": [ODD, 2, 3] if number % 5 == 1 else row["i"]} for number, row in enumerate(DOCUMENTS)]
    model = tiny_family("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[[ODD, 0]] = float("nan")  # 0 is what batches are padded with
    clean = harvested(tmp_path / "clean", documents, model)
    assert sum(record.non_finite_documents for record in harvest.open(clean).shards) == 8
    beside()
    assert files(harvested(tmp_path / "beside", documents, model)) == files(clean)


def test_sums_that_fail_fail_their_shard_by_name_and_the_same_call_resumes(
    tmp_path: Path, beside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = harvested(tmp_path / "clean", run={"attempts": 1})
    beside()
    with monkeypatch.context() as patch:
        update, calls = Moments.update, []

        def failing(self: Any, state: Any, block: Any) -> Any:
            calls.append(int(block.document[0]))
            if 16 <= calls[-1] < 32:
                raise ValueError("no sum")
            return update(self, state, block)

        patch.setattr(Moments, "update", failing)
        with pytest.raises(WorkError, match=r"^shard f00000-s000001: ValueError: no sum"):
            harvested(tmp_path / "run", run={"attempts": 1})
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("harvest-sums")]
    assert len(harvest.open(tmp_path / "run").shards) == 2, "the shards before and after it"
    assert files(harvested(tmp_path / "run", run={"attempts": 1})) == files(clean)


def test_seconds_beside_the_forward_are_told_as_such_and_are_no_part_of_its_line(tmp_path: Path, beside: Any) -> None:
    beside()
    harvested(tmp_path / "run")
    shards = harvest.open(tmp_path / "run").shards
    assert all(record.seconds["reduce.beside"] > 0 == record.seconds["reduce"] for record in shards)
    found = stages_of(shards)
    assert found is not None
    assert found.stages["reduce"].busy == found.reduced_beside == sum(r.seconds["reduce.beside"] for r in shards)
    own = sum(found.stages[stage].busy for stage in ("forward", "copy", "check", "commit"))
    waits = sum(r.seconds.get(key, 0.0) for r in shards for key in ("forward.idle", "forward.blocked"))
    assert found.other == pytest.approx(max(0.0, found.worker_seconds - own - waits))
