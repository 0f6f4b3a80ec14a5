"""Real texts of mixed length, documents isolated: against padded batches in dataset order, and packed against sorted.

    python jobs/bench_batching.py [--pairs 5] [--documents 96] [--out jobs/results]

SmolLM2-135M in float32, movie reviews cut at so many tokens, `residual.15` stored. The rival of the first rows is the
bare forward of 16 documents at a time in dataset order, padded to the longest, with the mask that padding needs,
stopped after block 15, nothing stored. The other rows compare two whole harvests.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import measuring  # noqa: F401  # before torch: it says how threads wait
import torch
from measuring import Found, Row, in_turn, main, ratios
from work import BATCH, LAYER, Work, common, now, reviews, schedule

from harvest.plan import Plan


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    work, documents = common(asked), 8 if asked.quick else asked.documents
    for context, goal in (
        (256, None),
        (512, 2),
    ):  # at 256 six of ten tokens are real as it is: nobody can be twice as fast
        run = partial(against_padded, work, documents, context, asked.pairs)
        what = f"real reviews cut at {context}, isolated, stored / padded in dataset order"
        yield Row(what=what, goal=goal, measure=run)
    for context in (128, 512):
        run = partial(packed, work, documents, context, asked.pairs)
        yield Row(what=f"real reviews, packed / sorted, context {context}", goal=None, measure=run)


def plan(work: Work, documents: int, context: int, batching: str, folder: Path) -> Plan:
    return work.plan(
        folder,
        rows=[{"text": text} for text in mixed(documents)],
        data={"path": "reviews"},
        capture={"layers": [LAYER]},
        tokens={"context": context, "batching": batching, "long": "truncate"},
    )


def mixed(documents: int) -> list[str]:
    """Reviews drawn from the whole file, in its order: its first thousands are long, others are a line."""
    texts = reviews(100_000)
    return [texts[at] for at in sorted(random.Random(0).sample(range(len(texts)), documents))]


def tokens(work: Work, plan: Plan, folder: Path) -> tuple[int, int]:
    """Real tokens, and the tokens that are computed for them, padding included."""
    pipeline = work.pipeline(plan, folder)
    real = computed = 0
    for assignment in schedule(plan):
        _, text = pipeline.read(assignment)
        if isinstance(text, Exception):
            raise text
        real += text.forward_tokens
        computed += sum(batch.input_ids.size for window in pipeline.batches(text) for batch in window.batches)
    return real, computed


def padded(work: Work, documents: int, context: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, mask) of 16 documents at a time, in dataset order."""
    ids = [work.tokenizer(text).input_ids[:context] for text in mixed(documents)]
    found = []
    for start in range(0, len(ids), BATCH):
        part = [torch.tensor(one) for one in ids[start : start + BATCH]]
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in part], batch_first=True)
        found.append((torch.nn.utils.rnn.pad_sequence(part, batch_first=True), mask))
    return found


def bare(work: Work, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    with work.stopping(LAYER), torch.inference_mode():
        start = now()
        for ids, mask in batches:
            work.forward(input_ids=ids, attention_mask=mask)
        return now() - start


def against_padded(work: Work, documents: int, context: int, pairs: int) -> Found:
    batches = padded(work, documents, context)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = plan(work, documents, context, "auto", folder)
        real, computed = tokens(work, ours, folder)
        pipeline = work.pipeline(ours, folder)
        timings = in_turn(partial(bare, work, batches), partial(work.harvest, pipeline, folder), pairs)
    theirs = real / sum(ids.numel() for ids, _ in batches)
    remark = f"{documents} documents; of the computed tokens {theirs:.0%} were real, of ours"
    return Found(figures=ratios(timings), remark=f"{remark} {real / computed:.0%}")


def packed(work: Work, documents: int, context: int, pairs: int) -> Found:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plans = [plan(work, documents, context, batching, folder) for batching in ("sorted", "packed")]
        computed = [round(b / a, 3) for a, b in (tokens(work, one, folder) for one in plans)]
        pipelines = [work.pipeline(one, folder) for one in plans]
        timings = in_turn(*(partial(work.harvest, one, folder) for one in pipelines), pairs)
    return Found(
        figures=ratios(timings), remark=f"computed for each real token: {computed[0]} sorted, {computed[1]} packed"
    )


def more(options: argparse.ArgumentParser) -> None:
    options.add_argument("--documents", type=int, default=96)


if __name__ == "__main__":
    main(__doc__, rows, more)
