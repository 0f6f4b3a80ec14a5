"""What `data.path`, `data.files` and the columns name is found, or refused in one line that says what exists."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harvest.errors import RequestError
from harvest.settings.base import shown
from harvest.settings.tables import DataSettings
from harvest.source import hub
from harvest.source.open import open_source
from harvest.source.places import Place


def lines(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def names_and_texts(columns: tuple[str, ...] = ("text",), **data: Any) -> list[tuple[str, list[Any]]]:
    source = open_source(DataSettings(**data), columns)
    assert [file.number for file in source.files] == list(range(len(source.files)))
    return [(f.name, [row.values[columns[0]] for row in source.rows(f.number, 0, 2**30)]) for f in source.files]


def refusal(columns: tuple[str, ...] = ("text",), **data: Any) -> str:
    with pytest.raises(RequestError) as error:
        _ = open_source(DataSettings(**data), columns).files
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "data" / ".cache").mkdir()
    (tmp_path / "data" / "train-2.jsonl").write_text(lines("c"))
    (tmp_path / "data" / "train-10.jsonl").write_text(lines("b"))
    (tmp_path / "data" / "sub" / "test.jsonl").write_text(lines("d"))
    (tmp_path / "data" / ".cache" / "x.jsonl").write_text(lines("hidden"))
    (tmp_path / "data" / "README.md").write_text("# data")
    return tmp_path / "data"


def test_folders_globs_and_lists_are_sorted_by_name(folder: Path) -> None:
    everything = [("sub/test.jsonl", ["d"]), ("train-10.jsonl", ["b"]), ("train-2.jsonl", ["c"])]
    assert names_and_texts(path=str(folder)) == everything
    assert names_and_texts(path=f"{folder}/*.jsonl") == everything[1:]
    assert names_and_texts(path=f"{folder}/**/*.jsonl") == everything
    assert names_and_texts(path=f"{folder}/train-2.jsonl") == everything[2:]
    assert names_and_texts(path=str(folder), files=["train-2.jsonl", "sub/*.jsonl", "train-2.jsonl"]) == [
        everything[0],
        everything[2],
    ]
    assert names_and_texts(path=str(folder), files={"x": "train-2.jsonl", "y": ["sub/*"]}, split="y") == everything[:1]


def test_relative_paths_and_an_existing_name_with_brackets_are_taken_as_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    (folder / "a[1].jsonl").write_text(lines("bracket"))
    assert names_and_texts(path="data/a[1].jsonl") == [("a[1].jsonl", ["bracket"])]
    assert names_and_texts(path="data/sub") == [("test.jsonl", ["d"])]


def test_a_split_is_what_file_names_say(folder: Path) -> None:
    assert [name for name, _ in names_and_texts(path=str(folder), split="train")] == ["train-10.jsonl", "train-2.jsonl"]
    assert [name for name, _ in names_and_texts(path=str(folder), split="test")] == ["sub/test.jsonl"]
    assert "data.split = 'dev'" in refusal(path=str(folder), split="dev")
    assert "data.limit or data.sample" in refusal(path=str(folder), split="train[:10%]")


def test_what_is_not_there_is_refused_by_name(folder: Path) -> None:
    assert refusal(path="reviews.csv") == "data.path = 'reviews.csv': no such file (and no hub id)"
    assert "no such file (and no hub id)" in refusal(path=f"{folder}/missing.jsonl")
    assert "no such file (and no hub id)" in refusal(path="./nothing")
    assert f"data.path = '{folder}/*.csv': no file matches" == refusal(path=f"{folder}/*.csv")
    assert "data.files = 'no.jsonl'" in refusal(path=str(folder), files=["no.jsonl"])
    assert "data.split: allowed are those of data.files: a, b" in refusal(path=str(folder), files={"a": "x", "b": "y"})
    assert "unknown format" in refusal(path=f"{folder}/README.md")
    assert "data.revision = 'main'" in refusal(path=str(folder), revision="main")
    assert "data.path = 'memory://nowhere/x.jsonl': no such file" in refusal(path="memory://nowhere/x.jsonl")
    assert "data.path = 'nosuch://x'" in refusal(path="nosuch://x")
    assert "no installed Python package" in refusal(path="package:nosuchpackage/x.csv")
    (folder.parent / "empty").mkdir()
    assert "no data file in this folder" in refusal(path=str(folder.parent / "empty"))


def test_a_split_that_a_single_file_does_not_name_is_refused(folder: Path) -> None:
    (folder / "test-0.jsonl").write_text(lines("t"))
    path = str(folder / "test-0.jsonl")
    assert names_and_texts(path=path, split="test") == [("test-0.jsonl", ["t"])]
    assert names_and_texts(path=path, files=[path], split="test") == names_and_texts(path=path)
    for more in ({}, {"files": [path]}):
        assert refusal(path=path, split="validation", **more).startswith("data.split = 'validation': no file of ")


@pytest.mark.parametrize("files", ["", [], {}, [""], {"train": []}, {"train": 5}, {"train": [5]}])
def test_data_files_that_name_no_file_are_refused(folder: Path, files: Any) -> None:
    assert refusal(path=str(folder), files=files) == (
        f"data.files = {shown(files)}: allowed are names and globs of files, also by split"
    )


def test_mixed_formats_are_refused_with_their_list(folder: Path) -> None:
    (folder / "more.csv").write_text("text\na\n")
    assert "files of several formats: csv (more.csv), jsonl (sub/test.jsonl)" in refusal(path=str(folder))


def test_a_hub_id_without_a_network_is_one_quick_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def unreachable(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.HfApi, "dataset_info", unreachable)
    began = time.monotonic()
    text = refusal(path="org/reviews", revision="v1")
    assert time.monotonic() - began < 30  # no retries for minutes
    assert "data.path = 'org/reviews' at data.revision = 'v1': no such file or folder, and not found on the hub" in text
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refusal(path="imdb")


class _Builder:
    """What `datasets` finds out about a repository, without one."""

    __module__ = "datasets.packaged_modules.json.json"

    def __init__(self, files: dict[str, list[str]], config: Any) -> None:
        self.config = config
        config.data_files = files


def test_a_hub_dataset_is_read_by_our_cursors_at_a_fixed_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets.packaged_modules.json.json import JsonConfig

    with fsspec.open("memory://datasets/org/name@c0ffee/data/b.jsonl", "wt") as file:
        file.write(lines("b"))
    with fsspec.open("memory://datasets/org/name@c0ffee/data/a.jsonl", "wt") as file:
        file.write(lines("a1", "a2"))
    urls = [f"memory://datasets/org/name@c0ffee/data/{name}.jsonl" for name in "ba"]
    asked: list[Any] = []

    def builder(path: str, name: Any, *, data_files: Any, revision: Any, download_config: Any) -> Any:
        asked.append((path, name, revision))
        return _Builder({"train": urls, "test": urls[:1]}, JsonConfig(name="default"))

    monkeypatch.setattr(hub, "_commit", lambda data: "c0ffee")
    monkeypatch.setattr(hub, "load_dataset_builder", builder)
    found = names_and_texts(path="org/name", name="small", split="train")
    assert found == [("data/a.jsonl", ["a1", "a2"]), ("data/b.jsonl", ["b"])]
    assert asked == [("org/name", "small", "c0ffee")]
    source = open_source(DataSettings(path="org/name", split="test"), ["text"])
    assert source.files[0].fingerprint == "c0ffee:data/b.jsonl"
    assert "data.split: org/name has the splits train, test" in refusal(path="org/name")
    assert "data.split = 'dev'" in refusal(path="org/name", split="dev")


def test_a_format_that_only_datasets_knows_is_streamed_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "all.csv").write_text("text;n\na;1\nb;2\nc;3\n")
    (repository / "README.md").write_text(
        '---\nconfigs:\n- config_name: semicolons\n  data_files: "all.csv"\n  sep: ";"\n'
        '- config_name: plain\n  data_files: "all.csv"\n---\n'
    )
    source = open_source(DataSettings(path=str(repository), name="semicolons"), ["text"])
    (file,) = source.files
    assert (file.format, file.rows) == ("stream", None)
    first = source.rows(0, 0, 2)
    assert [row.values["text"] for row in first] == ["a", "b"]
    fresh = open_source(DataSettings(path=str(repository), name="semicolons"), ["text"])
    rest = fresh.rows(0, 2, 9, json.loads(json.dumps(first.cursor)))
    assert [(row.row, row.values["text"]) for row in rest] == [(2, "c")]
    assert rest.ended
    plain = open_source(DataSettings(path=str(repository), name="plain"), ["text;n"])
    assert plain.files[0].format == "csv"
    monkeypatch.chdir(tmp_path)
    assert open_source(DataSettings(path="repository", name="plain"), ["text;n"]).files[0].name == "all.csv"
    assert "data.name = 'nosuch'" in refusal(path=str(repository), name="nosuch")


def test_what_save_to_disk_wrote_is_read_in_its_order(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_dict({"text": [f"t{i}" for i in range(50)], "n": list(range(50))})
    saved.save_to_disk(str(tmp_path / "one"), num_shards=3)
    found = names_and_texts(path=str(tmp_path / "one"))
    assert [name for name, _ in found] == [f"data-0000{i}-of-00003.arrow" for i in range(3)]
    assert [text for _, texts in found for text in texts] == saved["text"]
    datasets.DatasetDict({"train": saved, "test": saved.select(range(3))}).save_to_disk(str(tmp_path / "two"))
    assert names_and_texts(path=str(tmp_path / "two"), split="test")[0][1] == ["t0", "t1", "t2"]
    assert "has the splits train, test" in refusal(path=str(tmp_path / "two"))


def test_a_column_that_is_missing_is_named_with_those_that_exist(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "x", "url": "u"}\n')
    (tmp_path / "b.jsonl").write_text('{"data": {"body": "x", "more": {"deep": 1}}}\n')
    (tmp_path / "c.csv").write_text("title,body\n1,2\n")
    (tmp_path / "d.txt").write_text("line\n")
    pq.write_table(pa.table({"data": [{"body": "x"}], "n": [1]}), tmp_path / "e.parquet")
    expected = {
        "a.jsonl": "content, url",
        "b.jsonl": "data, data.body, data.more, data.more.deep",
        "c.csv": "title, body",
        "e.parquet": "data, data.body, n",
    }
    for name, having in expected.items():
        text = refusal(path=str(tmp_path / name))
        assert "column 'text'" in text
        assert text.endswith(f"has no such column; it has {having}")
    assert refusal(("body",), path=str(tmp_path / "d.txt")).endswith("it has text")
    assert "column 'data.nope'" in refusal(("data.body", "data.nope"), path=str(tmp_path / "e.parquet"))


def test_dotted_columns_reach_into_records_and_an_exact_name_wins(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"data": {"body": "inner", "a.b": {"c": 1}}, "data.body": "flat"}\n{"data": {"body": "inner"}}\n'
        '{"data": null}\n'
    )
    pq.write_table(pa.table({"data": [{"body": "inner"}], "data.body": ["flat"]}), tmp_path / "b.parquet")
    columns = ["data.body", "data.a.b.c", "@file", "data"]
    rows = [
        dict(row.values) for row in open_source(DataSettings(path=str(tmp_path / "a.jsonl")), columns).rows(0, 0, 9)
    ]
    assert [list(row) for row in rows] == [columns] * 3
    assert [row["data.body"] for row in rows] == ["flat", "inner", None]
    assert [row["data.a.b.c"] for row in rows] == [1, None, None]
    assert rows[0]["@file"] == "a.jsonl"
    source = open_source(DataSettings(path=str(tmp_path / "b.parquet")), ["data.body"])
    assert [row.values for row in source.rows(0, 0, 9)] == [{"data.body": "flat"}]


def test_a_column_of_only_some_records_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nbroken\n{"text": "b", "label": 1}\n')
    rows = list(open_source(DataSettings(path=str(tmp_path / "a.jsonl")), ["text", "label"]).rows(0, 0, 9))
    assert [row.values.get("label") for row in rows] == [None, None, 1]


@pytest.mark.parametrize("name", ["b.csv", "b.parquet"])
def test_a_later_file_without_the_column_is_refused_by_name(tmp_path: Path, name: str) -> None:
    if name == "b.csv":
        (tmp_path / "a.csv").write_text("text\na\n")
        (tmp_path / "b.csv").write_text("title\nb\n")
    else:
        pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
        pq.write_table(pa.table({"title": ["b"]}), tmp_path / "b.parquet")
    assert f"{name} has no such column; it has title" in refusal(path=str(tmp_path))


def test_fingerprints_change_with_size_either_end_and_remote_version(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    contents = [b"a" * 200_000, b"a" * 200_001, b"b" + b"a" * 199_999, b"a" * 199_999 + b"b"]
    prints = []
    for content in contents:
        path.write_bytes(content)
        prints.append(Place(name="a.txt", path=str(path), format="txt").fingerprint())
    path.write_bytes(contents[0])
    assert len(set(prints)) == 4
    assert Place(name="a.txt", path=str(path), format="txt").fingerprint() == prints[0]
    remote = Place(name="a.txt", path="memory://prints/a.txt", format="txt")
    versions = set()
    for content in (b"one", b"two", b"three"):
        with fsspec.open(remote.path, "wb") as file:
            file.write(content)
        versions.add(remote.fingerprint())
        assert remote.fingerprint() in versions
    assert len(versions) == 3
