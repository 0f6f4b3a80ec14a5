"""Contrast pairs: two texts of a row are two sequences of one document, in every table, sum and export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from commandcase import jsonl
from oracle import TOLERANCE_TINY, alone
from plainrun import PlainRun, first_difference, read_plain
from runcase import Died, Failing, bury, install, run, stacked
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.checking.repair import repair_run
from harvest.checking.verify import verify_run
from harvest.errors import RequestError, WorkError
from harvest.export.export import Request, export_run
from harvest.reduce.sample import held_out

AT = "residual.1"
ONE_NAME = {"layers": [1]}
CONTRAST = {"contrast": ["good", "bad"], "keep": ["k"]}
RANDOM = np.random.default_rng(3)


def pairs(count: int, longest: int = 20) -> list[dict[str, Any]]:
    """Two texts of other lengths in each row."""
    bodies = ["".join(RANDOM.choice(list("abcdef"), size=RANDOM.integers(1, longest))) for _ in range(2 * count)]
    return [{"bad": bodies[2 * i] + "x", "good": bodies[2 * i + 1] + "y", "k": i} for i in range(count)]


def asked(**more: Any) -> dict[str, Any]:
    return {"name": "s", "holdout": 0, **more}


def made(folder: Path, rows: list[dict[str, Any]], *directions: dict[str, Any], **tables: Any) -> tuple[PlainRun, Any]:
    source = jsonl(folder.parent / f"{folder.name}.jsonl", rows)
    tables = {"capture": ONE_NAME, **tables, "data": {**CONTRAST, **tables.get("data", {})}}
    plain = run(folder, source, directions=list(directions), **tables)
    return plain, harvest.open(folder)


def of(plain: PlainRun, document: int, variant: int, name: str = AT) -> np.ndarray:
    """float64 rows of one sequence."""
    tokens = plain.tokens
    return plain.rows[name][(tokens["document"] == document) & (tokens["variant"] == variant)].astype(np.float64)


def ends(plain: PlainRun, documents: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """float64 [n, d] of A and of B: the last row of each first and each second text."""
    a, b = (np.stack([of(plain, document, variant)[-1] for document in documents]) for variant in (0, 1))
    return a, b


def close(found: Any, expected: np.ndarray) -> None:
    assert found.status == "ok", found
    assert np.abs(found.raw - expected).max() <= 1e-10 * np.abs(expected).max()


@pytest.mark.parametrize("batching", ["sorted", "packed"])
def test_every_row_is_what_a_hook_on_its_text_alone_sees(tmp_path: Path, batching: str) -> None:
    rows, model = pairs(9), tiny_llama(vocab=300)
    plain, opened = made(tmp_path / "run", rows, tokens={"batching": batching}, store={"shard_documents": 4})
    tokenizer = byte_tokenizer()
    place = 0
    for document, row in enumerate(rows):
        for variant, column in enumerate(("good", "bad")):
            ids = tokenizer(row[column])["input_ids"]
            here = slice(place, place := place + len(ids))
            assert plain.tokens["token"][here].tolist() == ids
            assert plain.tokens["position"][here].tolist() == list(range(len(ids)))
            assert set(zip(plain.tokens["document"][here], plain.tokens["variant"][here])) == {(document, variant)}
            expected = alone(model, ids, [AT])[AT].double().numpy()
            errors = np.linalg.norm(plain.rows[AT][here] - expected, axis=1) / np.linalg.norm(expected, axis=1)
            assert errors.max() <= TOLERANCE_TINY
    assert place == len(opened)
    assert not verify_run(tmp_path / "run").findings


def test_documents_lists_both_sequences_and_counts_documents(tmp_path: Path) -> None:
    rows = pairs(6)
    _, opened = made(tmp_path / "run", rows, data={"limit": 5}, store={"shard_documents": 2})
    listed = opened.documents().to_pylist()
    assert [(row["document"], row["variant"], row["k"]) for row in listed] == [
        (document, variant, document) for document in range(5) for variant in (0, 1)
    ]
    lengths = [len(byte_tokenizer()(rows[d][c])["input_ids"]) for d in range(5) for c in ("good", "bad")]
    assert [row["tokens"] for row in listed] == [row["rows"] for row in listed] == lengths
    assert opened.summary()["documents"] == 5


def test_the_two_texts_of_a_row_are_the_groups_and_the_pair(tmp_path: Path) -> None:
    rows = pairs(24)
    modes = ["mean_difference", "single_group", "paired_rejection", "pca"]
    plain, opened = made(tmp_path / "run", rows, asked(modes=modes), store={"shard_documents": 5})
    a, b = ends(plain, list(range(24)))
    close(opened.directions()["s"][AT], a.mean(0) - b.mean(0))
    close(opened.directions("single_group")["s"][AT], a.mean(0))
    left = [x - (x @ y) / (y @ y) * y for x, y in zip(a, b)]
    close(opened.directions("paired_rejection")["s"][AT], np.mean(left, axis=0))
    _, _, axes = np.linalg.svd(a - b, full_matrices=False)
    found = opened.directions("pca")["s"][AT]
    assert abs(abs(found.vector @ axes[0]) - 1) < 1e-8
    assert found.counts.pairs == 24


def test_a_document_is_held_out_whole(tmp_path: Path) -> None:
    rows = pairs(80)
    plain, opened = made(tmp_path / "run", rows, asked(holdout=0.3))
    out = held_out(np.arange(80), [str(document) for document in range(80)], 0.3)
    assert 10 < out.sum() < 40
    a, b = ends(plain, list(range(80)))
    found = opened.directions()["s"][AT]
    close(found, a[~out].mean(0) - b[~out].mean(0))
    assert found.evaluation.examples == (int(out.sum()), int(out.sum()))
    along = [group[out] @ found.vector for group in (a, b)]
    assert found.auroc == pytest.approx(np.mean(along[0][:, None] > along[1]), abs=1e-12)


def test_every_token_can_be_an_example_and_then_there_are_no_pairs(tmp_path: Path) -> None:
    rows = pairs(12)
    plain, opened = made(tmp_path / "run", rows, asked(read="all"))
    stored, variant = stacked(plain, AT), plain.tokens["variant"]
    close(opened.directions()["s"][AT], stored[variant == 0].mean(0) - stored[variant == 1].mean(0))
    with pytest.raises(RequestError, match="paired_rejection with read = 'all'"):
        made(tmp_path / "pairs", rows, asked(read="all", modes=["paired_rejection"]))


def test_a_document_with_a_text_that_cannot_be_used_goes_whole_and_is_counted(tmp_path: Path) -> None:
    rows = pairs(10)
    rows[2]["bad"] = ""
    rows[5]["good"] = ""
    modes = ["mean_difference", "paired_rejection", "whitened"]
    plain, opened = made(tmp_path / "run", rows, asked(modes=modes), store={"shard_documents": 3})
    kept = [document for document in range(10) if document not in (2, 5)]
    assert sorted(set(plain.tokens["document"].tolist())) == kept
    skipped = [row for row in opened.documents().to_pylist() if row["status"] == "skipped"]
    assert [(row["document"], row["variant"], row["reason"]) for row in skipped] == [
        (2, 0, "empty in 'bad'"),
        (2, 1, "empty in 'bad'"),
        (5, 0, "empty in 'good'"),
        (5, 1, "empty in 'good'"),
    ]
    assert opened.summary()["skipped"] == {"empty in 'bad'": 1, "empty in 'good'": 1}
    a, b = ends(plain, kept)
    found = opened.directions()["s"][AT]
    close(found, a.mean(0) - b.mean(0))
    assert (found.counts.pairs, found.counts.dropped_pairs) == (8, 2)
    close(opened.directions("paired_rejection")["s"][AT], np.mean([x - (x @ y) / (y @ y) * y for x, y in zip(a, b)], 0))
    assert opened.directions("whitened")["s"][AT].counts.rows == (8, 8)


@pytest.mark.parametrize(("value", "words"), [(None, "null in 'bad'"), (["a"], "not text in 'bad'")], ids=str)
def test_a_text_that_is_none_stops_the_run_by_name_or_is_skipped(tmp_path: Path, value: Any, words: str) -> None:
    rows = pairs(6)
    rows[4]["bad"] = value
    with pytest.raises(WorkError) as caught:
        made(tmp_path / "fail", rows)
    assert all(word in str(caught.value) for word in ("document 4", "row 4", words)), caught.value
    _, opened = made(tmp_path / "skip", rows, data={"on_bad": "skip"})
    assert opened.summary()["skipped"] == {words: 1}


def test_a_run_that_died_at_any_write_comes_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, model = pairs(14), tiny_llama(vocab=300)
    source = jsonl(tmp_path / "a.jsonl", rows)
    tables: dict[str, Any] = {
        "data": CONTRAST,
        "capture": {"layers": [1], "pool": ["mean"]},
        "store": {"shard_documents": 5},
        "directions": [asked(modes=["mean_difference", "paired_rejection", "whitened"], holdout=0.3)],
    }
    clean = run(tmp_path / "clean", source, model=model, **tables)
    directions = {p.name: p.read_bytes() for p in (tmp_path / "clean/directions").iterdir()}
    with monkeypatch.context() as patched:
        stores = install(patched, Failing)
        run(tmp_path / "counted", source, model=model, **tables)
    operations = len(stores[0].log)
    for at in range(3, operations, max(1, operations // 4)):
        with monkeypatch.context() as patched:
            install(patched, lambda inner, at=at: Failing(inner, at))
            with pytest.raises(Died):
                run(tmp_path / f"at-{at}", source, model=model, **tables)
        bury(tmp_path / f"at-{at}")
        assert first_difference(clean, run(tmp_path / f"at-{at}", source, model=model, **tables)) is None
        assert {p.name: p.read_bytes() for p in (tmp_path / f"at-{at}/directions").iterdir()} == directions


@pytest.mark.parametrize("limits", [{"limit": 7}, {"max_tokens": 130}], ids=str)
def test_limits_cut_at_a_document_and_may_grow(tmp_path: Path, limits: dict[str, int]) -> None:
    rows, model = pairs(12), tiny_llama(vocab=300)
    source = jsonl(tmp_path / "a.jsonl", rows)
    tables: dict[str, Any] = {"capture": ONE_NAME, "store": {"shard_documents": 4}, "directions": [asked()]}
    cut = run(tmp_path / "run", source, model=model, data={**CONTRAST, **limits}, **tables)
    assert 0 < len(cut.documents) < 24
    assert len(cut.documents) % 2 == 0
    tokens = len(cut.tokens["token"])
    lengths = [sum(len(byte_tokenizer()(row[c])["input_ids"]) for c in ("good", "bad")) for row in rows]
    whole = np.cumsum(lengths)
    assert tokens == (whole[6] if "limit" in limits else whole[whole <= 130][-1])
    grown = run(tmp_path / "run", source, model=model, data=CONTRAST, **tables)
    assert first_difference(run(tmp_path / "whole", source, model=model, data=CONTRAST, **tables), grown) is None


def test_pools_and_features_have_a_row_for_each_sequence(tmp_path: Path) -> None:
    rows = pairs(7)
    rows[3]["good"] = ""
    capture = {"layers": [1], "pool": ["mean", "last"]}
    plain, opened = made(tmp_path / "run", rows, capture=capture, store={"shard_documents": 3})
    kept = [(document, variant) for document in range(7) if document != 3 for variant in (0, 1)]
    for pool, state in (("mean", lambda r: r.mean(0)), ("last", lambda r: r[-1]), ("max", lambda r: r.max(0))):
        features, labels = opened.features(AT, pool, labels=["document", "variant", "k"])
        assert list(zip(*(labels.column(c).to_pylist() for c in ("document", "variant")))) == kept
        expected = np.stack([state(of(plain, *key)) for key in kept])
        assert np.abs(features - expected).max() <= 1e-6 * np.abs(expected).max()
    assert not verify_run(tmp_path / "run").findings


def test_reading_keeps_the_sequences_of_a_document_apart(tmp_path: Path) -> None:
    rows = pairs(6)
    plain, opened = made(tmp_path / "run", rows)
    of_two = np.flatnonzero(plain.tokens["document"] == 2)
    assert opened.find(document=2).tolist() == of_two.tolist()
    assert opened.tokens(documents=2)["variant"].to_numpy().tolist() == plain.tokens["variant"][of_two].tolist()
    first_of_bad = int(of_two[plain.tokens["variant"][of_two] == 1][0])
    around = opened.context(first_of_bad, before=50, after=50)
    assert around["position"].to_pylist() == list(range(len(around)))
    assert set(around["variant"].to_pylist()) == {1}
    chosen = [
        r for _, found in opened.batches(AT, where=pc.field("variant") == 1, with_rows=True) for r in found.tolist()
    ]
    assert sorted(chosen) == np.flatnonzero(plain.tokens["variant"] == 1).tolist()


def test_an_export_knows_the_sequence_and_no_context_crosses_it(tmp_path: Path) -> None:
    rows = pairs(8)
    made(tmp_path / "run", rows)
    export_run(Request(run=str(tmp_path / "run"), format="npy", out=str(tmp_path / "out"), context=3))
    tokens = pq.read_table(tmp_path / "out/tokens.parquet")
    keys = np.stack([tokens[c].to_numpy() for c in ("document", "variant")], axis=1).reshape(-1, 3, 2)
    assert (keys == keys[:, :1]).all()
    position = tokens["position"].to_numpy().reshape(-1, 3)
    assert (np.diff(position, axis=1) == 1).all()


def test_damage_is_found_and_mended(tmp_path: Path) -> None:
    rows, model = pairs(8), tiny_llama(vocab=300)
    source = jsonl(tmp_path / "a.jsonl", rows)
    tables: dict[str, Any] = {"data": CONTRAST, "capture": ONE_NAME, "store": {"shard_documents": 4}}
    clean = run(tmp_path / "run", source, model=model, **tables)
    attempt = tmp_path / "run/shards" / clean.records["f00000-s000001"]["attempt"]
    (attempt / "tokens.parquet").write_bytes(b"no table")
    assert verify_run(tmp_path / "run").damaged
    repair_run(tmp_path / "run", model=model, tokenizer=byte_tokenizer())
    assert first_difference(clean, read_plain(tmp_path / "run")) is None


def test_a_table_that_mixes_the_sequences_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record vouches for what was written, so that only what the tables say of each other can tell."""
    from dataclasses import replace

    from harvest.shardwork import ShardWork

    listed = ShardWork._documents
    swapped = lambda work: [replace(row, variant=1 - row.variant) for row in listed(work)]  # noqa: E731
    monkeypatch.setattr(ShardWork, "_documents", swapped)
    made(tmp_path / "run", [{**row, "good": row["good"] + "aa"} for row in pairs(4, longest=2)])
    whats = [finding.what for finding in verify_run(tmp_path / "run").findings if finding.damage]
    assert any("variants 0 and 1" in what for what in whats)
    assert any("document 0, variant 0" in what for what in whats)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"data": {"contrast": ["good", "good"]}}, ["contrast", "two columns"]),
        ({"data": {"contrast": ["good"]}}, ["data.contrast"]),
        ({"data": {"contrast": ["good", "evil"]}}, ["'evil'", "good"]),
        ({"data": {"contrast": ["good", "bad"], "text": "good"}}, ["text and contrast"]),
        ({"data": {"contrast": ["good", "bad"], "spans": "k"}}, ["spans"]),
        (
            {"data": CONTRAST, "directions": [asked(column="k", positive=["1"], negative="rest")]},
            ["column = 'k'", "data.contrast"],
        ),
        ({"data": CONTRAST, "directions": [asked(pair="order")]}, ["pair = 'order'", "leave it out"]),
        (
            {"data": CONTRAST, "directions": [asked(weight="column:no")]},
            ["directions.0.weight = 'column:no'", "no such column"],
        ),
        ({"data": {"text": "good"}, "directions": [asked()]}, ["column and positive", "data.contrast"]),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    tmp_path: Path, tables: dict[str, Any], words: list[str]
) -> None:
    source = jsonl(tmp_path / "a.jsonl", pairs(4))
    with pytest.raises(RequestError) as caught:
        run(tmp_path / "run", source, **tables)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_groups_without_a_whole_document_are_refused(tmp_path: Path) -> None:
    rows = [{**row, "good" if row["k"] % 2 else "bad": ""} for row in pairs(6)]
    with pytest.raises(RequestError, match="in none of 6 documents do both texts"):
        made(tmp_path / "run", rows, asked())


