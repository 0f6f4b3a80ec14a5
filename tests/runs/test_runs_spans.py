"""Spans in whole runs: which rows are stored and what the table says of each, by plain tokenizer and plain hooks."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from commandcase import jsonl
from oracle import TOLERANCE_TINY, alone, worst_error
from plainrun import PlainRun, first_difference
from runcase import job, run
from tiny import CHAT_TEMPLATE, byte_tokenizer, tiny_llama

import harvest
from harvest.checking.verify import verify_run
from harvest.errors import RequestError

TEXTS = ["the quick fox", "née à Paris", "ab", "of a café", "none here", "x"]
SPANS = [
    [{"name": "noun", "start": 10, "end": 13}, {"name": "all", "start": 0, "end": 13}],
    [{"name": "place", "start": 6, "end": 11}],
    [{"name": "noun", "start": 0, "end": 1}, {"name": "place", "start": 1, "end": 2}],
    [{"name": "noun", "start": 5, "end": 9}],
    [],
    None,
]


def rows() -> list[dict[str, Any]]:
    return [{"text": text, "marks": spans} for text, spans in zip(TEXTS, SPANS)]


def spans_of(path: Path, plain: PlainRun) -> list[str | None]:
    """The span of every row, as Parquet holds it (numpy has no null)."""
    attempts = [record["attempt"] for record in plain.records.values()]
    tables = [pq.read_table(path / "shards" / attempt / "tokens.parquet", columns=["span"]) for attempt in attempts]
    return [span for table in tables for span in table.column("span").to_pylist()]


def expected_positions(text: str, spans: Any, names: set[str]) -> list[int]:
    places = byte_tokenizer()(text, return_offsets_mapping=True)["offset_mapping"]
    wanted = [s for s in spans or [] if s["name"] in names]
    return [i for i, (a, b) in enumerate(places) if b > a and any(a < s["end"] and b > s["start"] for s in wanted)]


def test_rows_by_span_are_the_hooks_rows_at_the_tokenizers_own_offsets(tmp_path: Path) -> None:
    model, data = tiny_llama(vocab=300), {"spans": "marks"}
    positions = {"positions": {"span": ["noun", "place"]}}
    plain = run(tmp_path / "run", rows(), model=model, data=data, capture=positions, store={"shard_documents": 2})
    for document, (text, spans) in enumerate(zip(TEXTS, SPANS)):
        at = expected_positions(text, spans, {"noun", "place"})
        assert plain.tokens["position"][plain.tokens["document"] == document].tolist() == at
        seen = alone(model, byte_tokenizer()(text)["input_ids"], ["residual.2"])["residual.2"][at]
        assert worst_error(torch.from_numpy(plain.of(document, "residual.2").copy()), seen) < TOLERANCE_TINY
    skipped = [row for row in plain.documents if row["status"] == "skipped"]
    assert [(row["document"], row["reason"]) for row in skipped] == [
        (4, "no token in span noun or place"),
        (5, "no token in span noun or place"),
    ]
    assert not verify_run(tmp_path / "run").findings


def test_the_table_says_which_span_each_row_is_in_across_shards_of_other_names(tmp_path: Path) -> None:
    run(tmp_path / "run", rows(), data={"spans": "marks"}, store={"shard_documents": 1})
    opened = harvest.open(tmp_path / "run")
    table = opened.tokens()
    assert table.schema.names == ["document", "position", "token", "chunk", "special", "span"]
    assert table.schema.field("span").type == pa.dictionary(pa.int32(), pa.string())
    spans = table.column("span").to_pylist()
    assert spans[:14] == [None, *["all"] * 10, *["noun"] * 3]  # "noun" lies within "all"
    assert set(spans) == {None, "all", "noun", "place"}
    for names in [{"noun"}, {"place"}]:
        rows_of = np.flatnonzero([span in names for span in spans])
        found = opened.tokens(rows_of, ["document", "position"])
        expected = [
            (document, at)
            for document, (text, marks) in enumerate(zip(TEXTS, SPANS))
            for at in expected_positions(text, marks, names)
        ]
        assert list(zip(found["document"].to_pylist(), found["position"].to_pylist())) == expected
    mixed = [20, 3, 11]
    assert opened.tokens(mixed, ["span"]).column("span").to_pylist() == [spans[i] for i in mixed]
    assert opened.tokens(documents=[1], columns=["span"]).column("span").to_pylist() == spans[14:28]
    (chosen,) = [
        numbers for _, numbers in opened.batches("residual.0", where=pc.field("span") == "noun", with_rows=True)
    ]
    assert sorted(chosen.tolist()) == [i for i, span in enumerate(spans) if span == "noun"]


def test_a_chat_has_its_roles_in_the_table_and_a_plain_text_has_no_such_column(tmp_path: Path) -> None:
    chats = [
        {"m": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "user"}]},
        {"m": [{"role": "system", "content": "be"}, {"role": "user", "content": "s"}]},
    ]
    tokenizer = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    run(tmp_path / "chat", chats, tokenizer=tokenizer, data={"messages": "m"})
    table = harvest.open(tmp_path / "chat").tokens()
    texts: dict[tuple[int, str], str] = {}
    for row in table.to_pylist():
        if row["span"] is not None:
            key = row["document"], row["span"]
            texts[key] = texts.get(key, "") + tokenizer.decode([row["token"]])
    assert texts == {(0, "user"): "hi", (0, "assistant"): "user", (1, "system"): "be", (1, "user"): "s"}
    assert not verify_run(tmp_path / "chat").findings
    run(tmp_path / "text", ["ab"])
    assert "span" not in harvest.open(tmp_path / "text").tokens().column_names


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_spans_come_out_of_every_format_alike(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        jsonl(path, rows())
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows()), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "marks"])
            writer.writerows([[row["text"], json.dumps(row["marks"])] for row in rows()])
    found = run(tmp_path / "file", path, data={"spans": "marks"})
    objects = run(tmp_path / "objects", rows(), data={"spans": "marks"})
    spans = spans_of(tmp_path / "file", found)
    assert spans == spans_of(tmp_path / "objects", objects)
    assert set(spans) == {None, "all", "noun", "place"}
    assert found.rows["residual.2"].tobytes() == objects.rows["residual.2"].tobytes()


def test_the_same_job_gives_the_same_bits_twice_and_other_spans_are_another_job(tmp_path: Path) -> None:
    settings = {"data": {"spans": "marks"}, "store": {"shard_documents": 2}}
    once, again = (run(tmp_path / name, rows(), **settings) for name in ("a", "b"))
    assert first_difference(once, again) is None
    model, tokenizer = tiny_llama(vocab=300), byte_tokenizer()
    with pytest.raises(RequestError, match=r"data\.spans"):
        harvest.run(job(tmp_path / "a", store={"shard_documents": 2}), model=model, tokenizer=tokenizer, data=rows())


def test_a_column_of_spans_that_nobody_has_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="mark'"):
        run(tmp_path / "run", jsonl(tmp_path / "d.jsonl", rows()), data={"spans": "mark"})
    assert not (tmp_path / "run").exists()


def test_a_damaged_span_column_is_found(tmp_path: Path) -> None:
    run(tmp_path / "run", rows(), data={"spans": "marks"})
    (path,) = (tmp_path / "run").glob("shards/*/tokens.parquet")
    pq.write_table(pq.read_table(path).drop(["span"]), path)
    assert any(
        "tokens.parquet" in finding.object for finding in verify_run(tmp_path / "run").findings if finding.damage
    )


@pytest.mark.parametrize("batching", ["packed", "concatenated"])
def test_spans_stay_on_their_tokens_in_every_batching_and_a_separator_is_in_none(tmp_path: Path, batching: str) -> None:
    whole = run(tmp_path / "sorted", rows(), data={"spans": "marks"})
    other = run(tmp_path / "other", rows(), data={"spans": "marks"}, tokens={"batching": batching, "context": 16})

    expected = dict(zip(whole.keys, spans_of(tmp_path / "sorted", whole)))
    found = dict(zip(other.keys, spans_of(tmp_path / "other", other)))
    separators = [key for key in found if key not in expected]
    assert len(separators) == (len(TEXTS) if batching == "concatenated" else 0)
    assert found == expected | dict.fromkeys(separators)
    by_span = {"positions": {"span": ["noun"]}}
    picked = run(
        tmp_path / "noun",
        rows(),
        data={"spans": "marks"},
        tokens={"batching": batching, "context": 16},
        capture=by_span,
    )
    assert picked.keys == [
        (document, at)
        for document, (text, marks) in enumerate(zip(TEXTS, SPANS))
        for at in expected_positions(text, marks, {"noun"})
    ]


# ---- names that nothing has ------------------------------------------------------------------------------------------

CHATS = [
    {"m": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]},
    {"m": [{"role": "narrator", "content": "so"}, {"role": "user", "content": "s"}]},
]


def ask(path: Path, names: list[str], **data: Any) -> PlainRun:
    source, tokenizer = (CHATS, byte_tokenizer(chat_template=CHAT_TEMPLATE)) if "messages" in data else (rows(), "byte")
    return run(path, source, tokenizer=tokenizer, data=data, capture={"positions": {"span": names}})


@pytest.mark.parametrize("names", [["assitant"], ["answer", "anwser"], ["User"]])
def test_a_role_or_phase_that_no_chat_has_is_refused_before_anything_is_written(
    names: list[str], tmp_path: Path
) -> None:
    allowed = "allowed are .*answer, assistant, .*narrator, .*user"
    with pytest.raises(RequestError, match=rf"capture\.positions = .*'{names[-1]}' is neither a phase .*{allowed}"):
        ask(tmp_path / "run", names, messages="m")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["narrator", "tool", "reasoning"])
def test_a_role_that_the_first_chats_have_or_later_ones_may_have_is_taken(name: str, tmp_path: Path) -> None:
    plain = ask(tmp_path / "run", [name, "user"], messages="m")
    (record,) = plain.records.values()
    assert record["span_documents"] == {name: int(name == "narrator"), "user": 2}


def test_documents_are_counted_that_have_each_span_asked_for(tmp_path: Path) -> None:
    plain = ask(tmp_path / "run", ["noun", "nuon", "place"], spans="marks")
    (record,) = plain.records.values()
    expected = {
        name: sum(bool(expected_positions(text, spans, {name})) for text, spans in zip(TEXTS, SPANS))
        for name in ("noun", "nuon", "place")
    }
    assert record["span_documents"] == expected == {"noun": 3, "nuon": 0, "place": 2}
    run(tmp_path / "other", rows(), data={"spans": "marks"})
    assert [json.loads(p.read_text())["span_documents"] for p in (tmp_path / "other/ledger").iterdir()] == [{}]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_run_none_of_whose_rows_lies_in_a_span_verifies(dtype: str, tmp_path: Path) -> None:
    """Post-instruction tokens of chats: the template's own, outside every message."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    harvest.run(
        {
            "data": {"messages": "chat"},
            "chat": {"generation_prompt": True},
            "capture": {"positions": [-1]},
            "store": {"dtype": dtype},
            "run": {"path": tmp_path / "run"},
        },
        model=tiny_llama(vocab=300),
        tokenizer=tokenizer,
        data=[{"chat": [{"role": "user", "content": text}]} for text in TEXTS],
    )
    assert set(harvest.open(tmp_path / "run").tokens()["span"].to_pylist()) == {None}
    assert not verify_run(tmp_path / "run").findings
