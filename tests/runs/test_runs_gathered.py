"""Examples of many shards: the same ones however they are cut, mapped or fetched, in memory that does not grow."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandcase import jsonl
from runcase import run

from harvest.concepts import gathered
from harvest.concepts.gathered import GatheredExamples
from harvest.errors import DamageError
from harvest.results import write_results
from harvest.settings.direction import DirectionSettings
from harvest.store.examples import examples_bytes
from harvest.store.opening import open_files

RANDOM = np.random.default_rng(4)
ROWS = [
    {"text": "".join(RANDOM.choice(list("abcdef"), size=RANDOM.integers(2, 20))) + "xy"[i % 2], "label": str(i % 2),
     "pid": i // 2}
    for i in range(60)
]  # fmt: skip
DIRECTION: dict[str, Any] = {
    "name": "s", "column": "label", "positive": ["1"], "negative": ["0"], "holdout": 0.4, "read": [-1, "mean"],
    "modes": ["mean_difference", "whitened", "pca"], "examples": 9,
}  # fmt: skip


class Remote:
    """A local store that does not map, and counts whole reads."""

    local = False

    def __init__(self, inner: Any) -> None:
        self._inner, self.read_of = inner, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def map(self, path: str) -> None:
        """Nothing is mapped."""

    def read(self, path: str) -> bytes:
        self.read_of[path.rpartition("/")[2]] += 1
        found: bytes = self._inner.read(path)
        return found


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "directions").iterdir()}


@pytest.mark.parametrize("pair", [None, "column:pid"])
def test_cutting_early_and_fetching_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: str | None
) -> None:
    direction = {**DIRECTION, **({} if pair is None else {"pair": pair})}
    source = jsonl(tmp_path / "a.jsonl", ROWS)
    run(tmp_path / "run", source, capture={"layers": [1, 2]}, directions=[direction], store={"shard_documents": 3})
    expected = written(tmp_path / "run")
    for cut, opened in ((2**16, 1), (7, 256), (1, 2)):
        monkeypatch.setattr(gathered, "CUT_ROWS", cut)
        monkeypatch.setattr(gathered, "OPEN_SHARDS", opened)
        write_results(open_files(str(tmp_path / "run")))
        assert written(tmp_path / "run") == expected
    remote = Remote(open_files(str(tmp_path / "run")))
    write_results(remote)  # type: ignore[arg-type]
    assert written(tmp_path / "run") == expected
    assert remote.read_of["examples-s.arrow"] <= 2 * 20  # once for the keys, once for what is chosen


def test_a_shard_whose_examples_are_missing_is_named(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ROWS)
    run(tmp_path / "run", source, capture={"layers": [1]}, directions=[DIRECTION], store={"shard_documents": 30})
    path = sorted((tmp_path / "run").rglob("examples-s.arrow"))[1]
    path.unlink()
    with pytest.raises(DamageError, match=f"{path.parent.name}/examples-s.arrow: missing"):
        write_results(open_files(str(tmp_path / "run")))


def test_what_is_held_does_not_grow_with_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = DirectionSettings.model_validate({**DIRECTION, "read": -1, "examples": 50})
    monkeypatch.setattr(gathered, "CUT_ROWS", 400)
    monkeypatch.setattr(gathered, "OPEN_SHARDS", 4)
    files, n = open_files(str(tmp_path)), 40

    def shard(number: int) -> str:
        random = np.random.default_rng(number)
        keys: dict[str, Any] = {
            "read": [""] * n,
            "document": np.arange(n) + n * number,
            "variant": np.zeros(n, np.int8),
            "position": np.zeros(n, np.int32),
            "group": np.arange(n, dtype=np.int8) % 2,
            "weight": np.ones(n),
            "logit_diff": np.full(n, np.nan),
            "held_out": random.random(n) < 0.3,
            "pair": [None] * n,
        }
        files.create(f"{number}.arrow", examples_bytes(keys, {"residual.0": random.normal(size=(n, 256))}))
        return f"{number}.arrow"

    paths = [shard(number) for number in range(300)]
    GatheredExamples(files, paths[:2], settings)  # what is imported and made once

    def peak(count: int) -> int:
        tracemalloc.start()
        found = GatheredExamples(files, paths[:count], settings)
        sizes = [len(found.part("", "residual.0", held_out=out)) for out in (False, True)]
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert sizes == [100, 100]
        return size

    few, many = peak(30), peak(300)
    assert many <= 1.3 * few + 100 * 300, (few, many)  # the names of the files
