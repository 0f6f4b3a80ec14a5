"""Layout: names map to safe folders and back; only what a run writes is called ours."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvest.errors import RequestError
from harvest.store import layout
from harvest.store.files import safe_path

NAMES = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=40).filter(
    lambda name: "" not in name.split("/") and all(len(part.encode()) <= 85 for part in name.split("/"))
)
"""Short enough for a folder even where every byte is written with three signs."""


@given(NAMES)
def test_every_name_maps_to_a_safe_folder_and_back(name: str) -> None:
    path = layout.array_path(name)
    assert safe_path(path) == path
    assert re.fullmatch(r"[A-Za-z0-9._%/-]+", path)
    assert layout.array_name(path) == name
    for part in path.split("/"):
        assert not part.startswith(".")
        assert part not in ("zarr.json", "tokens.parquet", "documents.parquet", "states.safetensors", "c.0.0")


@given(NAMES, NAMES)
def test_two_names_never_share_a_folder(first: str, second: str) -> None:
    assert (layout.array_path(first) == layout.array_path(second)) == (first == second)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("residual.12", "residual.12"),
        ("module:model.layers.3.mlp", "module%3Amodel.layers.3.mlp"),
        ("pooled/mean/residual.12", "pooled/mean/residual.12"),
        ("..", "%2E."),
        ("../../etc", "%2E./%2E./etc"),
        ("zarr.json", "%7Aarr.json"),
        ("c.0.0", "%63.0.0"),
        ("100%", "100%25"),
    ],
)
def test_folder_names_are_the_documented_ones(name: str, path: str) -> None:
    assert layout.array_path(name) == path


@pytest.mark.parametrize("name", ["", "/", "a//b", "/a", "a/", "x" * 256, "é" * 50])
def test_a_name_without_a_folder_is_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match="name '"):
        layout.array_path(name)


def test_attempts_are_named_by_shard_life_and_number_and_parsed_back() -> None:
    name = layout.attempt_name("f00000-s000017", "9c1f02ab", 1)
    assert name == "f00000-s000017.9c1f02ab-1"
    assert layout.parse_attempt(name) == ("f00000-s000017", "9c1f02ab", 1)
    assert layout.attempt_path(name) == f"shards/{name}"
    assert layout.attempt_of(f"shards/{name}/residual.0/c.0.0") == name
    assert layout.attempt_of(f"ledger/{name}/x") is None
    with pytest.raises(ValueError, match="not the name of an attempt"):
        layout.attempt_name("f00000-s000017", "../../../..", 1)
    for wrong in ("f00000-s000017", "f00000-s000017.9c1f02ab", "f00000-s000017.9C1F02AB-1", f"{name}\n", f"x{name}"):
        assert layout.parse_attempt(wrong) is None


@pytest.mark.parametrize(
    "path",
    [
        "run.json",
        "complete.json",
        "coordinator.json",
        ".coordinator.json.lock",
        ".run.json.0123456789abcdef.tmp",
        "ledger/f00000-s000017.json",
        "ledger/.f00000-s000017.json.0123456789abcdef.tmp",
        "shards/f00000-s000017.9c1f02ab-1/zarr.json",
        "shards/f00000-s000017.9c1f02ab-1/module%3Aa.b/c.12.0",
        "shards/f00000-s000017.9c1f02ab-1/pooled/mean/residual.12/zarr.json",
        "shards/f00000-s000017.9c1f02ab-1/examples-sentiment.arrow",
        "directions/sentiment.safetensors",
        "statistics.parquet",
        "covariance.safetensors",
        "report.html",
    ],
)
def test_what_a_run_writes_is_ours(path: str) -> None:
    assert layout.is_ours(path)


@pytest.mark.parametrize(
    "path",
    [
        "notes.txt",
        "runxjson",
        "run.json.bak",
        "ledger/notes.json",
        "ledger/f00000-s000017.json.bak",
        "shards/f00000-s000017.9c1f02ab-1/notes.txt",
        "shards/mine/zarr.json",
        "directions/deep/x.json",
        ".notes.txt.0123456789abcdef.tmp",
        ".bashrc",
        "x/run.json",
    ],
)
def test_what_no_run_writes_is_foreign(path: str) -> None:
    assert not layout.is_ours(path)


def test_ledger_files_name_their_shard() -> None:
    assert layout.record_key(layout.record_path("f00000-s000017")) == "f00000-s000017"
    assert layout.record_key("ledger/f00000-s000017.json.bak") is None
