"""What a job will do, decided before it does it: every `auto` resolved, every wrong request refused.

Nothing here runs the model or writes a file. No `auto` depends on the moment: each is a function of the job, the
model's config, the first documents and the constants below, so that a run resumed elsewhere decides the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harvest.buffers import sets_for
from harvest.concepts.tokengroups import TokenGroups
from harvest.config import Job
from harvest.errors import RequestError
from harvest.planning.described import Described, describe, refuse_loading, special_ids, token_id
from harvest.planning.estimate import (
    Estimate,
    estimate,
    probe_documents,
    refuse_empty,
    refuse_heavy_sums,
    shard_documents,
    span_names,
    state_bytes_of,
    sums_memory,
    totals_of,
    worker_memory,
)
from harvest.planning.groups import GroupsBefore, count_groups
from harvest.planning.lock import lock_of
from harvest.planning.sizes import Sizes, chunk_bytes_of, sizes_of
from harvest.records import SourceFile
from harvest.reduce.known import reductions_of
from harvest.source.open import open_source
from harvest.source.rows import Source
from harvest.text.answers import RightAnswers, answer_tokens
from harvest.text.chat import FIXED_DATE
from harvest.text.spans import refuse_span, uses_spans
from harvest.text.tokengroups import group_ids
from harvest.text.tokenise import Tokeniser

if TYPE_CHECKING:
    from harvest.model.sites import Name

LOGITS_BYTES = 3 * 256 * 2**20
"""Of answers: what one forward makes at most, as the head gives it, as float32, and what a scale makes of it."""
TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 16384}
"""`tokens.batch = "auto"`: on a CPU more tokens bring no speed, on a GPU fewer leave it idle."""
SORT_WINDOW_BYTES = 256 * 2**20
"""Rows that are sorted by length among themselves; two such windows are in memory at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What every `auto` stands for; part of the lock, and checked by whoever works on the run."""

    dtype: str
    """Of the forward."""
    device: str
    """`cpu` or `cuda`."""
    attention: str
    """Implementation, as transformers names it."""
    context: int
    """Tokens of the longest window."""
    switches: tuple[int, ...]
    """Lengths below it beyond which the model computes every token otherwise: no batch has windows of both sides."""
    batching: str
    """`sorted`, `packed` or `concatenated`."""
    tokens_per_batch: int
    """Padding included."""
    rows_per_sort_window: int
    """Captured rows that are sorted among themselves and written together."""
    shard_documents: int
    """Source rows of a shard."""
    store_dtype: str
    """Of the rows on disk."""
    chunk_bytes: int
    """Of an inner chunk, at most."""
    threads: int
    """Of the forward; another count gives other last bits."""
    names: tuple[str, ...]
    """Site by site in the job's order, layers rising."""
    fixed_date: str
    """The date that chat templates see."""
    spans: bool
    """The token table says which span each token is in."""
    answers: Mapping[str, int]
    """Group value -> token that speaks for its answer; empty where the job asks for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A job that can run: the request, its resolution, its source, and what is expected of it."""

    job: Job
    resolved: Resolved
    fingerprint: Mapping[str, Any]
    """Of model, tokenizer and data: compared on resume."""
    names: tuple[Name, ...]
    config: Any
    """The model's config, as transformers reads it."""
    source: Source
    tokeniser: Tokeniser
    estimate: Estimate
    groups_before: GroupsBefore
    """What pairs by order need to know of a shard; empty in a worker, which is told."""
    token_groups: TokenGroups
    """Of directions between tokens."""

    @property
    def answers(self) -> tuple[int, ...]:
        """The tokens whose logits are asked for, each once."""
        return distinct(self.resolved.answers)

    def lock(self) -> dict[str, Any]:
        """What must be equal for a run to go on, as flat `setting -> value`."""
        return lock_of(self.job, self.resolved, self.fingerprint)


