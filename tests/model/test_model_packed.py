"""Packed windows: every site of a family that is let through equals the document alone; the others are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import APART, CONFIGS, DOCUMENTS, ENCODERS, HAVE, LEAK, NOT_IN_THE_TABLE, REFUSED, tiny_family
from oracle import TOLERANCE_TINY, at_names, worst_error

from harvest.model.capture import Capture
from harvest.model.packing import LEAKING, obstacle
from harvest.model.points import SITES, Name
from harvest.model.sites import resolve_names
from harvest.records import Window
from harvest.text.batch import pack_windows


def packed(model: Any, names: tuple[Name, ...], documents: list[list[int]], tokens: int) -> dict[str, torch.Tensor]:
    """Name -> rows of all documents in order, from rows of the longest document's length."""
    windows, row = [], 0
    for number, ids in enumerate(documents):
        keep = np.arange(len(ids), dtype=np.int32)
        windows.append(Window(ids=np.array(ids, dtype=np.int32), keep=keep, row=row, document=number))
        row += len(ids)
    (window,) = pack_windows(windows, tokens_per_batch=tokens, rows_per_window=10_000)
    into = {str(name): torch.full((row, name.width), float("nan")) for name in names}
    with Capture(model, names) as take:
        for batch in window.batches:
            take(batch, into)
    return into


def worst(model: Any, names: tuple[Name, ...], tokens: int) -> dict[str, float]:
    """Name -> largest error of a packed row against hooks on its document alone."""
    found, row = packed(model, names, DOCUMENTS, tokens), 0
    errors = dict.fromkeys(found, 0.0)
    for ids in DOCUMENTS:
        expected = at_names(model, ids, names)
        for name, rows in found.items():
            errors[name] = max(errors[name], worst_error(rows[row : row + len(ids)], expected[name]))
        row += len(ids)
    return errors


def names_of(family: str, model: Any) -> tuple[Name, ...]:
    return resolve_names(model, [site for site in SITES if site in HAVE[family]], "all")


@pytest.mark.parametrize("family", APART)
def test_every_site_of_windows_packed_under_eager_attention_equals_a_hook_on_each_alone(family: str) -> None:
    model = tiny_family(family, attn_implementation="eager")
    assert obstacle(model) is None
    for tokens in (13, 1000):  # a row a batch, and all rows in one
        errors = worst(model, names_of(family, model), tokens)
        assert max(errors.values()) < TOLERANCE_TINY, errors


LONG = {"gpt2": "n_positions", "gptj": "n_positions"}
"""Family -> what its config calls the number of positions; the others say `max_position_embeddings`."""
RNG = np.random.default_rng(1)
ROW = [RNG.integers(2, 60, length).tolist() for length in (600, *[20] * 30)]
"""Packed into two rows of 600 tokens."""


def far_in(family: str) -> float:
    """Largest error of documents that stand far along a packed row."""
    model = tiny_family(family, **{LONG.get(family, "max_position_embeddings"): 640})
    names = resolve_names(model, ["residual"], "all")
    found = packed(model, names, ROW, 2000)
    expected = [at_names(model, ids, names) for ids in ROW]
    return max(worst_error(rows, torch.cat([of[name] for of in expected])) for name, rows in found.items())


@pytest.mark.parametrize("family", sorted({*APART} - {"gemma3", "llava"}))  # whose text parts are here by themselves
def test_a_document_far_along_a_row_is_what_it_is_alone(family: str) -> None:
    assert far_in(family) < TOLERANCE_TINY


def test_alibi_of_falcon_would_not_be_right_far_along_a_row() -> None:
    assert far_in("falcon_serial") > 0.01


@pytest.mark.parametrize("family", [family for family in APART if family != "llava"])  # which is built without one
def test_the_head_which_only_the_whole_model_runs_is_packed_as_truly(family: str) -> None:
    model = tiny_family(family)
    errors = worst(model, resolve_names(model, ["module:lm_head"], "all"), 1000)
    assert errors["module:lm_head"] < TOLERANCE_TINY


@pytest.mark.parametrize("family", sorted(LEAK))
def test_a_family_that_is_refused_would_indeed_leak(family: str) -> None:
    model = tiny_family(family)
    assert max(worst(model, names_of(family, model), 1000).values()) > 0.1


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_what_leaks_is_named_with_the_reason(family: str) -> None:
    kind = CONFIGS[family][0]
    assert str(obstacle(tiny_family(family))).startswith(f"'{kind}'".removesuffix("'"))


@pytest.mark.parametrize("family", sorted({*NOT_IN_THE_TABLE} - {"t5"}))
def test_an_architecture_that_no_test_compares_is_not_packed(family: str) -> None:
    assert "is not in the table of architectures" in str(obstacle(tiny_family(family)))


def test_an_attention_that_no_test_compares_is_not_packed() -> None:
    model = tiny_family("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    assert "model.attention = 'flash_attention_2' is not one of 'eager', 'sdpa'" in str(obstacle(model))


def test_the_list_of_leaking_models_names_no_other() -> None:
    kinds = {tiny_family(family).config.get_text_config().model_type for family in LEAK - {*ENCODERS}}
    assert kinds == set(LEAKING)


def test_positions_that_run_on_or_a_cache_would_be_seen_here() -> None:
    """The comparison has teeth: the same rows with the cache left on, which switches the mask off, are off by 1."""
    model = tiny_family("llama")
    names = resolve_names(model, ["residual"], [-1])
    forward = model.model.forward

    def caching(**arguments: Any) -> Any:
        return forward(**{**arguments, "use_cache": True})

    model.model.forward = caching
    found = packed(model, names, DOCUMENTS, 1000)["residual.2"]
    model.model.forward = forward
    expected = torch.cat([at_names(model, ids, names)["residual.2"] for ids in DOCUMENTS])
    assert worst_error(found, expected) > 0.1
