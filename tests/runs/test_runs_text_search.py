"""Finding a text in the tokens of a run; plain search in the documents' own text is the judge."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandcase import jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from runcase import job
from tiny import byte_tokenizer, tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import harvest
from harvest.errors import RequestError
from harvest.reading.textsearch import _covered, _occurrences
from harvest.text.pieces import SPECIAL, pieces_of

TEXTS = ["a film in Paris", "Paris, Paris!", "par is", "naïve café ✓ naïve", "", "ParisParis", "aaaa"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    tiny_llama(layers=1, vocab=300).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    jsonl(folder / "texts.jsonl", [{"text": text} for text in TEXTS])
    settings = {
        "model": {"name": str(folder / "model")},
        "data": {"path": str(folder / "texts.jsonl")},
        "tokens": {"context": 8},
        "store": {"shard_documents": 3},
    }
    harvest.run(job(folder / "run", **settings))
    return folder / "run"


@pytest.fixture(scope="module")
def run(path: Path) -> Any:
    return harvest.open(path)


def expected(run: Any, text: str) -> list[int]:
    """A token is a byte here, and the first of a document is BOS."""
    table, found = run.tokens().to_pydict(), set()
    for document, whole in enumerate(TEXTS):
        data, wanted = whole.encode(), text.encode()
        for at in range(len(data) - len(wanted) + 1):
            if data[at : at + len(wanted)] == wanted:
                found |= {(document, at + 1 + i) for i in range(len(wanted))}
    keys = zip(table["document"], table["position"])
    return [row for row, key in enumerate(keys) if key in found]


@pytest.mark.parametrize("text", ["Paris", "naïve", "✓", "aa", "s,", "is", " ", "not there", "a film in Paris"])
def test_rows_are_those_of_the_bytes_of_every_occurrence(run: Any, text: str) -> None:
    assert run.find(text=text).tolist() == expected(run, text)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TEXTS), st.integers(0, 20), st.integers(1, 6))
def test_any_part_of_any_document_is_found(run: Any, whole: str, start: int, length: int) -> None:
    part = whole[start : start + length]
    if part:
        assert run.find(text=part).tolist() == expected(run, part) != []


def test_text_goes_with_document_and_token(run: Any) -> None:
    whole = expected(run, "Paris")
    tokens = run.tokens().column("token").to_pylist()
    documents = run.tokens().column("document").to_pylist()
    assert run.find(text="Paris", document=1).tolist() == [row for row in whole if documents[row] == 1]
    p = tokens[whole[0]]
    assert run.find(text="Paris", token=p).tolist() == [row for row in whole if tokens[row] == p]
    assert run.find(text="Paris", token=p, document=5).tolist() == [
        row for row in whole if tokens[row] == p and documents[row] == 5
    ]


@pytest.mark.parametrize("text", ["", 5, b"Paris", "\ud800"])
def test_what_is_no_text_is_refused(run: Any, text: Any) -> None:
    with pytest.raises(RequestError, match=r"find\(text="):
        run.find(text=text)


def test_a_run_whose_tokenizer_is_gone_changed_or_never_was_says_so(path: Path, tmp_path: Path) -> None:
    harvest.run(
        job(tmp_path / "ids", data={"ids": "ids"}), model=tiny_llama(layers=1), data=[{"ids": [5, 6]}], tokenizer=None
    )
    with pytest.raises(RequestError, match=r"tokens as text: .*find\(token=\.\.\.\) and tokens\(\) go by ids"):
        harvest.open(tmp_path / "ids").find(text="a")
    folder = path.parent / "model"
    saved = {file: file.read_bytes() for file in folder.iterdir()}
    try:
        byte_tokenizer(bos=False).save_pretrained(folder)
        with pytest.raises(RequestError, match="has another tokenizer than the run"):
            harvest.open(path).find(text="Paris")
    finally:
        for file, data in saved.items():
            file.write_bytes(data)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    vocabulary = {"<s>": 0, "▁Paris": 1, "is": 2, "<0xE2>": 3, "<0x9C>": 4, "<0x93>": 5, "▁": 6}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def wordpiece() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece({"[CLS]": 0, "par": 1, "##is": 2, "[UNK]": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, cls_token="[CLS]", unk_token="[UNK]")


def test_pieces_of_other_kinds_of_tokenizers_spell_their_bytes() -> None:
    assert pieces_of(sentencepiece_like()) == [SPECIAL, b" Paris", b"is", b"\xe2", b"\x9c", b"\x93", b" "]
    assert pieces_of(wordpiece()) == [SPECIAL, b" par", b"is", SPECIAL]
    tokenizer = byte_tokenizer()
    pieces = pieces_of(tokenizer)
    for text in TEXTS:
        assert b"".join(pieces[i] for i in tokenizer(text)["input_ids"][1:]) == text.encode()
    assert pieces[:2] == [SPECIAL, SPECIAL]


@settings(max_examples=400, deadline=None)
@given(st.text("ab", max_size=60), st.text("ab", min_size=1, max_size=9), st.integers(1, 6), st.data())
def test_tokens_of_overlapping_occurrences_are_found_each_once(whole: str, part: str, times: int, data: Any) -> None:
    """Cut anywhere into tokens, some of them empty; each start is tried one by one here."""
    wanted, text = (
        (part * times)[: data.draw(st.integers(1, 30))].encode(),
        whole.encode() + (part * 2 * times).encode(),
    )
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=40)))
    ends = np.array([*ends, len(text)])
    expected = set()
    for at in range(len(text)):
        if text[at : at + len(wanted)] == wanted:
            first, last = np.searchsorted(ends, [at, at + len(wanted) - 1], side="right")
            expected |= set(range(first, last + 1))
    assert _covered(text, wanted, ends).tolist() == sorted(expected)


def test_an_occurrence_over_two_documents_is_none(tmp_path: Path) -> None:
    """Without a BOS between them."""
    folder = tmp_path / "model"
    tiny_llama(layers=1, vocab=300).save_pretrained(folder)
    byte_tokenizer(bos=False).save_pretrained(folder)
    jsonl(tmp_path / "t.jsonl", [{"text": text} for text in ("aab", "aaa", "aaaa", "ba")])
    tables = {"model": {"name": str(folder)}, "data": {"path": str(tmp_path / "t.jsonl")}}
    harvest.run(job(tmp_path / "run", **tables))
    run = harvest.open(tmp_path / "run")
    assert run.find(text="aa").tolist() == [0, 1, *range(3, 10)]
    assert run.find(text="aaaa").tolist() == [6, 7, 8, 9]
    assert run.find(text="ba").tolist() == [10, 11]


@pytest.mark.parametrize("wanted", [b"ab" * 2_500, b"ab" * 2_500 + b"a"])
def test_what_a_long_repeating_text_takes_grows_with_the_tokens_alone(wanted: bytes) -> None:
    """A million occurrences of 5,000 bytes: in one search, and in a few bytes for each token."""
    ends = np.arange(1, 1_000_001)
    tracemalloc.start()
    covered = 1_000_000 - len(wanted) % 2
    assert len(_covered(b"ab" * 500_000, wanted, ends)) == covered
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20
    starts, stops = _occurrences(b"ab" * 500_000, wanted)
    assert (starts.tolist(), stops.tolist()) == ([0], [covered])
