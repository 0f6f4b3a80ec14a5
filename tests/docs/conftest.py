"""The folder of someone who reads the site: the demo's job, run and model, by a tiny model with as many blocks."""

from __future__ import annotations

import contextlib
import csv
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3fs
from realdata import ROOT
from s3server import s3_server
from tiny import CHAT_TEMPLATE, byte_tokenizer, tiny_llama

import harvest

MODEL = "HuggingFaceTB/SmolLM2-135M"
"""A hub's name, and here a folder: 30 blocks, as the pages say of it."""
PRAISE = ("warm", "clever", "funny", "a joy", "worth it", "lovely")
BLAME = ("slow", "dull", "too long", "a chore", "empty", "loud")
FEWER = ["residual.0", "residual.15", "residual.20", "residual.29", "mlp.15"]
"""Of the demo's names: those that pages speak of."""


@pytest.fixture(scope="session")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every reader starts from: the demo has been run."""
    folder = tmp_path_factory.mktemp("furnished")
    model = tiny_llama(layers=30, vocab=300, max_position_embeddings=2048)
    model.save_pretrained(folder / MODEL)
    byte_tokenizer(pad=True, chat_template=CHAT_TEMPLATE).save_pretrained(folder / MODEL)
    with (folder / "demo.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "source"])
        for number in range(60):
            words = PRAISE if number % 2 else BLAME
            writer.writerow([f"The film number {number} was {words[number % 6]}.", number % 2, "made up"])
    job = (ROOT / "jobs/demo.toml").read_text(encoding="utf-8")
    job = re.sub(r'^name = "package:[^"]+"', f'name = "{MODEL}"', job, flags=re.MULTILINE)
    job = re.sub(r'^path = "package:[^"]+"', 'path = "demo.csv"', job, flags=re.MULTILINE)
    job = job.replace("sample = 0.012 ", "sample = 1.0 ")
    assert "package:" not in job
    (folder / "jobs").mkdir()
    (folder / "jobs/demo.toml").write_text(job, encoding="utf-8")
    with contextlib.chdir(folder):
        harvest.run("jobs/demo.toml", overrides=[f"capture.sites={FEWER}", "run.threads=1"])
    return folder


@pytest.fixture
def desk(furnished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the working directory."""
    shutil.copytree(furnished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket of a store that every S3 client here finds by the environment."""
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem(endpoint_url=server.endpoint).call_s3("create_bucket", Bucket="my-bucket")
        yield "my-bucket"
