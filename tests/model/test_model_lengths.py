"""Models whose positions turn with the longest sequence of a forward: every window is still what it is alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_family
from hypothesis import given
from hypothesis import strategies as st
from oracle import TOLERANCE_TINY, at_names, worst_error
from plainrun import read_plain

import harvest
from harvest.errors import RequestError
from harvest.model.capture import Capture
from harvest.model.lengths import switches
from harvest.model.sites import resolve_names
from harvest.records import Window
from harvest.text.batch import sort_windows

SWITCH = 12
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": SWITCH,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
BY_LAYER_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {**LONGROPE, "short_factor": [1.0] * 6, "long_factor": [4.0] * 6},
}
BUILDS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": SWITCH},
    "llama": {"rope_parameters": LONGROPE},
    "gemma3_text": {"rope_parameters": BY_LAYER_TYPE},
}
RNG = np.random.default_rng(5)
DOCUMENTS = [RNG.integers(2, 60, n).tolist() for n in (3, 11, 1, 30, 7, 12, 13, 19, 40, 12, 2)]


def run(path: Path, model: Any, **tokens: Any) -> Any:
    job = {"data": {"ids": "i"}, "tokens": tokens, "run": {"path": str(path), "threads": 1}}
    harvest.run(job, model=model, data=[{"i": ids} for ids in DOCUMENTS])
    return read_plain(path)


def worst(model: Any, plain: Any) -> float:
    names = resolve_names(model, ["residual"], "all")
    expected = [at_names(model, ids, names) for ids in DOCUMENTS]
    return max(
        worst_error(torch.from_numpy(plain.of(number, str(name))), rows[str(name)])
        for number, rows in enumerate(expected)
        for name in names
    )


@pytest.mark.parametrize("batching", ["sorted", "auto"])
@pytest.mark.parametrize("family", BUILDS)
def test_short_windows_beside_long_ones_are_as_alone(family: str, batching: str, tmp_path: Path) -> None:
    model = tiny_family(family, **BUILDS[family])
    assert worst(model, run(tmp_path / "run", model, batch=2000, batching=batching)) < TOLERANCE_TINY
    assert json.loads((tmp_path / "run/run.json").read_text())["plan"]["resolved"]["switches"] == [SWITCH]


def test_without_regard_to_the_switch_short_windows_are_wrong() -> None:
    """The comparison has teeth: all in one batch, the short ones turn with the longest."""
    model = tiny_family("phi3", **BUILDS["phi3"])
    names = resolve_names(model, ["residual"], [-1])
    for switched, right in (((SWITCH,), True), ((), False)):
        windows, row = [], 0
        for number, ids in enumerate(DOCUMENTS):
            keep = np.arange(len(ids), dtype=np.int32)
            windows.append(Window(ids=np.array(ids, dtype=np.int32), keep=keep, row=row, document=number))
            row += len(ids)
        (found,) = sort_windows(windows, tokens_per_batch=2000, rows_per_window=2000, switches=switched)
        into = {"residual.2": torch.empty(row, 16)}
        with Capture(model, names) as take:
            for batch in found.batches:
                take(batch, into)
        expected = torch.cat([at_names(model, ids, names)["residual.2"] for ids in DOCUMENTS])
        assert (worst_error(into["residual.2"], expected) < TOLERANCE_TINY) is right


def test_packing_is_refused_where_lengths_matter_and_true_where_they_cannot(tmp_path: Path) -> None:
    model = tiny_family("phi3", **BUILDS["phi3"])
    with pytest.raises(RequestError, match=r"tokens\.batching = 'packed': beyond 12 tokens .*at most 12"):
        run(tmp_path / "refused", model, batching="packed")
    assert not (tmp_path / "refused").exists()
    plain = run(tmp_path / "run", model, batching="packed", context=SWITCH, long="truncate")
    names = resolve_names(model, ["residual"], "all")
    for number, ids in enumerate(DOCUMENTS):
        for name, rows in at_names(model, ids[:SWITCH], names).items():
            if name != "last":
                assert worst_error(torch.from_numpy(plain.of(number, name)), rows) < TOLERANCE_TINY


def test_dynamic_frequencies_that_an_earlier_forward_let_grow_do_not_reach_the_run(tmp_path: Path) -> None:
    model = tiny_family("llama", rope_parameters=DYNAMIC)
    with torch.no_grad():
        model(torch.arange(2, 60).repeat(3)[None])  # far beyond its 64 positions
    assert worst(model, run(tmp_path / "run", model, batch=2000)) < TOLERANCE_TINY


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("lengths", [(3, 11), (12, 5), (20, 30), (13,), (12,)])
def test_sequences_of_one_side_are_as_alone_however_far_they_are_padded(lengths: tuple[int, ...], left: bool) -> None:
    model = tiny_family("llama", **BUILDS["llama"])
    ids, mask = np.zeros((len(lengths), 40), int), np.zeros((len(lengths), 40), int)
    for row, length in enumerate(lengths):
        at = slice(40 - length, 40) if left else slice(0, length)
        ids[row, at], mask[row, at] = RNG.integers(2, 60, length), 1
    ((_, _, found),) = harvest.capture_activations(model, ids, harvest.CaptureSpec(layers=[2]), mask)
    found = found.reshape(len(lengths), 40, -1)
    names = resolve_names(model, ["residual"], [2])
    for row in range(len(lengths)):
        real = mask[row] > 0
        expected = at_names(model, ids[row][real].tolist(), names)["residual.2"]
        assert worst_error(found[row][torch.from_numpy(real)], expected) < TOLERANCE_TINY


@pytest.mark.parametrize(("rope", "lengths"), [(LONGROPE, (3, 20)), (DYNAMIC, (65, 70))])
def test_sequences_of_both_sides_are_refused_in_one_batch(rope: Any, lengths: tuple[int, int]) -> None:
    model = tiny_family("llama", rope_parameters=rope)
    ids = np.full((2, lengths[1]), 5)
    mask = np.arange(lengths[1])[None] < np.array(lengths)[:, None]
    with pytest.raises(RequestError, match=rf"sequences of {lengths[0]} to {lengths[1]} tokens: beyond \d+ 'llama'"):
        harvest.capture_activations(model, ids, harvest.CaptureSpec(), mask)


def test_what_switches_is_told_from_the_config_alone() -> None:
    assert switches(tiny_family("llama").config, 64) == ()
    assert switches(tiny_family("gpt2").config, 64) == ()
    for family, more in BUILDS.items():
        config = tiny_family(family, **more).config
        assert switches(config, 64) == (SWITCH,)
        assert switches(config, SWITCH) == ()
    dynamic = tiny_family("llama", rope_parameters=DYNAMIC).config
    assert (switches(dynamic, 64), switches(dynamic, 67)) == ((), (64, 65, 66))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=25), st.lists(st.integers(1, 30), max_size=3, unique=True))
def test_no_batch_has_windows_or_padding_of_both_sides(lengths: list[int], limits: list[int]) -> None:
    limits.sort()
    windows = [
        Window(ids=np.arange(n, dtype=np.int32), keep=np.arange(n, dtype=np.int32), row=sum(lengths[:i]), document=i)
        for i, n in enumerate(lengths)
    ]
    seen: list[int] = []
    for stretch in sort_windows(windows, tokens_per_batch=64, rows_per_window=100, switches=limits):
        for batch in stretch.batches:
            width = batch.input_ids.shape[1]
            sides = {sum(limit < length for limit in limits) for length in [*batch.lengths.tolist(), width]}
            assert len(sides) == 1
            assert width <= max(lengths)
            assert batch.input_ids.size <= max(64, width)
            seen += (batch.rows + stretch.first_row).tolist()
    assert sorted(seen) == list(range(sum(lengths)))


GROWING = {
    "llama": {"rope_parameters": DYNAMIC, "max_position_embeddings": 8},
    "gemma3_text": {
        "rope_parameters": {"sliding_attention": BY_LAYER_TYPE["sliding_attention"], "full_attention": DYNAMIC},
        "max_position_embeddings": 8,
    },
}


@pytest.mark.parametrize("family", GROWING)
def test_a_longer_sequence_before_changes_nothing_and_the_model_is_left_as_found(family: str, tmp_path: Path) -> None:
    model, fresh = (tiny_family(family, **GROWING[family]) for _ in range(2))
    names, spec = resolve_names(model, ["residual"], "all"), harvest.CaptureSpec()
    documents = [list(range(5, 5 + length)) for length in (30, 13, 8, 9, 3)]
    expected = [at_names(copy.deepcopy(fresh), ids, names) for ids in documents]
    for ids, rows in zip(documents, expected):
        for layer, _, found in harvest.capture_activations(model, ids, spec):
            assert worst_error(found, rows[f"residual.{layer}"]) < TOLERANCE_TINY
    with torch.no_grad():
        model(torch.arange(2, 60)[None])
    grown = {name: buffer.clone() for name, buffer in model.named_buffers()}
    job = {"data": {"ids": "i"}, "run": {"path": str(tmp_path / "run"), "threads": 1}}
    harvest.run(job, model=model, data=[{"i": documents[2]}, {"i": documents[4]}])  # one fills the context
    plain = read_plain(tmp_path / "run")
    for number, rows in ((0, expected[2]), (1, expected[4])):
        for name in map(str, names):
            assert worst_error(torch.from_numpy(plain.of(number, name)), rows[name]) < TOLERANCE_TINY
    assert all(torch.equal(buffer, grown[name]) for name, buffer in model.named_buffers())
