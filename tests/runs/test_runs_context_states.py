"""Directions of states seen from a context: numpy's projection of the rows that the run stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commandcase import jsonl
from runcase import run
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.errors import RequestError, WorkError

AT = "residual.1"
RANDOM = np.random.default_rng(3)
ROWS = [
    {"text": "".join(RANDOM.choice(list("abcdef"), size=RANDOM.integers(4, 30))) + "xy"[i % 2], "label": str(i % 2)}
    for i in range(24)
]
GROUP = np.array([0 if row["label"] == "1" else 1 for row in ROWS])


def asked(read: Any, **more: Any) -> dict[str, Any]:
    positive, negative = {"positive": ["1"], "negative": ["0"]}.values()
    return {
        "name": "s",
        "column": "label",
        "positive": positive,
        "negative": negative,
        "read": read,
        "holdout": 0,
    } | more


def made(folder: Path, direction: dict[str, Any], rows: list[dict[str, Any]] = ROWS, **tables: Any) -> Any:
    source = jsonl(folder.parent / f"{folder.name}.jsonl", rows)
    return run(folder, source, directions=[direction], **{"capture": {"layers": [1]}, **tables}), harvest.open(folder)


def projected(s: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (s @ c) / (c @ c) * c


def expected(rows: list[np.ndarray], at: int, on: int) -> np.ndarray:
    states = np.stack([projected(r[at], r[on]) for r in rows])
    return np.asarray(states[GROUP == 0].mean(0) - states[GROUP == 1].mean(0))


@pytest.mark.parametrize(("at", "on"), [(-1, -2), (-1, 1), (2, -1), (0, 3), (-2, 0)])
@pytest.mark.parametrize("context", [64, 8])
def test_both_bases_are_numpys_on_the_stored_rows(tmp_path: Path, at: int, on: int, context: int) -> None:
    """The seed's two bases are `at` and `on` exchanged; windows of 8 put the two tokens into different ones."""
    tokens = {"context": context, "bos": "never"}
    plain, opened = made(tmp_path / "run", asked({"at": at, "on": on}), tokens=tokens)
    rows = [plain.of(number, AT).astype(np.float64) for number in range(len(ROWS))]
    found, wanted = opened.directions()["s"][AT], expected(rows, at, on)
    assert np.abs(found.raw - wanted).max() <= 1e-10 * np.abs(wanted).max()
    assert np.abs(wanted - expected(rows, on, at)).max() > 1e-3  # the other basis is something else


def test_a_list_of_reads_names_each_and_words_mean_places(tmp_path: Path) -> None:
    reads = ["last", {"at": "last", "on": "first"}, {"at": 1, "on": -1}]
    plain, opened = made(tmp_path / "run", asked(reads), capture={"layers": [1], "positions": "last"})
    found = opened.directions()["s"]
    assert list(found) == [f"{AT}@last", f"{AT}@-1.on.0", f"{AT}@1.on.-1"]
    every, _ = made(tmp_path / "all", asked("last"))
    rows = [every.of(number, AT).astype(np.float64) for number in range(len(ROWS))]
    for at, on in ((-1, 0), (1, -1)):
        wanted = expected(rows, at, on)
        assert np.abs(found[f"{AT}@{at}.on.{on}"].raw - wanted).max() <= 1e-10 * np.abs(wanted).max()
    assert len(plain.keys) == len(ROWS)  # the context's rows are read, not stored


def test_examples_and_shards_give_the_same_states(tmp_path: Path) -> None:
    more = {"modes": ["mean_difference", "whitened"], "holdout": 0.3}
    for size in (4096, 5):
        _, opened = made(tmp_path / f"{size}", asked({"at": -1, "on": 0}, **more), store={"shard_documents": size})
        found = opened.directions("whitened")["s"][AT]
        assert found.status == "ok"
        assert sum(found.counts.rows) + sum(found.evaluation.examples) == len(ROWS)


def test_a_document_without_both_tokens_is_named_or_counted_and_never_read_as_it_is(tmp_path: Path) -> None:
    rows = [*ROWS[:11], {"text": "ab", "label": "1"}]
    direction, tokens = asked({"at": -1, "on": 2}), {"bos": "never"}
    with pytest.raises(
        WorkError, match=r"document 11.*position -1 on position 2 of 2 tokens, which must be two tokens"
    ):
        made(tmp_path / "run", direction, rows, tokens=tokens)
    rows[11]["text"] = "abc"  # the last token is the one at 2
    with pytest.raises(WorkError, match="of 3 tokens, which must be two tokens"):
        made(tmp_path / "same", direction, rows, tokens=tokens)
    _, opened = made(tmp_path / "skip", direction, rows, tokens=tokens, data={"on_bad": "skip"})
    found = opened.directions()["s"][AT]
    assert sum(found.counts.rows) == 11
    assert found.counts.excluded == (1, 0)


def test_a_context_of_zeros_is_left_out_and_counted(tmp_path: Path) -> None:
    model, rows = tiny_llama(vocab=300), [dict(row) for row in ROWS]
    with torch.no_grad():
        model.model.embed_tokens.weight[byte_tokenizer()("\x01", add_special_tokens=False)["input_ids"][0]] = 0
    rows[4]["text"] = "\x01" + rows[4]["text"]
    source, capture = jsonl(tmp_path / "a.jsonl", rows), {"sites": ["embedding"]}
    direction = asked({"at": -1, "on": 0})
    run(tmp_path / "r", source, model=model, capture=capture, directions=[direction], tokens={"bos": "never"})
    found = harvest.open(tmp_path / "r").directions()["s"]["embedding"]
    assert sum(found.counts.rows) == 23
    assert found.counts.excluded == (0, 1)


@pytest.mark.parametrize(
    "read",
    [{"at": 1, "on": 1}, {"at": -1, "on": "last"}, {"at": 1}, {"on": 1}, {"at": 1.5, "on": 2}, {"at": 1, "to": 2}],
    ids=str,
)
def test_a_read_that_means_nothing_is_refused(tmp_path: Path, read: Any) -> None:
    with pytest.raises(RequestError, match=r"^directions\.0\.read.*(: allowed|; allowed| allowed are)"):
        made(tmp_path / "run", asked(read))
