"""The job that the tests of crews run, and what one worker in this process makes of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from plainrun import PlainRun, read_plain
from s3server import s3_server

import harvest
from harvest.config import load_job
from harvest.store.files import Files
from harvest.store.opening import open_files

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Where a run can go on a server that speaks S3 on loopback."""

    files: Files
    overrides: tuple[str, ...]
    """Of the job."""

    def fetch(self, folder: Path) -> PlainRun:
        """Copies what is there, and reads it as a run on disk."""
        for path, _ in self.files.list():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(self.files.read(path))
        return read_plain(folder)


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    """On a server of its own."""
    with s3_server() as server:
        path = f"s3://{server.bucket}/run"
        told = (f"run.storage.{key}='{value}'" for key, value in server.storage.items())
        yield Bucket(files=open_files(path, server.storage), overrides=(f"run.path={path}", *told))
