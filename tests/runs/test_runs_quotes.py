"""Rows as text: what is quoted is the documents' own text, byte for byte, and what is not stored is not made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commandcase import jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from runcase import job
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.errors import RequestError
from harvest.reading.quote import spelled

TEXTS = ["a film in Paris", "naïve café ✓ naïve", "b", "aaaa", "漢字"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quotes")
    tiny_llama(layers=1, vocab=300).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    jsonl(folder / "texts.jsonl", [{"text": text, "again": text[::-1]} for text in TEXTS])
    return folder


def harvested(place: Path, name: str, **tables: Any) -> harvest.Run:
    data = {"path": str(place / "texts.jsonl"), **tables.pop("data", {})}
    told = {"model": {"name": str(place / "model")}, "tokens": {"context": 8}, "store": {"shard_documents": 2}}
    harvest.run(job(place / name, data=data, **told, **tables))
    return harvest.open(place / name)


@pytest.fixture(scope="module")
def run(place: Path) -> harvest.Run:
    return harvested(place, "run")


def test_the_text_of_a_document_is_its_own_behind_the_bos(run: harvest.Run) -> None:
    assert [run.text(number) for number in range(len(TEXTS))] == [f"⟨0⟩{text}" for text in TEXTS]


@settings(max_examples=80, deadline=None)
@given(row=st.integers(0, 56), before=st.integers(0, 30), after=st.integers(0, 30))
def test_a_quote_is_the_part_of_the_documents_bytes_that_lies_around_its_row(
    run: harvest.Run, row: int, before: int, after: int
) -> None:
    row %= len(run)
    at = run.tokens(row, ["document", "position"]).to_pylist()[0]
    data = TEXTS[at["document"]].encode()  # a token is a byte here; the BOS is position 0
    place = at["position"] - 1
    found = run.quote(row, before, after)
    assert (found.document, found.position) == (at["document"], at["position"])
    first = max(0, place - before)
    expected = data[first : max(0, place + 1 + after)].decode(errors="replace")
    if place - before < 0:
        expected = "⟨0⟩" + expected
    assert found.before + found.token + found.after == expected
    assert str(found) == f"{found.before}[{found.token}]{found.after}"
    if place >= 0 and data[place] < 128:
        assert found.token == chr(data[place])


def test_a_letter_of_several_tokens_stands_at_its_last_one(run: harvest.Run) -> None:
    (first, second) = run.find(text="ï", document=1)[:2]
    assert [run.quote(int(row), 2, 2).token for row in (first, second)] == ["", "ï"]
    assert str(run.quote(int(first), 2, 0)) == "na[\ufffd]", "half of it is no letter"


def test_what_is_not_stored_is_a_gap_and_never_joined_over(place: Path) -> None:
    run = harvested(place, "every", capture={"positions": {"every": 4}})
    assert run.text(0) == "⟨0⟩…i…i…a"
    assert run.text(2) == "⟨0⟩"
    assert str(run.quote(2, 1, 1)) == "i…[i]…a"
    last = harvested(place, "last", capture={"positions": "last"})
    assert [last.text(0), last.text(3)] == ["…s", "…a"]


def test_of_a_contrast_each_sequence_has_its_text(place: Path) -> None:
    run = harvested(place, "pair", data={"contrast": ["text", "again"]})
    assert [run.text(0), run.text(0, variant=1)] == ["⟨0⟩a film in Paris", "⟨0⟩siraP ni mlif a"]
    row = int(run.find(text="siraP")[0])
    assert str(run.quote(row, 30, 1)) == "⟨0⟩[s]i"


@pytest.mark.parametrize("number", [5, 2**40, -1])
def test_a_document_without_a_stored_token_is_refused(run: harvest.Run, number: int) -> None:
    with pytest.raises(RequestError, match=rf"text\({number}\): no token of it is stored"):
        run.text(number)


@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_what_is_no_number_of_tokens_is_refused(run: harvest.Run, count: Any) -> None:
    for asked in (run.quote, run.context):
        with pytest.raises(RequestError, match=r"(before|after) = .*: allowed are whole numbers of at least 0"):
            asked(0, count)
        with pytest.raises(RequestError, match="after = "):
            asked(0, 1, count)


def test_several_runs_quote_their_rows_and_leave_documents_to_each(place: Path, run: harvest.Run) -> None:
    other = harvested(place, "other", data={"limit": 2})
    both = harvest.open([run, other])
    assert str(both.quote(len(run) + 3)) == str(other.quote(3)) == str(run.quote(3))
    assert str(both.quote(len(run) - 1, 2, 5)) == str(run.quote(len(run) - 1, 2, 5)), "and no row of the next run"
    with pytest.raises(RequestError, match=r"text\(0\): each run has its own documents"):
        both.text(0)
    joined = harvest.join(run, harvested(place, "mlp", capture={"sites": ["mlp"]}))
    assert joined.text(0) == run.text(0)


def test_a_token_that_spells_nothing_and_a_gap_both_end_a_letter() -> None:
    pieces = [b"a", "é".encode()[:1], "é".encode()[1:], b"\xff"]
    assert spelled([1, 3], pieces) == ["\ufffd", "⟨3⟩"]
    assert spelled([0, 1, 2], pieces, [False, False, True]) == ["a", "\ufffd", "\ufffd"]
    assert spelled([0, 1], pieces) == ["a", "\ufffd"]
    assert spelled([], pieces) == []
