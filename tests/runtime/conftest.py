"""The job that the tests of crews run, and what one worker in this process makes of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from plainrun import PlainRun, read_plain

import harvest
from harvest.config import load_job

sys.path.insert(0, str(Path(__file__).parents[2] / "jobs"))

import chaos


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kill loop's tiny job: 30 shards of 8 short texts."""
    return chaos.tiny_job(tmp_path_factory.mktemp("job"), documents=240)


@pytest.fixture(scope="module")
def clean(job: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRun:
    """An undisturbed run by one worker."""
    path = tmp_path_factory.mktemp("clean") / "run"
    harvest.run(load_job(job, [f"run.path={path}"]))
    return read_plain(path)
