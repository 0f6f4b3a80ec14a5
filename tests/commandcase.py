"""What tests of commands begin with: a folder with a model and texts, and a job file over it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tiny import byte_tokenizer, tiny_llama


def furnished(folder: Path, rows: Iterable[Any]) -> Path:
    """The folder, with a tiny model, its tokenizer and rows of a `text` column in it."""
    tiny_llama(vocab=300).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    jsonl(folder / "texts.jsonl", rows)
    return folder


def job_file(path: Path, place: Path, run: str | Path, *, shard_documents: int, on_bad: str = "fail") -> Path:
    """Writes a job over a furnished folder."""
    path.write_text(
        f'[model]\nname = "{place}/model"\n[data]\npath = "{place}/texts.jsonl"\non_bad = "{on_bad}"\n'
        f"[store]\nshard_documents = {shard_documents}\n[run]\npath = {json.dumps(str(run))}\nthreads = 1\n"
    )
    return path


def jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Writes JSON lines; half surrogates travel escaped."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
