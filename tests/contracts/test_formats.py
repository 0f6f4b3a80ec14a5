"""What Harvest writes and reads again says which format it is, or stands behind a file that does; another is refused.

Oracles: the files are changed as plain JSON and safetensors, with checksums that fit.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from safetensors.numpy import load, save
from safetensors.torch import save_file
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.__main__ import _status
from harvest.errors import HarvestError, RequestError
from harvest.records import FORMAT_VERSION
from harvest.runtime.status import status_of

OWN = ("run.json", "ledger/*.json", "coordinator.json", "complete.json", "shards/*/states.safetensors")
"""Files of a run that say their version themselves."""
OF_THE_RUN = (
    "shards/*/tokens.parquet",
    "shards/*/documents.parquet",
    "shards/*/examples-*.arrow",
    "shards/*/zarr.json",
    "shards/*/residual.[0-9]*/zarr.json",
    "shards/*/residual.[0-9]*/c.*",
    "shards/*/pooled/*",
    "statistics.parquet",
    "directions/*.json",
    "directions/*.safetensors",
)
"""Files that have the version of `run.json`, without which nobody reads them."""
WRITTEN_ONLY = ("report.html", ".coordinator.json.lock")
"""Nothing is read from them."""


def make(path: Path) -> Path:
    """A run with one of everything."""
    job = {
        "data": {"keep": ["label"]},
        "capture": {"layers": [1], "pool": ["mean"]},
        "store": {"dtype": "int8", "shard_documents": 4},
        "directions": [{"name": "kind", "column": "label", "positive": ["1"], "negative": ["0"]}],
        "run": {"path": str(path), "threads": 1},
    }
    rows = [{"text": text, "label": str(number % 2)} for number, text in enumerate("abcdefgh")]
    harvest.run(job, model=tiny_llama(vocab=300), tokenizer=byte_tokenizer(), data=rows)
    return path


def later(fields: dict[str, Any]) -> dict[str, Any]:
    """The same of the next format, with a checksum that fits where there was one."""
    fields = {**fields, "format": fields["format"] + 1}
    if fields.pop("crc32c", None) is not None:
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        fields["crc32c"] = f"{google_crc32c.value(text.encode()):08x}"
    return fields


def test_every_file_of_a_run_has_a_version_of_its_own_or_that_of_the_run(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    known = {pattern: fnmatch.filter(files, pattern) for pattern in (*OWN, *OF_THE_RUN, *WRITTEN_ONLY)}
    assert not [pattern for pattern, found in known.items() if not found]
    assert files == {name for found in known.values() for name in found}
    for pattern in OWN:
        for name in known[pattern]:
            if name.endswith(".json"):
                assert json.loads((folder / name).read_text())["format"] == 1, name


@pytest.mark.parametrize("pattern", [name for name in OWN if name.endswith(".json")])
def test_a_file_of_a_later_format_is_refused_by_its_name_wherever_it_is_read(
    pattern: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "run")
    path = next(folder.glob(pattern))
    path.write_text(json.dumps(later(json.loads(path.read_text()))))
    if pattern == "coordinator.json":
        (folder / "complete.json").unlink()  # a finished run asks nobody who is at work on it
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    line = f"{path}: format 2; this version of Harvest reads format 1"
    reads: list[Callable[[], Any]] = [lambda: status_of(str(folder)), lambda: make(folder)]
    if pattern != "coordinator.json":
        reads.append(lambda: harvest.open(folder))
    for read in reads:
        with pytest.raises(RequestError) as refused:
            read()
        assert str(refused.value) == line
    for command in ("status", "verify") if pattern != "coordinator.json" else ("status",):
        assert _status([command, str(folder)]) == 2
        assert capsys.readouterr().err == f"harvest: {line}\n"
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == kept


def test_sums_of_a_later_version_are_refused_by_kind_and_file(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    path = next(folder.glob("shards/*/states.safetensors"))
    header = path.read_bytes()
    length = int.from_bytes(header[:8], "little")
    versions = json.loads(json.loads(header[8 : 8 + length])["__metadata__"]["versions"])
    assert set(versions) == {"moments", "directions"}
    told = {"versions": json.dumps({**versions, "moments": str(int(versions["moments"]) + 1)})}
    path.write_bytes(save(load(header), metadata=told))
    with pytest.raises(HarvestError) as refused:
        harvest.open(folder).statistics()
    this = versions["moments"]
    assert str(refused.value) == f"{path}: moments states have version {int(this) + 1}; this program reads {this}"


def test_a_cache_of_a_later_version_is_refused_by_its_name(tmp_path: Path) -> None:
    cache = harvest.ActivationCache()
    cache.save(tmp_path / "cache.safetensors")
    save_file(
        {"0": torch.ones(1)}, tmp_path / "cache.safetensors", {"format": "harvest.ActivationCache", "version": "2"}
    )
    with pytest.raises(RequestError, match=r"^.*/cache\.safetensors: cache version 2; this program reads version 1$"):
        harvest.ActivationCache.load(tmp_path / "cache.safetensors")


def test_a_place_among_batches_of_a_later_version_is_refused(tmp_path: Path) -> None:
    batches = harvest.open(make(tmp_path / "run")).batches("residual.1", batch_size=2)
    state = batches.state_dict()
    with pytest.raises(RequestError, match=r"^state of batches: version is 2, here it is 1$"):
        batches.load_state_dict({**state, "version": state["version"] + 1})


def test_the_lines_that_refuse_a_version_are_those_that_contributing_shows() -> None:
    shown = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for line in (
        "RUN/run.json: format 2; this version of Harvest reads format 1",
        "states.safetensors: moments states have version 2; this program reads 1",
        "turns.safetensors: cache version 2; this program reads version 1",
        "state of batches: version is 2, here it is 1",
    ):
        assert f"{line}`" in shown
    assert f"in `coordinator.json` and `complete.json`: {FORMAT_VERSION} |" in shown
