"""The common work of the benchmarks, as small as it gets."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import byte_tokenizer, tiny_llama

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))

import bench_peers
from work import Work


def tiny_work(monkeypatch: pytest.MonkeyPatch, layer: int) -> Work:
    """A Llama of three blocks, six windows of eight tokens; peers capture one block of it."""
    for name, value in {"LAYER": layer, "LAYERS": 3, "BATCH": 2}.items():
        monkeypatch.setattr(bench_peers, name, value)
    work = Work(48, 1, window=8, batch=2)
    work.model, work.tokenizer = tiny_llama(vocab=300), byte_tokenizer()
    work.windows = [{"ids": ids} for ids in np.random.default_rng(0).integers(2, 300, (6, 8)).tolist()]
    return work
