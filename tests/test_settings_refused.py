"""Settings that go wrong in pairs, and job files that are none: each is one line that names what to change."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from harvest.config import load_job
from harvest.errors import RequestError

LEAST = {"model": {"name": "m"}, "data": {"path": "d"}, "run": {"path": "r"}}
GROUPS: dict[str, Any] = {"name": "a", "column": "l", "positive": ["1"], "negative": ["0"]}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"holdout": 1}, "directions.0.holdout = 1: allowed are a share of at least 0 and below 1, and 'column:NAME'"),
        ({"holdout": "test"}, "directions.0.holdout = 'test': allowed are a share"),
        ({"read": []}, "directions.0.read = []: allowed is a list of different places to read at, at least one"),
        ({"read": [0, "first"]}, None),
        ({"read": [-1, -1]}, "directions.0.read = [-1, -1]: allowed is a list of different places"),
        ({"pair": "pid"}, "directions.0.pair = 'pid': allowed are 'order' and 'column:NAME'"),
        ({"weight": "w"}, "directions.0.weight = 'w': allowed are 'column:NAME' and 'logit_diff'"),
        ({"positive": ["0", "1"]}, "direction 'a': '0' is in positive and in negative; allowed is one of them"),
        ({"positive": None}, "direction 'a': column and positive say which documents are in group A"),
        ({"negative": None}, "direction 'a': negative: values of group B, or 'rest'; only mode 'single_group' goes"),
        ({"negative": None, "modes": ["single_group"]}, None),
        ({"modes": ["paired_rejection"]}, "direction 'a': mode 'paired_rejection' needs pair; allowed are 'order' and"),
        ({"pair": "order", "read": "all"}, "direction 'a': pair = 'order' with read = 'all': a pair has one state of"),
    ],
)
def test_a_direction_that_contradicts_itself_is_told_what_to_change(given: dict[str, Any], line: str | None) -> None:
    asked = {key: value for key, value in {**GROUPS, **given}.items() if value is not None}
    if line is None:
        load_job({**LEAST, "directions": [asked]})
        return
    with pytest.raises(RequestError, match="^" + re.escape(line)):
        load_job({**LEAST, "directions": [asked]})


TOKENS: dict[str, Any] = {"name": "a", "positive": {"tokens": ["x"]}, "negative": {"tokens": ["y"]}}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"negative": ["0"]}, "positive and negative are both groups of tokens, or neither is"),
        ({"negative": {"tokens": ["y"], "embedding": "output"}}, "positive.embedding and negative.embedding: allowed"),
        ({"holdout": 0.5}, "holdout = 0.5: says something of documents, and groups of tokens read none; leave it out"),
        ({"negative": None}, "negative: tokens of group B; only mode 'single_group' goes without"),
        ({"pair": "column:pid"}, "pair = 'column:pid': tokens have no columns; allowed is 'order'"),
        ({"modes": ["paired_rejection"]}, "mode 'paired_rejection' needs pair; allowed is 'order'"),
    ],
)
def test_groups_of_tokens_are_told_what_does_not_go_with_them(given: dict[str, Any], line: str) -> None:
    asked = {key: value for key, value in {**TOKENS, **given}.items() if value is not None}
    with pytest.raises(RequestError, match="^" + re.escape(f"direction 'a': {line}")):
        load_job({**LEAST, "directions": [asked]})


def test_two_directions_of_one_name_are_refused_by_it() -> None:
    with pytest.raises(RequestError, match=r"^direction 'a': the name is taken; allowed is one for each$"):
        load_job({**LEAST, "directions": [GROUPS, {**GROUPS, "column": "m"}]})


@pytest.mark.parametrize(
    ("resources", "line"),
    [
        ({"GPU": 1}, "run.resources.GPU: decided by run.gpus_per_worker; leave it out"),
        ({"memory": 1}, "run.resources.memory: decided by the plan; leave it out"),
        ({"disk": 1.5}, "run.resources.disk = 1.5: allowed are shares of at most 1 and whole numbers"),
        ({"disk": 0}, "run.resources.disk = 0: allowed are shares"),
    ],
)
def test_a_resource_that_is_none_is_named(resources: dict[str, float], line: str) -> None:
    with pytest.raises(RequestError, match="^" + re.escape(line)):
        load_job({**LEAST, "run": {"path": "r", "resources": resources}})


def test_a_value_that_is_no_part_of_a_job_file_is_named_by_its_kind() -> None:
    with pytest.raises(RequestError, match=r"^a job holds text, numbers, lists and tables: set is none of them$"):
        load_job({**LEAST, "chat": {"kwargs": {"days": {"mon", "tue"}}}})


def test_a_job_file_that_is_no_text_or_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "latin.toml").write_bytes('[model]\nname = "caf\xe9"\n'.encode("latin-1"))
    with pytest.raises(RequestError, match=r"^job file \S+latin\.toml: not valid UTF-8 at byte 19$"):
        load_job(tmp_path / "latin.toml")

    def refuse(self: Path, *args: Any, **more: Any) -> str:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(RequestError, match=r"^job file \S+latin\.toml: cannot be read \(Permission denied\)$"):
        load_job(tmp_path / "latin.toml")
