"""Batchings as whole runs: packed rows are the sorted ones, the stream's rows are a hooked forward of the stream."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_family
from oracle import TOLERANCE_TINY, alone, worst_error
from plainrun import PlainRun, first_difference, read_plain
from runcase import Died, Failing, bury, errors_alone, install, job, run
from tiny import BOS, EOS, amplify, byte_tokenizer, tiny_llama
from transformers import FNetConfig, FNetModel

import harvest
from harvest.checking.verify import verify_run
from harvest.errors import HarvestError, RequestError, WorkError
from harvest.model import capture, packing

GENERATOR = np.random.default_rng(3)
DOCUMENTS = [GENERATOR.integers(2, 60, length).tolist() for length in [3, 11, 1, 30, 7, 7, 19, 2, 2, 5, 24, 1, 13] * 3]
SMALL = {"tokens": {"batch": 64}, "store": {"shard_documents": 8}}


def run_ids(path: Path, documents: list[list[int]], batching: str, **tables: Any) -> PlainRun:
    """A run over token ids; without a model of the caller's the plain one of 64 tokens."""
    model = tables.pop("model", None) or tiny_llama()
    tables = {**SMALL, **tables, "data": {"ids": "input_ids", **tables.get("data", {})}}
    tables["tokens"] = {**SMALL["tokens"], **tables["tokens"], "batching": batching}
    return run(path, [{"input_ids": ids} for ids in documents], model=model, tokenizer=None, **tables)


def resolved(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "run.json").read_text())["plan"]["resolved"]
    return found


# ---- packed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"capture": {"positions": "last"}},
        {"capture": {"positions": {"every": 3}, "exclude": [5, 6, 7, 8]}},
        {"tokens": {"context": 8, "bos": "window"}},
    ],
    ids=["all", "last", "some", "windows"],
)
def test_packed_rows_are_those_of_sorted_and_of_each_document_alone(tables: dict[str, Any], tmp_path: Path) -> None:
    a, b = (run_ids(tmp_path / batching, DOCUMENTS, batching, **tables) for batching in ("sorted", "packed"))
    assert a.keys == b.keys
    assert len(a.records) == len(b.records) == 5
    assert a.documents == b.documents
    for column in a.tokens:
        np.testing.assert_array_equal(a.tokens[column], b.tokens[column])
    for name in a.rows:
        assert worst_error(torch.from_numpy(b.rows[name]), torch.from_numpy(a.rows[name])) < TOLERANCE_TINY
    if not tables:
        assert errors_alone(b, tiny_llama(), dict(enumerate(DOCUMENTS))) < TOLERANCE_TINY
    assert not verify_run(tmp_path / "packed").damaged


def test_two_documents_in_a_row_do_not_see_each_other(tmp_path: Path) -> None:  # E24
    documents = [[5, 9, 17], [23, 31, 40], [7, 8, 9, 10, 11, 12]]
    plain = run_ids(tmp_path / "run", documents, "packed")
    assert errors_alone(plain, tiny_llama(), dict(enumerate(documents))) < TOLERANCE_TINY
    joined = alone(tiny_llama(), documents[0] + documents[1], ["residual.2"])["residual.2"][3:]
    assert worst_error(torch.from_numpy(plain.of(1, "residual.2")), joined) > 0.1


def test_chunks_of_packed_documents_are_each_itself_alone(tmp_path: Path) -> None:  # E35
    documents = [list(range(10, 22)), [5, 6, 7, 8, 9]]
    plain = run_ids(tmp_path / "run", documents, "packed", tokens={"context": 4})
    for document, ids in enumerate(documents):
        for start in range(0, len(ids), 4):
            expected = alone(tiny_llama(), ids[start : start + 4], ["residual.2"])["residual.2"]
            found = torch.from_numpy(plain.of(document, "residual.2")[start : start + 4])
            assert worst_error(found, expected) < TOLERANCE_TINY
    assert plain.tokens["chunk"].tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [0] * 4 + [1]


def test_half_precision_differs_by_its_rounding_alone(tmp_path: Path) -> None:  # E25
    model = tiny_llama(hidden_size=64, layers=4)
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        plain = run_ids(tmp_path / str(dtype), DOCUMENTS, "packed", model=model.to(dtype), store={"dtype": "float32"})
        errors[dtype] = errors_alone(plain, model, dict(enumerate(DOCUMENTS)), "residual.1")
    assert errors[torch.float32] < 1e-4
    assert errors[torch.bfloat16] < 5e-2


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("mamba", "'mamba' does not keep packed documents apart: its recurrent state runs on"),
        ("opt", "'opt' does not keep packed documents apart"),
        ("bloom", "'bloom' does not keep packed documents apart"),
        ("bert", "'bert' looks at the tokens on the right too"),
        ("helium", "'helium' is not in the table of architectures"),
    ],
)
def test_a_model_that_would_leak_is_refused_by_name_before_anything_is_written(
    family: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match=rf"tokens\.batching = 'packed': {why}.*allowed.* are 'auto', 'sorted'"):
        run_ids(tmp_path / "run", DOCUMENTS, "packed", model=tiny_family(family))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("family", ["mamba", "opt", "bloom", "gpt_oss"])
