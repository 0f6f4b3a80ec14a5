"""What a model is, from its config and tokenizer alone: names, lengths, dtype, device, and what stands in its way."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harvest.config import Job
from harvest.errors import RequestError

if TYPE_CHECKING:
    from harvest.model.sites import Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A model as its config describes it; no weight has been read, unless the caller brought them."""

    config: Any
    names: tuple[Name, ...]
    context: int
    switches: tuple[int, ...]
    """Lengths below the context beyond which it computes every token otherwise."""
    dtype: str
    device: str
    attention: str
    vocab_size: int
    """Rows of the input embedding."""
    embeddings: Mapping[str, int]
    """Direction between tokens -> rows of the embedding that it takes."""
    head_size: int
    """Tokens that have a logit; 0 where no answers are asked for."""
    weight_bytes: int
    packing_obstacle: str | None
    """Why windows packed in one row would see each other; None where they do not."""
    batch_obstacle: str | None
    """Why even windows in rows of their own would; None where they do not."""
    tokenizer: Any
    fingerprint: Mapping[str, str]


def describe(job: Job, model: Any, tokenizer: Any, device: str | None) -> Described:
    if model is None:
        _refuse_early(job)
    # torch and transformers take seconds: only once the request is plausible
    from harvest.model import (
        adapter,
        architectures,
        compiling,
        embedding,
        fingerprint,
        head,
        lengths,
        load,
        packing,
        quantization,
        sites,
    )

    if model is not None and not hasattr(model, "config"):
        raise RequestError(f"model: {type(model).__name__} is no transformers model (it has no config)")
    config = load.load_config(job.model) if model is None else model.config
    skeleton = load.skeleton(config, job.model) if model is None else model
    names = sites.resolve_names(skeleton, job.capture.sites, job.capture.layers)
    context = _context(job, load.context_limit(config), load.MAX_CONTEXT)
    if tokenizer is None and (model is None or job.tokens.tokenizer is not None):
        tokenizer = load.load_tokenizer(job.model, job.tokens.tokenizer)
    dtype = load.checkpoint_dtype(config, job.model) if model is None else load.dtype_of(model)
    if model is not None:
        device = load.device_of(model)
    elif device is None:
        device = load.resolve_device(job.model)
    quantization.refuse_quantization(job.model, config, device)
    adapter.refuse_adapter(job.model, skeleton)
    compiling.refuse_compiling(job.model, skeleton, names)
    return Described(
        config=config,
        names=names,
        context=context,
        switches=tuple(lengths.switches(config.get_text_config(), context)),
        dtype=dtype,
        device=device,
        attention=str(skeleton.config._attn_implementation),
        vocab_size=architectures.vocabulary_of(skeleton),
        embeddings=embedding.table_sizes(skeleton, job.directions),
        head_size=head.head_size(skeleton) if job.answers else 0,
        weight_bytes=load.weight_bytes(skeleton, dtype, job.model.quantization),
        packing_obstacle=packing.obstacle(skeleton),
        batch_obstacle=packing.INT8 if job.model.quantization == "int8" else packing.outliers_of_the_batch(config),
        tokenizer=tokenizer,
        fingerprint={
            "model": fingerprint.of_checkpoint(job.model) if model is None else fingerprint.of_model(model),
            "tokenizer": fingerprint.of_tokenizer(tokenizer),
            **({} if job.model.adapter is None else {"adapter": fingerprint.of_adapter(job.model.adapter)}),
        },
    )


def _refuse_early(job: Job) -> None:
    """The commonest of the wrong settings that depend on the model."""
    from harvest.model.options import refuse_options
    from harvest.model.told import told_by

    told = told_by(job.model.name, job.model.revision)
    refuse_options(job.model, told.kind)
    told.refuse(job.capture.sites, job.capture.layers)
    if told.positions is not None:
        _context(job, told.positions, told.positions)


def refuse_loading(job: Job) -> None:
    for setting in ("adapter", "quantization", "device_map", "compile"):
        asked = getattr(job.model, setting)
        if asked is not None and asked is not False:
            raise RequestError(
                f"model.{setting} = {asked!r}: a model object is given, which is taken as it is; leave it out"
            )


def _context(job: Job, limit: int | None, default: int) -> int:
    if job.tokens.context == "auto":
        return min(limit or default, default)
    if limit is not None and job.tokens.context > limit:
        raise RequestError(
            f"tokens.context = {job.tokens.context}: the model was built for {limit} positions; "
            f"allowed are 1 to {limit}, and 'auto'"
        )
    return job.tokens.context


def token_id(config: Any, role: str) -> int | None:
    """The model's own BOS or EOS, the first where its config lists several."""
    ids = getattr(config.get_text_config(), f"{role}_token_id", None)
    return ids[0] if isinstance(ids, list) else ids


def special_ids(config: Any) -> tuple[int, ...]:
    """BOS, EOS and PAD of the model's config: special tokens where there is no tokenizer to ask."""
    text = config.get_text_config()
    given = [getattr(text, f"{key}_token_id", None) for key in ("bos", "eos", "pad")]
    flat = itertools.chain.from_iterable(ids if isinstance(ids, list) else [ids] for ids in given)
    return tuple(sorted({i for i in flat if isinstance(i, int)}))
