"""The inline executor and the process that it works in."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch
from tiny import byte_tokenizer, tiny_llama

import harvest


def test_more_names_than_the_soft_limit_on_open_files_are_stored(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    try:
        job = {"capture": {"sites": ["residual", "attn", "mlp"]}, "run": {"path": tmp_path / "run"}}
        run = harvest.run(job, model=tiny_llama(layers=30, vocab=300), tokenizer=byte_tokenizer(), data=["ab"])
        assert len(run.names) == 90
        assert all(len(run[name]) == 3 for name in run.names)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_callers_thread_count_is_restored(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    job = {"run": {"path": tmp_path / "run", "threads": before + 1}}
    harvest.run(job, model=tiny_llama(vocab=300), tokenizer=byte_tokenizer(), data=["ab"])
    assert torch.get_num_threads() == before
