"""Directions between groups of tokens: what numpy makes of the rows of the embedding, whoever holds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commandcase import jsonl
from plainrun import snapshot
from runcase import Died, Failing, bury, install, job, run
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.checking.repair import repair_run
from harvest.checking.verify import verify_run
from harvest.errors import RequestError

A_TEXTS, B_TEXTS = ["a", "c", "q"], ["b", "z", "7"]
TEXTS = [{"text": f"text {number}", "label": str(number % 2)} for number in range(12)]
ALL_MODES = ["mean_difference", "single_group", "paired_rejection", "whitened", "pca", "leace"]


def tokens(embedding: str | None = None, **more: Any) -> dict[str, Any]:
    which = {} if embedding is None else {"embedding": embedding}
    return {"name": "t", "positive": {"tokens": A_TEXTS, **which}, "negative": {"tokens": B_TEXTS, **which}, **more}


def ids(texts: list[str]) -> list[int]:
    return [byte_tokenizer()(text, add_special_tokens=False)["input_ids"][0] for text in texts]


def rows_of(model: Any, which: str = "input") -> tuple[np.ndarray, np.ndarray]:
    weight = (model.model.embed_tokens if which == "input" else model.lm_head).weight.detach().double().numpy()
    return weight[ids(A_TEXTS)], weight[ids(B_TEXTS)]


def made(folder: Path, direction: dict[str, Any], model: Any = None, **tables: Any) -> Any:
    model = tiny_llama(vocab=300) if model is None else model
    source = jsonl(folder.parent / "texts.jsonl", TEXTS)
    run(folder, source, model=model, directions=[direction], **{"capture": {"layers": [1]}, **tables})
    return harvest.open(folder)


@pytest.mark.parametrize("embedding", [None, "input", "output"])
def test_the_closed_forms_are_numpys_on_the_rows_of_the_table(tmp_path: Path, embedding: str | None) -> None:
    model = tiny_llama(vocab=300)
    modes = ["mean_difference", "single_group", "paired_rejection"]
    opened = made(tmp_path / "run", tokens(embedding, modes=modes, pair="order"), model)
    a, b = rows_of(model, embedding or "input")
    left = [x - (x @ y) / (y @ y) * y for x, y in zip(a, b)]
    at = f"{embedding or 'input'}_embedding"
    for mode, expected in zip(modes, (a.mean(0) - b.mean(0), a.mean(0), np.mean(left, axis=0))):
        found = opened.directions(mode)["t"]
        assert list(found) == [at]
        assert found[at].status == "ok"
        assert np.abs(found[at].raw - expected).max() <= 1e-12
        assert np.abs(found[at].vector - expected / np.linalg.norm(expected)).max() <= 1e-12
        assert found[at].counts.rows[0] == 3
        assert found[at].auroc is None


def test_every_mode_is_what_memory_gives_and_shards_and_other_directions_change_nothing(tmp_path: Path) -> None:
    model = tiny_llama(vocab=300)
    opened = made(tmp_path / "run", tokens(modes=ALL_MODES, pair="order"), model)
    a, b = rows_of(model)
    states, groups = np.concatenate([a, b]).astype(np.float32), [0, 0, 0, 1, 1, 1]
    for mode in ALL_MODES:
        expected = harvest.concept_direction(states, groups, pairs="order", mode=mode)
        found = opened.directions(mode)["t"]["input_embedding"]
        assert found.status == expected.status
        if expected.vector is not None:
            assert found.vector.tobytes() == expected.vector.tobytes()
    beside = {"name": "s", "column": "label", "positive": ["1"], "negative": ["0"], "holdout": 0}
    source = jsonl(tmp_path / "a.jsonl", TEXTS)
    directions = [beside, tokens(modes=ALL_MODES, pair="order")]
    run(tmp_path / "two", source, model=model, directions=directions, store={"shard_documents": 2})
    again = harvest.open(tmp_path / "two")
    assert again.directions()["s"]["residual.1"].status == "ok"
    name = "directions/t.safetensors"
    assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    held = sorted(path.parent.name[:14] for path in (tmp_path / "two").rglob("examples-t.arrow"))
    assert held == ["f00000-s000000"]


def test_bfloat16_weights_are_taken_exactly(tmp_path: Path) -> None:
    model = tiny_llama(vocab=300).to(torch.bfloat16)
    opened = made(tmp_path / "run", tokens(), model)
    a, b = rows_of(model)
    assert np.abs(opened.directions()["t"]["input_embedding"].raw - (a.mean(0) - b.mean(0))).max() <= 1e-15


def test_tied_tables_give_the_same_at_both_ends(tmp_path: Path) -> None:
    model = tiny_llama(vocab=300, tie_word_embeddings=True)
    one, other = (
        made(tmp_path / which, tokens(which), model).directions()["t"][f"{which}_embedding"]
        for which in ("input", "output")
    )
    assert one.vector.tobytes() == other.vector.tobytes()


def test_token_ids_are_taken_as_they_are_and_need_no_tokenizer(tmp_path: Path) -> None:
    model = tiny_llama(vocab=300)
    direction = {"name": "t", "positive": {"tokens": ids(A_TEXTS)}, "negative": {"tokens": ids(B_TEXTS)}}
    settings = job(tmp_path / "ids", data={"ids": "ids"}, directions=[direction])
    opened = harvest.run(settings, model=model, data=[{"ids": [5, 6, 7]}])
    a, b = rows_of(model)
    assert np.abs(opened.directions()["t"]["input_embedding"].raw - (a.mean(0) - b.mean(0))).max() <= 1e-12
    with pytest.raises(RequestError, match=r"'a': the model has no tokenizer; allowed are token ids"):
        harvest.run(job(tmp_path / "x", data={"ids": "ids"}, directions=[tokens()]), model=model, data=[{"ids": [5]}])
    assert not (tmp_path / "x").exists()


def test_the_card_names_the_tokens_and_the_table_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from harvest.__main__ import _status

    made(tmp_path / "run", tokens("output"))
    card = json.loads((tmp_path / "run/directions/t.json").read_text())
    assert card["tokens"] == [
        {"token": token, "group": letter} for letter, texts in (("A", A_TEXTS), ("B", B_TEXTS)) for token in ids(texts)
    ]
    assert card["directions"][0]["at"] == "output_embedding"
    assert card["best"] == {"mean_difference": None}
    assert _status(["directions", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "t: tokens 'a'/'c'/'q' against 'b'/'z'/'7'" in printed
    assert "output_embedding" in printed


def test_a_run_without_rows_keeps_them_and_a_killed_one_comes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, source = tiny_llama(vocab=300), jsonl(tmp_path / "a.jsonl", TEXTS)
    tables = {"capture": {"layers": [1], "store": False}, "directions": [tokens()], "store": {"shard_documents": 4}}
    run(tmp_path / "clean", source, model=model, **tables)
    with monkeypatch.context() as patched:
        stores = install(patched, Failing)
        run(tmp_path / "counted", source, model=model, **tables)
    for at in range(3, len(stores[0].log), max(1, len(stores[0].log) // 6)):
        folder = tmp_path / f"at-{at}"
        with monkeypatch.context() as patched:
            install(patched, lambda inner, at=at: Failing(inner, at))
            with pytest.raises(Died):
                run(folder, source, model=model, **tables)
        bury(folder)
        run(folder, source, model=model, **tables)
        name = "directions/t.safetensors"
        assert (folder / name).read_bytes() == (tmp_path / "clean" / name).read_bytes()
    before = snapshot(tmp_path / "clean")
    run(tmp_path / "clean", source, model=model, **tables)
    assert snapshot(tmp_path / "clean") == before


def test_damaged_rows_are_found_and_taken_again(tmp_path: Path) -> None:
    model = tiny_llama(vocab=300)
    made(tmp_path / "run", tokens(), model)
    (path,) = (tmp_path / "run").rglob("examples-t.arrow")
    good, direction = path.read_bytes(), (tmp_path / "run/directions/t.safetensors").read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert [finding.damage for finding in verify_run(tmp_path / "run").findings] == [True]
    repair_run(tmp_path / "run", model=model, tokenizer=byte_tokenizer())
    assert not verify_run(tmp_path / "run").findings
    (path,) = (tmp_path / "run").rglob("examples-t.arrow")
    assert path.read_bytes() == good
    assert (tmp_path / "run/directions/t.safetensors").read_bytes() == direction


def test_an_unfinished_run_says_when_the_rows_are_not_there_yet(tmp_path: Path) -> None:
    opened = made(tmp_path / "run", tokens(), store={"shard_documents": 4})
    assert opened.directions()["t"]["input_embedding"].status == "ok"
    (tmp_path / "run/complete.json").unlink()
    (tmp_path / "run/ledger/f00000-s000000.json").unlink()
    found = harvest.open(tmp_path / "run").directions()["t"]["input_embedding"]
    assert "no committed shard holds the rows" in found.status
    assert found.vector is None


def test_the_rows_are_held_by_the_first_file_that_has_any(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [])
    jsonl(tmp_path / "b.jsonl", TEXTS)
    jsonl(tmp_path / "c.jsonl", TEXTS)
    run(tmp_path / "run", str(tmp_path / "*.jsonl"), directions=[tokens()])
    assert harvest.open(tmp_path / "run").directions()["t"]["input_embedding"].status == "ok"
    assert len(list((tmp_path / "run").rglob("examples-t.arrow"))) == 1


@pytest.mark.parametrize(
    ("direction", "words"),
    [
        (tokens(column="label"), ["column = 'label'", "groups of tokens read none"]),
        (tokens(read="first"), ["read = 'first'", "leave it out"]),
        (tokens(weight="column:w"), ["weight = 'column:w'"]),
        (tokens(holdout=0.5), ["holdout = 0.5"]),
        (tokens(correct_only=True), ["correct_only = True"]),
        (tokens(pair="column:p"), ["pair = 'column:p'", "allowed is 'order'"]),
        (tokens(modes=["paired_rejection"]), ["needs pair"]),
        ({**tokens(), "negative": ["0"]}, ["both groups of tokens"]),
        ({**tokens(), "negative": "rest"}, ["both groups of tokens"]),
        ({**tokens(), "negative": None}, ["tokens of group B"]),
        ({**tokens(), "negative": {"tokens": ["b"], "embedding": "output"}}, ["one embedding"]),
        ({**tokens(), "positive": {"tokens": []}}, ["texts of one token each"]),
        ({**tokens(), "positive": {"tokens": "ab"}}, ["texts of one token each"]),
        (
            {**tokens(), "positive": {"tokens": ["a"], "table": 1}},
            ["positive.table: unknown setting", "tokens and embedding"],
        ),
        ({**tokens(), "positive": {"tokens": ["a"], "embedding": "both"}}, ["'output'"]),
        ({**tokens(), "positive": {"tokens": ["a", "xy"]}}, ["positive.tokens: 'xy' is 2 tokens", "'x' + 'y'"]),
        ({**tokens(), "positive": {"tokens": ["a", "b"]}}, ["negative.tokens: 'b'", "'b' in positive"]),
        ({**tokens(), "positive": {"tokens": ["a", "c", 66]}}, ["positive.tokens: 66 is token 66", "'a' in positive"]),
        ({**tokens(), "positive": {"tokens": [300]}}, ["positive.tokens: 300", "0 to 299"]),
        ({**tokens(), "positive": {"tokens": [-1]}}, ["positive.tokens: -1", "0 to 299"]),
        (
            {**tokens(pair="order", modes=["paired_rejection"]), "positive": {"tokens": ["a"]}},
            ["pair = 'order'", "1 tokens in positive and 3 in negative"],
        ),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_in_one_line_before_anything_is_written(
    tmp_path: Path, direction: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        made(tmp_path / "run", {key: value for key, value in direction.items() if value is not None})
    assert all(word in str(caught.value) for word in [*words, "t"]), caught.value
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
