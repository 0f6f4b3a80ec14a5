"""A bad record is one bad row that names file and line; the good rows around it are all delivered."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harvest.errors import RequestError, WorkError
from harvest.settings.tables import DataSettings
from harvest.source.open import open_source


def read(path: Path, columns: tuple[str, ...] = ("text",)) -> list[Any]:
    """(row, first requested value or error) of every row of the only file."""
    source = open_source(DataSettings(path=str(path)), columns)
    rows = list(source.rows(0, 0, 2**30))
    assert source.files[0].rows in (None, len(rows))
    return [(row.row, row.error or row.values[columns[0]]) for row in rows]


def test_a_torn_last_line_names_file_and_line_and_keeps_the_rows_before(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": "b"}\n{"text": "c')
    *good, (row, error) = read(path)
    assert good == [(0, "a"), (1, "b")]
    assert row == 2
    assert error.startswith("a.jsonl line 4: not valid JSON: ")


def test_bad_lines_in_the_middle_leave_their_neighbours_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        b'{"text": "a"}',
        b"{broken",
        b"[1, 2]",
        b'"text"',
        b'{"text": "\xff\xfe"}',
        b"[" * 100_000,
        b'{"text": "z"}',
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    rows = dict(read(path))
    assert (rows[0], rows[6]) == ("a", "z")
    assert rows[1].startswith("a.jsonl line 2: not valid JSON")
    assert rows[2] == "a.jsonl line 3: not a JSON object but a list"
    assert rows[3] == "a.jsonl line 4: not a JSON object but a str"
    assert rows[4] == "a.jsonl line 5: not valid UTF-8: byte 0xff at byte 10 of the line; save the file as UTF-8"
    assert rows[5].startswith("a.jsonl line 6: not valid JSON")


def test_an_empty_file_between_others_has_no_rows_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n')
    (tmp_path / "c.jsonl").write_text("\n \n")
    source = open_source(DataSettings(path=str(tmp_path)), ["text"])
    assert [(file.number, file.name, file.rows) for file in source.files] == [
        (0, "a.jsonl", 0),
        (1, "b.jsonl", 1),
        (2, "c.jsonl", 0),
    ]
    assert [[row.values for row in source.rows(i, 0, 10)] for i in range(3)] == [[], [{"text": "b"}], []]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_a_single_empty_file_is_a_source_without_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    source = open_source(DataSettings(path=str(tmp_path / name)), ["text"])
    piece = source.rows(0, 0, 10)
    assert (list(piece), piece.ended, source.files[0].rows) == ([], True, 0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": "a"}\r\n\r\n{"text": "b"}'),
        ("a.json", b'{"text": "a"}\n{"text": "b"}\n'),
        ("b.json", b'\n [{"text": "a"},\n {"text": "b"}]\n'),
        ("a.csv", b"text\r\na\r\n\r\nb\r\n"),
        ("a.tsv", b'text\tn\na\t1\n"b"\t2\n'),
        ("a.txt", b"a\r\nb"),
    ],
)
def test_byte_order_marks_blank_lines_and_carriage_returns_are_no_content(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
    assert read(tmp_path / name) == [(0, "a"), (1, "b")]


def test_nulls_missing_columns_nan_and_lone_surrogates_come_through(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text":"ok","n":1}\n{"text":null,"n":NaN}\n{"text":"a\\ud800b","n":2.0}\n{"n":12345678901234567890}\n'
    )
    rows = list(open_source(DataSettings(path=str(path)), ["text", "n"]).rows(0, 0, 9))
    assert [row.values["text"] for row in rows] == ["ok", None, "a\ud800b", None]
    numbers = [row.values["n"] for row in rows]
    assert numbers[1] != numbers[1]
    assert [(type(n), n) for n in numbers[::3]] == [(int, 1), (int, 12345678901234567890)]
    assert type(numbers[2]) is float


def test_csv_cells_stay_the_text_that_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,n,d\nNA,007,2024-01-01\nnull,1e5,\n"a ""b"",\nc",TRUE, x \n')
    rows = [dict(row.values) for row in open_source(DataSettings(path=str(path)), ["text", "n", "d"]).rows(0, 0, 9)]
    assert rows == [
        {"text": "NA", "n": "007", "d": "2024-01-01"},
        {"text": "null", "n": "1e5", "d": ""},
        {"text": 'a "b",\nc', "n": "TRUE", "d": " x "},
    ]


def test_bad_csv_records_name_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,n\n"a\nb",1\nc,2,3\nd\n\xff,4\ne,5\n"f,6\n')
    rows = dict(read(path))
    assert (rows[0], rows[4]) == ("a\nb", "e")
    assert rows[1] == "a.csv line 4: not valid CSV: 3 cells where the header has 2"
    assert rows[2] == "a.csv line 5: not valid CSV: 1 cells where the header has 2"
    assert rows[3].startswith("a.csv line 6: not valid UTF-8: byte 0xff")
    assert rows[5] == "a.csv line 8: not valid CSV: a quoted cell is never closed"


def test_a_bad_element_of_a_json_array_is_one_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"},\n {"text": nope},\n 3, "x", \n {"text": "b"}]')
    rows = dict(read(path))
    assert (rows[0], rows[4]) == ("a", "b")
    assert rows[1].startswith("a.json line 2: not valid JSON")
    assert rows[2] == "a.json line 3: not a JSON object but a int"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[{"text": "a"},\n{"text": "b', "a.json line 2: not valid JSON: the file ends within this record"),
        ('[{"text": "a"},\n', "a.json line 2: the file ends before its array does"),
        ('[{"text": "a"}]\n[{"text": "b"}]', "a.json line 1: text behind the end of the array"),
    ],
)
def test_a_json_array_that_does_not_end_well_says_so_after_its_good_rows(
    tmp_path: Path, content: str, reason: str
) -> None:
    (tmp_path / "a.json").write_text(content)
    assert read(tmp_path / "a.json") == [(0, "a"), (1, reason)]


def test_a_cut_compressed_file_keeps_the_rows_before_the_cut(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh", k=200)) for _ in range(5000)]
    data = gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(data[: len(data) // 2])
    *good, (row, error) = read(tmp_path / "a.jsonl.gz")
    assert len(good) > 2400
    assert [text for _, text in good] == texts[: len(good)]
    assert row == len(good)
    assert error.startswith(f"a.jsonl.gz line {row + 1}: the file is cut off or damaged: ")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_a_line_of_30_mb_is_read_whole_between_two_short_ones_in_bounded_memory(tmp_path: Path, name: str) -> None:
    long = ("lang \\ " * 1000 + "\n") * (30_000_000 // 7001)
    texts = ["short", long, "last"]
    if name == "a.csv":
        (tmp_path / name).write_text("text\n" + "".join(f'"{text}"\n' for text in texts))
    elif name == "a.txt":
        texts[1] = long.replace("\n", "-")
        (tmp_path / name).write_text("\n".join(texts))
    elif name == "a.json":
        (tmp_path / name).write_text(json.dumps([{"text": text} for text in texts]))
    else:
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tracemalloc.start()
    try:
        assert [text for _, text in read(tmp_path / name)] == texts
        assert tracemalloc.get_traced_memory()[1] < 10 * 30_000_000
    finally:
        tracemalloc.stop()


def test_bytes_that_are_no_text_in_a_parquet_column_are_one_bad_row(tmp_path: Path) -> None:
    raw = pa.array([b"a", b"\xff", b"c"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    rows = dict(read(tmp_path / "a.parquet"))
    assert (rows[0], rows[2]) == ("a", "c")
    assert rows[1].startswith("a.parquet row 1: ")


def test_a_damaged_page_of_a_parquet_file_names_the_file_and_is_no_end(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"text": [f"{i:0100d}" for i in range(2000)]}), path, row_group_size=500, compression="zstd"
    )
    data = bytearray(path.read_bytes())
    third = pq.ParquetFile(path).metadata.row_group(2).column(0).dictionary_page_offset
    data[third : third + 40] = b"\xff" * 40
    path.write_bytes(data)
    with pytest.raises(WorkError, match=r"a\.parquet: cannot be read from row 1000 on"):
        read(path)


@pytest.mark.parametrize(("name", "kind"), [("a.parquet", "Parquet"), ("a.arrow", "Arrow")])
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_bytes(b"no table at all, whatever its name may say")
    with pytest.raises(RequestError, match=rf"data\.path: {name}: not a readable {kind} file"):
        open_source(DataSettings(path=str(tmp_path / name)), ["text"])


def test_one_json_value_over_several_lines_is_refused_with_what_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"data": [{"text": "a"}]}, indent=2))
    with pytest.raises(RequestError, match=r"a\.json: one JSON value over several lines; allowed are"):
        open_source(DataSettings(path=str(tmp_path / "a.json")), ["text"])


def test_a_csv_header_that_names_the_wanted_column_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,n,n,text\na,1,2,b\n")
    with pytest.raises(RequestError, match="the header names the column 'text' more than once"):
        read(tmp_path / "a.csv")


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".txt"])
def test_a_file_that_only_its_name_calls_compressed_is_refused_by_name(tmp_path: Path, kind: str, suffix: str) -> None:
    path = tmp_path / f"a{kind}{suffix}"
    path.write_bytes(b'{"text": "a"}\n' * 3)
    with pytest.raises(
        RequestError, match=rf"data\.path: a\{kind}\{suffix}: not a readable [a-z0-9]+ file: "
    ) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_a_compressed_array_that_is_cut_off_keeps_the_records_before(tmp_path: Path) -> None:
    generator = random.Random(0)
    records = [{"text": "".join(generator.choices("abcdefgh", k=200))} for _ in range(2000)]
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps(records).encode())[:-30_000])
    *good, (_, error) = read(path)
    assert len(good) > 500
    assert [text for _, text in good] == [record["text"] for record in records[: len(good)]]
    assert error.startswith("a.json.gz line 1: ")


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_column_that_a_schema_names_twice_is_refused_only_where_it_is_wanted(tmp_path: Path, suffix: str) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], names=["text", "text", "label"])
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    with pytest.raises(RequestError, match=rf"a\{suffix}: the schema names the column 'text' more than once"):
        read(path)
    assert read(path, ("label",)) == [(0, "c")]