def make_plan(
    job: Job,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    free_bytes: int | None = None,
    known: Sequence[SourceFile] = (),
    device: str | None = None,
) -> Plan:
    """Resolves a job; `model`, `tokenizer` and `data` are objects of the caller's instead of what the job names.

    `known` source files are not counted again where their fingerprints are still the same; `device` is what the workers
    have, where they are elsewhere. Raises RequestError for whatever cannot work, cheapest checks first and before any
    weight is loaded.
    """
    refuse_at_once(job)
    if model is not None:
        refuse_loading(job)
    source = open_source(job.data, job.columns, data, known)
    found = describe(job, model, tokenizer, device)
    answers = _answers(job, found)
    tokeniser = _tokeniser(job, found, answers)
    store_dtype = found.dtype if job.store.dtype == "auto" else job.store.dtype
    _refuse_taken_scales(found.names, store_dtype)
    sizes = sizes_of(job, found.names, store_dtype)
    probe = probe_documents(source, tokeniser)
    if not probe.documents:
        refuse_empty(job, source)
    _refuse_unknown_spans(job, source, tokeniser)
    shard = shard_documents(job, probe, sizes.row, sizes.document)
    widths = {str(name): name.width for name in found.names}
    refuse_heavy_sums(job, probe, widths, shard_documents=shard, bytes_per_row=sizes.row)
    resolved = _resolve(job, found, store_dtype, sizes.captured, shard, answers)
    plan = Plan(
        job=job,
        token_groups=_token_groups(job, found),
        resolved=resolved,
        fingerprint={**found.fingerprint, "data": {file.name: file.fingerprint for file in source.files}},
        names=found.names,
        config=found.config,
        source=source,
        tokeniser=tokeniser,
        estimate=estimate(
            job,
            source,
            probe,
            # A worker is told with each shard what its coordinator has counted, and estimates nothing.
            totals_of(job, source, tokeniser, probe, found.context, closely=not known),
            shard_documents=resolved.shard_documents,
            bytes_per_row=sizes.row,
            bytes_per_document=sizes.document,
            state_bytes=state_bytes_of(job, widths),
            memory_bytes=_memory(job, found, resolved, sizes),
            free_bytes=free_bytes,
        ),
        groups_before=GroupsBefore(shard) if known or not job.read_directions else count_groups(job, source, shard),
    )
    _refuse_lack_of_room(job, plan.estimate)
    return plan


def _memory(job: Job, found: Described, resolved: Resolved, sizes: Sizes) -> int:
    """Peak of one worker."""
    return worker_memory(
        rows_per_sort_window=resolved.rows_per_sort_window,
        sort_windows=sets_for(resolved.device),
        bytes_per_row=sizes.captured,
        tokens_per_batch=resolved.tokens_per_batch,
        weight_bytes=found.weight_bytes,
        examples_bytes=2 * resolved.shard_documents * sizes.example,
        chunks_bytes=0 if job.store.compression == "none" else len(found.names) * resolved.chunk_bytes,
        logits_bytes=LOGITS_BYTES if resolved.answers else 0,
        sums_bytes=sums_memory(job, {str(name): name.width for name in found.names}, resolved.threads),
    )