def test_a_leak_that_no_table_knows_is_caught_by_the_self_check(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "LEAKING", {})
    with pytest.raises(WorkError, match=r"self-check: residual\.\d of document \d+ differs by"):
        run_ids(tmp_path / "run", DOCUMENTS, "packed", model=tiny_family(family))
    assert not any((tmp_path / "run").glob("ledger/*"))


@pytest.mark.parametrize(
    "documents", [DOCUMENTS, DOCUMENTS[3:4], [[5, 6]] * 3, [[7, 8, 9], [1]], [[0, 5, 6, 7, 8, 9]] * 9]
)
def test_a_mask_of_ones_which_switches_the_isolation_off_is_caught_by_the_self_check(
    documents: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = capture.Capture._apart

    def leaking(self: Any, batch: Any) -> dict[str, torch.Tensor]:
        return {**apart(self, batch), "attention_mask": torch.ones(batch.input_ids.shape, dtype=torch.long)}

    monkeypatch.setattr(capture.Capture, "_apart", leaking)
    run_ids(tmp_path / "sorted", documents, "sorted")
    with pytest.raises(WorkError, match="self-check"):
        run_ids(tmp_path / "run", documents, "packed")


# ---- concatenated ------------------------------------------------------------------------------------------------


def stream_of(documents: list[list[int]], separator: list[int]) -> list[tuple[int, int, int]]:
    """(document, position, token) of the stream."""
    return [(d, p, i) for d, ids in enumerate(documents) for p, i in enumerate(ids + separator)]


def expected_rows(
    model: Any, stream: list[tuple[int, int, int]], context: int, bos: bool = False
) -> list[torch.Tensor]:
    """One row of residual.2 per token of the stream, from a hooked forward of each `context` tokens of it."""
    rows: list[torch.Tensor] = []
    while len(rows) < len(stream):
        own = bos and stream[len(rows)][2] != BOS
        cut = [i for _, _, i in stream[len(rows) : len(rows) + context - own]]
        rows += list(alone(model, [BOS] * own + cut, ["residual.2"])["residual.2"][own:])
    return rows


@pytest.mark.parametrize(
    ("separator", "bos"), [("eos", "auto"), ("bos", "auto"), ("none", "auto"), ("eos", "window"), ("bos", "window")]
)
def test_rows_of_the_stream_are_a_hooked_forward_of_that_very_stream(separator: str, bos: str, tmp_path: Path) -> None:
    tokens = {"context": 16, "separator": separator, "bos": bos}
    plain = run_ids(tmp_path / "run", DOCUMENTS, "concatenated", tokens=tokens)
    documents = [[BOS, *ids] for ids in DOCUMENTS] if bos == "window" else DOCUMENTS
    end = {"eos": [EOS], "bos": [BOS], "none": []}[separator]
    expected: list[torch.Tensor] = []
    for start in range(0, len(documents), 8):  # a shard is a stream of its own
        expected += expected_rows(tiny_llama(), stream_of(documents[start : start + 8], end), 16, bos == "window")
    stream = stream_of(documents, end)
    assert plain.keys == [(d, p) for d, p, _ in stream]
    assert plain.tokens["token"].tolist() == [i for _, _, i in stream]
    assert plain.tokens["special"].tolist() == [i in (BOS, EOS) for _, _, i in stream]
    assert worst_error(torch.from_numpy(plain.rows["residual.2"]), torch.stack(expected)) < TOLERANCE_TINY
    assert [row["rows"] - row["tokens"] for row in plain.documents] == [len(end)] * len(DOCUMENTS)
    assert not verify_run(tmp_path / "run").damaged
    summary = harvest.open(tmp_path / "run").summary()
    assert max(summary["self_check"].values()) < TOLERANCE_TINY


def test_later_documents_of_the_stream_see_earlier_ones_and_the_run_says_that_they_do(tmp_path: Path) -> None:  # E24
    documents = [[5, 9, 17], [23, 31, 40]]
    plain = run_ids(tmp_path / "run", documents, "concatenated")
    joined = alone(tiny_llama(), [5, 9, 17, EOS, 23, 31, 40, EOS], ["residual.2"])["residual.2"]
    assert worst_error(torch.from_numpy(plain.rows["residual.2"]), joined) < TOLERANCE_TINY
    assert errors_alone(plain, tiny_llama(), {0: [5, 9, 17, EOS]}) < TOLERANCE_TINY
    assert errors_alone(plain, tiny_llama(), {1: [23, 31, 40, EOS]}) > 0.1
    assert resolved(tmp_path / "run")["batching"] == "concatenated"


def test_bos_within_the_stream_is_excluded_wherever_it_stands(tmp_path: Path) -> None:  # E30
    model, texts = tiny_llama(vocab=300), ["abc", "def", "ghi"]
    tables: dict[str, Any] = {"tokens": {"batching": "concatenated", "context": 8}}
    whole = run(tmp_path / "whole", texts, model=model, **tables)
    plain = run(tmp_path / "run", texts, model=model, capture={"exclude": ["bos"]}, **tables)
    bos = whole.tokens["token"] == BOS
    assert bos.sum() == 3
    assert whole.tokens["position"][bos].tolist() == [0, 0, 0]
    for column in whole.tokens:
        np.testing.assert_array_equal(plain.tokens[column], whole.tokens[column][~bos])
    for name in whole.rows:
        np.testing.assert_array_equal(plain.rows[name], whole.rows[name][~bos])


@pytest.mark.parametrize("family", ["mamba", "opt", "bloom", "bert", "gpt2", "mixtral"])
def test_a_stream_needs_no_isolation_so_every_family_has_it(family: str, tmp_path: Path) -> None:
    plain = run_ids(tmp_path / "run", DOCUMENTS, "concatenated", model=tiny_family(family), tokens={"context": 16})
    assert plain.complete
    assert len(plain.keys) == sum(map(len, DOCUMENTS)) + len(DOCUMENTS)


def test_a_value_that_the_store_cannot_hold_is_named_by_its_document_in_the_stream(tmp_path: Path) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = 1e6
    documents = [[5, 6, 7], [8, 9], [10, 50, 11], [12]]
    for batching in ("concatenated", "packed"):
        with pytest.raises(WorkError, match=r"document 2: residual\.0 holds"):
            run_ids(tmp_path / batching, documents, batching, model=model, store={"dtype": "float16"})


# ---- all of them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", ["packed", "concatenated"])
def test_a_life_that_dies_anywhere_is_followed_by_the_same_bits(
    batching: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_ids(tmp_path / "clean", DOCUMENTS, batching)
    for at in (20, 47, 80):
        path = tmp_path / f"run-{at}"
        with monkeypatch.context() as patch:
            (made := install(patch, lambda files, at=at: Failing(files, at)))
            with contextlib.suppress(Died, HarvestError):
                run_ids(path, DOCUMENTS, batching)
            assert made[0].dead
        bury(path)
        assert first_difference(expected, run_ids(path, DOCUMENTS, batching)) is None


@pytest.mark.parametrize("batching", ["packed", "concatenated"])
def test_a_larger_limit_on_resume_gives_what_it_gives_at_once(batching: str, tmp_path: Path) -> None:
    for limit in (3, 12, 21):
        grown = run_ids(tmp_path / "grown", DOCUMENTS, batching, data={"limit": limit})
    assert first_difference(run_ids(tmp_path / "once", DOCUMENTS, batching, data={"limit": 21}), grown) is None


def test_the_batching_is_resolved_once_and_locked(tmp_path: Path) -> None:
    for batching, stands_for in {"auto": "sorted", "sorted": "sorted", "packed": "packed"}.items():
        run_ids(tmp_path / batching, DOCUMENTS, batching)
        assert resolved(tmp_path / batching)["batching"] == stands_for
    with pytest.raises(RequestError, match=r"tokens\.batching: 'auto' -> 'packed'"):
        run_ids(tmp_path / "auto", DOCUMENTS, "packed")


def test_a_stream_whose_separator_nobody_names_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    model = tiny_llama(vocab=300)
    model.config.eos_token_id = None
    with pytest.raises(RequestError, match=r"tokens\.separator = 'eos': .* allowed here are 'bos', 'none'"):
        harvest.run(
            job(tmp_path / "run", tokens={"batching": "concatenated"}), model=model, tokenizer=tokenizer, data=["a"]
        )
    assert read_plain(tmp_path / "run").records == {}


def test_where_padding_is_seen_the_self_check_names_the_way_out_and_that_is_true(tmp_path: Path) -> None:
    """Fourier transforms mix all positions of a forward, and know no mask."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3, "intermediate_size": 24}
    model = amplify(FNetModel(FNetConfig(**sizes, max_position_embeddings=64)))
    with pytest.raises(
        WorkError, match=r"self-check: residual\.\d of document .*; with tokens\.batch = 1 each runs alone"
    ):
        run_ids(tmp_path / "refused", DOCUMENTS, "sorted", model=model, tokens={})
    plain = run_ids(tmp_path / "alone", DOCUMENTS, "auto", model=model, tokens={"batch": 1})
    assert resolved(tmp_path / "alone")["batching"] == "single"
    for number, ids in enumerate(DOCUMENTS):
        seen: list[torch.Tensor] = []
        handle = model.encoder.layer[1].register_forward_hook(lambda _m, _a, out, seen=seen: seen.append(out[0]))
        with torch.no_grad():
            model(torch.tensor([ids]))
        handle.remove()
        assert worst_error(torch.from_numpy(plain.of(number, "residual.1")), seen[0][0]) < TOLERANCE_TINY
