"""The merge at the end of a run: each shard's sums once, in one request, and no more memory for more shards."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commandcase import jsonl
from runcase import run

import harvest
from harvest.errors import DamageError
from harvest.reduce.base import StateFile, save_states
from harvest.reduce.concepts import Concepts
from harvest.reduce.labels import make_labels
from harvest.results import write_results
from harvest.settings.direction import DirectionSettings
from harvest.states import MergedSums
from harvest.store.opening import open_files

ROWS = [{"text": f"text {i}", "label": str(i % 2), "pid": i // 2} for i in range(12)]
DIRECTION: dict[str, Any] = {
    "name": "s", "column": "label", "positive": ["1"], "negative": ["0"], "pair": "column:pid", "holdout": 0,
    "modes": ["mean_difference", "paired_rejection"],
}  # fmt: skip


class Noting:
    """A store that cannot map, as a remote one, and notes what is read of it."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.read_of = inner, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def map(self, path: str) -> None:
        """Nothing is mapped."""

    def read(self, path: str) -> bytes:
        self.read_of[path] += 1
        found: bytes = self._inner.read(path)
        return found

    def read_range(self, path: str, start: int, length: int) -> bytes:
        self.read_of[path] += 1
        found: bytes = self._inner.read_range(path, start, length)
        return found


def test_every_shards_sums_are_read_once_for_statistics_and_all_directions(tmp_path: Path) -> None:
    other = {**DIRECTION, "name": "t", "read": [-1, "mean"]}
    run(
        tmp_path / "run", jsonl(tmp_path / "a.jsonl", ROWS), directions=[DIRECTION, other], store={"shard_documents": 3}
    )
    written = {p.name: p.read_bytes() for p in (tmp_path / "run/directions").glob("*.safetensors")}
    files = Noting(open_files(str(tmp_path / "run")))
    write_results(files)  # type: ignore[arg-type]
    states = {path: count for path, count in files.read_of.items() if path.endswith("states.safetensors")}
    assert len(states) == 4
    assert set(states.values()) == {1}
    assert {p.name: p.read_bytes() for p in (tmp_path / "run/directions").glob("*.safetensors")} == written


def test_a_shard_whose_sums_are_missing_is_named(tmp_path: Path) -> None:
    plain = run(tmp_path / "run", jsonl(tmp_path / "a.jsonl", ROWS), directions=[DIRECTION])
    (tmp_path / "run/complete.json").unlink()
    (path,) = (tmp_path / "run").rglob("states.safetensors")
    path.unlink()
    with pytest.raises(DamageError, match=f"{path.parent.name}/states.safetensors: cut short"):
        harvest.open(tmp_path / "run").directions()
    assert plain.complete


@pytest.mark.parametrize("paired", [False, True])
def test_what_is_held_does_not_grow_with_the_shards(paired: bool) -> None:
    """Members of pairs wait for their partner and then go; those that wait do not hold their shard's sums."""
    width, names, concepts = 64, [f"residual.{i}" for i in range(8)], Concepts()
    pair = {"pair": "column:pid" if paired else None, "modes": ["mean_difference"]}
    settings = DirectionSettings.model_validate({**DIRECTION, **pair})

    def shard(number: int) -> StateFile:
        """Paired: the A of one pair, and the B of the pair that the shard before began."""
        rows = torch.from_numpy(np.random.default_rng(number).normal(size=(8, width)))
        groups = [0, 1, -1, -1, -1, -1, -1, -1] if paired else [0, 1] * 4
        keys = [str(number), str(number - 1), *[""] * 6] if paired else None
        state = concepts.update(concepts.zero(), rows, make_labels(groups, pairs=keys, rows=8, unknown="count"))
        blob = save_states([(concepts, {f"s/{name}": state for name in names})])
        return StateFile(lambda start, length: blob[start : start + length], "shard")

    def held(count: int) -> int:
        sums = MergedSums([settings], names)
        tracemalloc.start()
        for number in range(count):
            sums.add(shard(number))
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert sums.of("s")["residual.0"].a.rows == (count - 1 if paired else 4 * count)  # type: ignore[union-attr]
        return size

    few, many = held(20), held(200)
    keys = 180 * len(names) * 200 if paired else 0  # that a pair's key has come is remembered: it must not come again
    assert many <= few + keys + 100_000, (few, many)