def _resolve(
    job: Job, found: Described, store_dtype: str, bytes_per_captured: int, shard: int, answers: Mapping[str, int]
) -> Resolved:
    return Resolved(
        dtype=found.dtype,
        device=found.device.partition(":")[0],
        attention=found.attention,
        context=found.context,
        switches=found.switches,
        batching=_batching(job, found),
        tokens_per_batch=_tokens_per_batch(job, found.device),
        rows_per_sort_window=max(1, SORT_WINDOW_BYTES // bytes_per_captured),
        shard_documents=shard,
        store_dtype=store_dtype,
        chunk_bytes=chunk_bytes_of(job, len(found.names)),
        threads=resolve_threads(job),
        names=tuple(str(name) for name in found.names),
        fixed_date=FIXED_DATE.date().isoformat(),
        spans=uses_spans(job.data, job.capture, job.read_directions),
        answers=answers,
    )


def refuse_at_once(job: Job) -> None:
    """A reduction that nobody has, and a run that would keep nothing: known from the job alone."""
    reductions_of(job.statistics)
    kept = job.capture.store or job.capture.pool or job.statistics.moments or job.statistics.covariance
    if not (kept or job.directions):
        raise RequestError(
            "capture.store = false: then something else must be kept; allowed are statistics.moments = true, "
            "statistics.covariance = true, capture.pool and [[directions]]"
        )


def _refuse_taken_scales(names: Sequence[Name], store_dtype: str) -> None:
    """A module may be called `scale`."""
    taken = {str(name) for name in names}
    for name in names if store_dtype == "int8" else ():
        if f"{name}.scale" in taken:
            raise RequestError(
                f"store.dtype = 'int8': the scales of {name} would be called {name}.scale, which is captured, too; "
                "allowed with these names are float32, float16 and bfloat16"
            )


# ---- one decision each -------------------------------------------------------------------------------------------


def _token_groups(job: Job, model: Described) -> TokenGroups:
    """The tokens of directions between tokens."""
    asking = [direction for direction in job.directions if direction.embedding is not None]
    return {one.name: group_ids(one, model.tokenizer, model.embeddings[one.name]) for one in asking}


def _answers(job: Job, model: Described) -> dict[str, int]:
    """Group value -> the token that speaks for its answer."""
    if not job.answers:
        return {}
    literal = job.tokens.special_in_text == "literal"
    return answer_tokens(model.tokenizer, job.answers, literal=literal, size=model.head_size)


def distinct(answers: Mapping[str, int]) -> tuple[int, ...]:
    """The tokens of the answers, each once and in this order numbered."""
    return tuple(sorted(set(answers.values())))


def _tokeniser(job: Job, model: Described, answers: Mapping[str, int]) -> Tokeniser:
    number = {token: i for i, token in enumerate(distinct(answers))}
    right = None
    if answers:
        column = job.answered_directions[0].column
        right = RightAnswers(job.data, column, {value: number[token] for value, token in answers.items()})
    return Tokeniser(
        model.tokenizer,
        data=job.data,
        chat=job.chat,
        tokens=job.tokens,
        capture=job.capture,
        context=model.context,
        vocab_size=model.vocab_size,
        bos_id=token_id(model.config, "bos"),
        eos_id=token_id(model.config, "eos"),
        special_ids=special_ids(model.config),
        directions=job.read_directions,
        kept=job.kept,
        answers=right,
    )


def _refuse_unknown_spans(job: Job, source: Source, tokeniser: Tokeniser) -> None:
    """A misspelt role would skip every chat; one that the first documents have is a role, however odd."""
    met = span_names(source, tokeniser) if tokeniser.doubtful_spans else frozenset()
    for name in tokeniser.doubtful_spans:
        if name not in met:
            raise refuse_span(name, job.capture, met)


def _batching(job: Job, model: Described) -> str:
    """`auto` is `sorted` where that is true, which is nearly everywhere, and the rows are padded but little."""
    if model.batch_obstacle is not None:
        if job.tokens.batching != "auto":
            raise RequestError(
                f"tokens.batching = {job.tokens.batching!r}: {model.batch_obstacle}, so that documents would see each "
                "other; allowed is 'auto', which runs them one by one"
            )
        return "single"
    if job.tokens.batch == 1 and job.tokens.batching in ("auto", "sorted"):
        return "single"  # true where even the padding changes what a model computes
    if job.tokens.batching == "packed" and model.packing_obstacle is not None:
        raise RequestError(
            f"tokens.batching = 'packed': {model.packing_obstacle}, so packed documents would see each other; "
            "allowed for this model are 'auto', 'sorted' and 'concatenated'"
        )
    if job.tokens.batching == "packed" and model.switches:
        raise RequestError(
            f"tokens.batching = 'packed': beyond {model.switches[0]} tokens this model computes a window otherwise, "
            "and whatever shares a row with it; allowed are 'auto', 'sorted', 'concatenated' and tokens.context of "
            f"at most {model.switches[0]}"
        )
    return "sorted" if job.tokens.batching == "auto" else job.tokens.batching


def _tokens_per_batch(job: Job, device: str) -> int:
    if job.tokens.batch != "auto":
        return job.tokens.batch
    return TOKENS_PER_BATCH.get(device.partition(":")[0], TOKENS_PER_BATCH["cuda"])


def resolve_threads(job: Job) -> int:
    """What `run.threads = "auto"` stands for: the cores that this process may use."""
    if job.run.threads != "auto":
        return job.run.threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _refuse_lack_of_room(job: Job, expected: Estimate) -> None:
    needed, free = expected.store_bytes, expected.free_bytes
    if free is not None and needed is not None and needed > free:
        raise RequestError(
            f"run.path = {job.run.path!r}: the run needs about {_size(needed)} "
            f"and the disk has {_size(free)} free; fewer names, documents or positions need less"
        )
    if job.store.memory_gb != "auto" and expected.memory_bytes > job.store.memory_gb * 1e9:
        raise RequestError(
            f"store.memory_gb = {job.store.memory_gb}: a worker needs about {_size(expected.memory_bytes)}; "
            "fewer names or a smaller tokens.batch need less"
        )


def _size(number: float) -> str:
    """Decimal units, as disks are sold and `store.memory_gb` counts."""
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"
