"""Directions between groups of tokens, made from rows of an embedding: taken once by whoever has the model, no forward.

They lie with the first shard, in the shape of the examples of any other direction; every example is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from harvest.concepts.examples import KeptExamples
from harvest.errors import DamageError, RequestError
from harvest.model.embedding import embedding_rows
from harvest.records import Shard, ShardRecord, SourceFile
from harvest.reduce.accumulate import concept_direction
from harvest.reduce.direction import Counts, Direction, undefined
from harvest.reduce.labels import order_pairs
from harvest.settings.direction import DirectionSettings
from harvest.store import layout
from harvest.store.examples import StoredExamples
from harvest.store.files import Files

TokenGroups = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
"""Direction -> token ids of A and B."""


def place_of(settings: DirectionSettings) -> str:
    """What stands for the name of the activations: `input_embedding` or `output_embedding`."""
    return f"{settings.embedding}_embedding"


def holds_embeddings(shard: Shard, files: Sequence[SourceFile]) -> bool:
    """Whether the shard is the dataset's first, which there always is."""
    return shard.index == 0 and shard.file == next(file.number for file in files if file.rows != 0)


def embedded(directions: Sequence[DirectionSettings], groups: TokenGroups, model: Any) -> dict[str, KeptExamples]:
    """Direction -> its tokens as examples, A before B: `document` is the id, `position` the place in the group.

    Raises RequestError for a model whose table is no plain weight.
    """
    found = {}
    for settings in directions:
        if settings.embedding is None:
            continue
        a, b = groups[settings.name]
        rows = embedding_rows(model, settings.embedding, [*a, *b], f"direction {settings.name!r}")
        group = np.repeat(np.array([0, 1], np.int8), [len(a), len(b)])
        keys: dict[str, np.ndarray | Sequence[str | None]] = {
            "read": [""] * len(group),
            "document": np.array([*a, *b], np.int64),
            "variant": np.zeros(len(group), np.int8),
            "position": np.concatenate([np.arange(len(a)), np.arange(len(b))]).astype(np.int32),
            "group": group,
            "weight": np.ones(len(group)),
            "logit_diff": [None] * len(group),
            "held_out": np.zeros(len(group), bool),
            "pair": order_pairs(group) if settings.pair == "order" else [None] * len(group),
        }
        found[settings.name] = KeptExamples(keys=keys, states={place_of(settings): rows.numpy()})
    return found


def token_directions(
    files: Files, records: Sequence[ShardRecord], settings: DirectionSettings
) -> tuple[dict[str, Direction], list[dict[str, int | str]]]:
    """(mode -> direction, the tokens with their groups), as `concept_direction` makes them of the same rows.

    `records` are the committed shards in dataset order; without the first there is none yet.
    """
    name = layout.examples_name(settings.name)
    record = next((record for record in records if name in record.objects), None)
    if record is None:
        why = "no committed shard holds the rows of the embedding, as the dataset's first one does"
        return {mode: undefined(mode, why, _NOTHING) for mode in settings.modes}, []
    kept = StoredExamples(files, f"{layout.attempt_path(record.attempt)}/{name}")
    group = kept.keys["group"]
    rows = torch.from_numpy(kept.states(place_of(settings), np.arange(len(kept))))
    found: dict[str, Direction] = {}
    for mode in settings.modes:
        try:
            found[mode] = concept_direction(rows, group, pairs=kept.pair, mode=mode)
        except RequestError as error:
            raise DamageError(f"{kept.where}: {error}") from None
    tokens = zip(kept.keys["document"].tolist(), group.tolist())
    return found, [{"token": token, "group": "AB"[letter]} for token, letter in tokens]


_NOTHING = Counts(rows=(0, 0), weights=(0.0, 0.0))
