"""Promises 1 and 3: whatever operation a life ends at, the lives that follow leave the rows and bits of a clean run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from commandcase import jsonl
from plainrun import PlainRun, attempts_without_record, first_difference, read_plain
from runcase import Died, Failing, bury, install, job, write_texts
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.checking.verify import verify_run
from harvest.errors import HarvestError, RequestError, WorkError

MODEL, TOKENIZER = tiny_llama(layers=2, vocab=300), byte_tokenizer()
TEXTS = ["abc", "", "a much longer text than the others", "d", "ee ee ee", "", "xyz" * 9, "k", "last one"]
SMALL = {"store": {"shard_documents": 3}, "tokens": {"context": 16, "batch": 48}, "capture": {"layers": [1]}}
STRIDE = {"dies": 1, "fails": 2}


def once(path: Path, objects: Any = None, **tables: Any) -> None:
    """One life."""
    harvest.run(job(path, **{**SMALL, **tables}), model=MODEL, tokenizer=TOKENIZER, data=objects)


def clean(path: Path, objects: Any = None, **tables: Any) -> PlainRun:
    """What a life that nothing happens to leaves."""
    once(path, objects, **tables)
    return read_plain(path)


def life(
    path: Path, objects: Any, at: int, *, monkeypatch: pytest.MonkeyPatch, dies: bool = True, **tables: Any
) -> bool:
    """One life whose operation `at` fails; whether it got that far."""
    with monkeypatch.context() as patch:
        made = install(patch, lambda files: Failing(files, at, dies=dies))
        with contextlib.suppress(Died, OSError, HarvestError):
            once(path, objects, **tables)
        bury(path)
        return len(made[0].log) > at


def check(path: Path, expected: PlainRun) -> None:
    found = read_plain(path)
    assert first_difference(expected, found) is None
    assert attempts_without_record(path) == []


@pytest.mark.parametrize("kind", ["dies", "fails"])
def test_a_life_that_ends_at_any_operation_of_the_store_is_mended_by_the_next(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = clean(tmp_path / "clean", list(TEXTS))
    assert len(expected.records) == 3
    at, reached = 0, True
    while reached:
        path = tmp_path / f"run-{at}"
        reached = life(path, list(TEXTS), at, dies=kind == "dies", monkeypatch=monkeypatch)
        once(path, list(TEXTS))
        check(path, expected)
        at += STRIDE[kind]
    assert at > 60, "the walk went over every write, close and rename of three shards"


def test_many_lives_that_each_die_a_little_later_end_as_one_that_never_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = clean(tmp_path / "clean", list(TEXTS))
    path, at, lives = tmp_path / "run", 0, 0
    while life(path, list(TEXTS), at, monkeypatch=monkeypatch):
        at, lives = at + 3, lives + 1
    assert lives >= 8
    check(path, expected)
    assert not verify_run(path).damaged


def test_a_folder_that_a_dead_life_had_not_yet_filled_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert life(tmp_path / "run", list(TEXTS), 40, monkeypatch=monkeypatch)
    empty = tmp_path / "run/shards/f00000-s000002.0123abcd-7"
    (empty / "residual.1").mkdir(parents=True)
    once(tmp_path / "run", list(TEXTS))
    assert not empty.exists()


def test_a_run_that_is_begun_anew_may_die_at_any_operation_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = clean(tmp_path / "clean", TEXTS[:4])
    anew, at, reached = {"run": {"overwrite": True}}, 0, True
    while reached:
        path = tmp_path / f"run-{at}"
        once(path, list(TEXTS))
        (path / "notes.txt").write_text("mine")
        reached = life(path, TEXTS[:4], at, monkeypatch=monkeypatch, **anew)
        once(path, TEXTS[:4], **anew)
        check(path, expected)
        assert (path / "notes.txt").read_text() == "mine"
        at += 1 if at < 12 else 13


def test_a_finished_run_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once(tmp_path / "run", list(TEXTS))
    made = install(monkeypatch, lambda files: Failing(files, None))
    once(tmp_path / "run", list(TEXTS))
    assert made[0].log == []


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "jsonl.gz"])
@pytest.mark.parametrize("at", [9, 33, 47])
def test_every_kind_of_file_resumes_where_its_ledger_ends(
    kind: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"data": {"path": str(write_texts(tmp_path, kind, TEXTS))}}
    expected = clean(tmp_path / "clean", **data)
    assert [row["document"] for row in expected.documents] == list(range(len(TEXTS)))
    assert life(tmp_path / "run", None, at, monkeypatch=monkeypatch, **data)
    once(tmp_path / "run", **data)
    check(tmp_path / "run", expected)


def test_all_kinds_of_file_hold_the_same_rows(tmp_path: Path) -> None:
    runs = [
        clean(tmp_path / kind.replace(".", "-"), data={"path": str(write_texts(tmp_path, kind, TEXTS))})
        for kind in ("jsonl", "csv", "parquet")
    ]
    for other in runs[1:]:
        assert first_difference(runs[0], other) is None
    by_hand = [len(text) + 1 if text else 0 for text in TEXTS]  # a BOS, then one token a byte
    assert [row["rows"] for row in runs[0].documents] == by_hand


@pytest.mark.parametrize(
    "data",
    [
        lambda: list(TEXTS),
        lambda: iter(TEXTS),
        lambda: lambda: ({"text": text} for text in TEXTS),
    ],
    ids=["list", "iterator", "function"],
)
@pytest.mark.parametrize("at", [20, 44])
def test_objects_of_known_and_unknown_length_resume(
    data: Callable[[], Any], at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = clean(tmp_path / "clean", data())
    assert [row["document"] for row in expected.documents] == list(range(len(TEXTS)))
    assert life(tmp_path / "run", data(), at, monkeypatch=monkeypatch)
    once(tmp_path / "run", data())
    check(tmp_path / "run", expected)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz"])
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"limit": 4}, {"limit": 8}),
        ({"limit": 3}, {"limit": 9}),
        ({"limit": 2}, {}),
        ({"max_tokens": 20}, {"max_tokens": 70}),
        ({"max_tokens": 1}, {"max_tokens": 45}),
        ({"max_tokens": 41}, {}),
        ({"limit": 7, "max_tokens": 45}, {"limit": 8, "max_tokens": 200}),
        ({"limit": 2, "sample": 0.6}, {"limit": 4, "sample": 0.6}),
    ],
)
@pytest.mark.parametrize("at", [None, 2, 5, 12])
def test_limits_that_grow_end_as_if_they_had_been_so_from_the_start(
    kind: str,
    first: dict[str, int],
    then: dict[str, int],
    at: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = str(write_texts(tmp_path, kind, TEXTS))
    expected = clean(tmp_path / "clean", data={"path": path, **then})
    once(tmp_path / "run", data={"path": path, **first})
    if at is not None:
        life(tmp_path / "run", None, at, monkeypatch=monkeypatch, data={"path": path, **then})
    once(tmp_path / "run", data={"path": path, **then})
    check(tmp_path / "run", expected)


def test_a_grown_limit_touches_no_shard_but_the_cut_one(tmp_path: Path) -> None:
    data = {"path": str(write_texts(tmp_path, "jsonl", TEXTS))}
    once(tmp_path / "run", data={**data, "limit": 5})
    before = read_plain(tmp_path / "run")
    once(tmp_path / "run", data={**data, "limit": 9})
    after = read_plain(tmp_path / "run")
    assert before.records["f00000-s000000"] == after.records["f00000-s000000"]
    assert before.records["f00000-s000001"] != after.records["f00000-s000001"]


@pytest.mark.parametrize("at", [12, 30])
def test_samples_and_bad_documents_are_the_same_after_a_death(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": f"text number {i}" if i % 7 else None} for i in range(40)]
    data = {"path": str(jsonl(tmp_path / "texts.jsonl", rows)), "sample": 0.5, "seed": 3, "on_bad": "skip"}
    tables = {"data": data, "store": {"shard_documents": 8}}
    expected = clean(tmp_path / "clean", **tables)
    assert 8 < len(expected.documents) < 32
    assert {row["reason"] for row in expected.documents} == {None, "null"}
    assert life(tmp_path / "run", None, at, monkeypatch=monkeypatch, **tables)
    once(tmp_path / "run", **tables)
    check(tmp_path / "run", expected)


def test_several_files_of_unequal_length_are_stored_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"a": 1, "b": 7, "c": 0, "d": 4}
    for name, count in counts.items():
        jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{name}{i}"} for i in range(count)])
    data = {"data": {"path": str(tmp_path / "*.jsonl")}}
    expected = clean(tmp_path / "clean", **data)
    ids = [file * 2**40 + row for file, count in enumerate(counts.values()) for row in range(count)]
    assert [row["document"] for row in expected.documents] == ids
    assert life(tmp_path / "run", None, 40, monkeypatch=monkeypatch, **data)
    once(tmp_path / "run", **data)
    check(tmp_path / "run", expected)


def test_a_record_that_cannot_be_written_is_a_failure_that_names_the_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = clean(tmp_path / "clean", list(TEXTS))

    class Failed(Failing):
        def operation(self, what: str) -> bool:
            super().operation(what)
            return what == "create ledger/f00000-s000001.json"

    with monkeypatch.context() as patch:
        install(patch, lambda files: Failed(files, dies=False))
        with pytest.raises(WorkError, match=r"shard f00000-s000001: OSError: .*Input/output error"):
            once(tmp_path / "run", list(TEXTS))
    once(tmp_path / "run", list(TEXTS))
    check(tmp_path / "run", expected)


def test_sums_without_rows_are_those_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean(tmp_path / "rows", list(TEXTS))
    sums = {**SMALL, "capture": {"layers": [1], "store": False}}
    assert life(tmp_path / "sums", list(TEXTS), 20, monkeypatch=monkeypatch, **sums)
    once(tmp_path / "sums", list(TEXTS), **sums)
    tables = [pq.read_table(tmp_path / name / "statistics.parquet") for name in ("rows", "sums")]
    assert tables[0].equals(tables[1])
    assert not list((tmp_path / "sums/shards").rglob("tokens.parquet"))


def test_a_run_in_memory_resumes_and_holds_the_rows_of_one_on_disk(tmp_path: Path) -> None:
    expected = clean(tmp_path / "clean", list(TEXTS))
    path: Any = "memory://exactly-once/run"
    once(path, list(TEXTS), data={"limit": 4})
    with pytest.raises(RequestError, match=r"data\.limit: 4 -> 3, which may only grow"):
        once(path, list(TEXTS), data={"limit": 3})
    once(path, list(TEXTS))
    opened = harvest.open(path)
    assert opened["residual.1"].numpy().tobytes() == expected.rows["residual.1"].tobytes()
    assert opened.documents().to_pylist() == expected.documents
    assert not verify_run(path).damaged
