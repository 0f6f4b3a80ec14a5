"""`statistics.also`: further reductions are kept beside the one that every run has, and merged from all shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plainrun import read_plain
from runcase import job
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.checking.verify import verify_run
from harvest.errors import RequestError
from harvest.reduce.known import reduction_of

TEXTS = ["abc", "d", "ef", "ghij", "k"]


def run(path: Path, texts: list[str] = TEXTS, **statistics: object) -> Any:
    asked = job(path, statistics=statistics, store={"shard_documents": 2}, capture={"layers": [0, 2]})
    return harvest.run(asked, model=tiny_llama(vocab=300), tokenizer=byte_tokenizer(), data=texts)


def without_shards(path: Path) -> Any:
    """A run that has committed nothing yet."""
    run(path, also=["health"])
    for record in (path / "ledger").glob("f*.json"):
        record.unlink()
    return harvest.open(path)


@pytest.mark.parametrize("name", ["moments", "health"])
def test_a_reduction_is_called_as_its_file(name: str) -> None:
    assert reduction_of(name).kind == name


def test_a_further_reduction_comes_to_what_all_rows_give_and_leaves_the_rest_as_it_was(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain")
    found = run(tmp_path / "also", also=["health", "moments", "health"])
    assert len(found.shards) == 3
    for name, counts in found.reduced("health").items():
        values = found[name].numpy(dtype="float32")
        assert counts.rows == len(values)
        assert (counts.non_finite_values, counts.non_finite_rows, counts.zero_rows) == (0, 0, 0)
        assert np.array_equal(found.reduced("moments")[name].mean, found.statistics()[name].mean)
    assert read_plain(plain.path).statistics == read_plain(found.path).statistics
    assert not verify_run(str(found.path)).findings


def test_several_runs_come_to_what_all_their_rows_give(tmp_path: Path) -> None:
    run(tmp_path / "a", ["abc", "d"], also=["health"])
    run(tmp_path / "b", ["efg"], also=["health"])
    both = harvest.open([tmp_path / "a", tmp_path / "b"])
    assert {name: counts.rows for name, counts in both.reduced("health").items()} == dict.fromkeys(
        both.names, len(both)
    )
    assert both.statistics()["residual.2"].count == len(both)


def test_a_run_without_moments_keeps_what_is_asked_for(tmp_path: Path) -> None:
    found = run(tmp_path / "run", moments=False, also=["moments"])
    assert found.statistics()["residual.0"].count == len(found)
    assert found.reduced("health")["residual.0"].rows == len(found)


def test_a_reduction_that_no_file_has_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for name in ("covarianc", "base", "../reduce", "known"):
        said = rf"^statistics\.also = '{name}': .*allowed are covariance, health, moments$"
        with pytest.raises(RequestError, match=said):
            run(tmp_path / "run", also=[name])
    assert not (tmp_path / "run").exists()


def test_a_reduction_that_the_run_does_not_keep_is_refused_with_those_that_it_does(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"^reduced\('health'\): this run keeps none \(statistics\.also\)$"):
        run(tmp_path / "run").reduced("health")
    with pytest.raises(RequestError, match=r"^reduced\('health'\): no shard is committed$"):
        without_shards(tmp_path / "empty").reduced("health")
    with pytest.raises(RequestError, match="no such reduction"):
        run(tmp_path / "run").reduced("larges")


def test_a_run_goes_on_with_the_reductions_that_it_began_with(tmp_path: Path) -> None:
    run(tmp_path / "run", also=["health"])
    with pytest.raises(RequestError, match=r"statistics\.also: \['health'\] -> \[\]"):
        run(tmp_path / "run")