def test_the_plan_counts_both_sequences(tmp_path: Path) -> None:
    from harvest.config import load_job
    from harvest.plan import make_plan

    rows, model = pairs(20), tiny_llama(vocab=300)
    source = jsonl(tmp_path / "a.jsonl", rows)
    settings = {"model": {"name": "m"}, "data": {"path": str(source), **CONTRAST}, "run": {"path": str(tmp_path / "r")}}
    plan = make_plan(load_job(settings), model=model, tokenizer=byte_tokenizer())
    tokens = sum(len(byte_tokenizer()(row[c])["input_ids"]) for row in rows for c in ("good", "bad"))
    assert (plan.estimate.documents, plan.estimate.tokens, plan.estimate.rows) == (20, tokens, tokens)
    read = make_plan(load_job({**settings, "directions": [asked()]}), model=model, tokenizer=byte_tokenizer())
    sums = read.estimate.state_bytes - plan.estimate.state_bytes
    assert read.estimate.store_bytes - plan.estimate.store_bytes == 20 * 2 * 3 * 16 * 4 + sums


def test_weights_and_what_is_held_out_may_come_from_columns(tmp_path: Path) -> None:
    rows = [{**row, "w": row["k"] % 3, "part": "test" if row["k"] % 4 == 0 else "train"} for row in pairs(16)]
    plain, opened = made(tmp_path / "run", rows, asked(weight="column:w", holdout="column:part"))
    a, b = ends(plain, list(range(16)))
    train, weight = np.arange(16) % 4 != 0, np.arange(16) % 3
    means = [np.average(group[train], axis=0, weights=weight[train]) for group in (a, b)]
    close(opened.directions()["s"][AT], means[0] - means[1])
    card = json.loads((tmp_path / "run/directions/s.json").read_text())
    assert card["directions"][0]["evaluation"]["examples"] == [4, 4]


def test_the_command_says_which_texts_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from harvest.__main__ import _status

    made(tmp_path / "run", pairs(8), asked())
    assert _status(["directions", str(tmp_path / "run")]) == 0
    assert "s: good against bad of each row" in capsys.readouterr().out
