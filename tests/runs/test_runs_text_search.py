"""Finding a text in the tokens of a run; plain search in the documents' own text is the judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runcase import job, jsonl
from tiny import byte_tokenizer, tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import harvest
from harvest.errors import RequestError
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


@pytest.mark.parametrize("text", ["", 5, b"Paris"])
def test_what_is_no_text_is_refused(run: Any, text: Any) -> None:
    with pytest.raises(RequestError, match=r"find\(text="):
        run.find(text=text)


def test_a_run_whose_tokenizer_is_gone_changed_or_never_was_says_so(path: Path, tmp_path: Path) -> None:
    harvest.run(
        job(tmp_path / "ids", data={"ids": "ids"}), model=tiny_llama(layers=1), data=[{"ids": [5, 6]}], tokenizer=None
    )
    with pytest.raises(RequestError, match=r"find\(text=...\): .*give token = an id"):
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
