"""`harvest plan` over people's own data: it refuses what a run refuses, in its words, and counts what there is."""

from __future__ import annotations

import csv
import gzip
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commandcase import furnished, jsonl

import harvest
from harvest.__main__ import _status

Command = Callable[..., tuple[int, str, str]]
DIRECTION = {"name": "d", "column": "label", "positive": ["1"], "negative": ["0"]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model."""
    return furnished(tmp_path_factory.mktemp("place"), [])


@pytest.fixture
def command(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """`harvest plan` or `run` of a job over a data file, in this process: (exit status, stdout, stderr)."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def call(
        what: str, data: Path, *settings: str, directions: Any = (), as_json: bool = False
    ) -> tuple[int, str, str]:
        tables = {
            "model": {"name": f"{place}/model"},
            "data": {"path": str(data)},
            "run": {"path": f"{tmp_path}/run", "threads": 1},
            "capture": {"layers": [1]},
            "directions": list(directions),
        }
        job = tmp_path / "job.toml"
        job.write_text("\n".join(_toml(tables)))
        overrides = [part for setting in settings for part in ("--set", setting)]
        capsys.readouterr()
        status = _status([what, str(job), *overrides, *(["--json"] if as_json else [])])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def _toml(tables: dict[str, Any]) -> list[str]:
    lines = []
    for name, table in tables.items():
        if name != "directions":
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    for direction in tables["directions"]:
        lines += ["[[directions]]", *(f"{key} = {json.dumps(value)}" for key, value in direction.items())]
    return lines


def labelled(count: int = 40, **changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of two groups; `r7={...}` is laid over row 7."""
    rows = [{"text": f"some text {i}", "label": str(i % 2), "w": 1.0, "pid": str(i // 2)} for i in range(count)]
    for at, change in changes.items():
        rows[int(at[1:])] |= change
    return rows


def line_of(out: str, key: str) -> str:
    return next(line for line in out.splitlines() if line.startswith(f"{key} "))


# ---- what a run would refuse -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "more", "words"),
    [
        ({"r3777": {"label": "2"}}, {}, "label = '2' is in no group: A is '1', B is '0'"),
        ({"r3777": {"label": None}}, {}, "label is empty is in no group"),
        ({"r3777": {"label": None}}, {"negative": "rest"}, "label is empty is in no group: A is '1', B all other text"),
        ({"r3777": {"w": -1}}, {"weight": "column:w"}, "w = -1 is no weight"),
        ({"r3777": {"pid": None}}, {"pair": "column:pid"}, "pid is empty"),
        ({"r3777": {"text": None}}, {}, "null"),
        ({"r5": {"text": "ab"}}, {"read": -9}, "position -9 of 3 tokens"),
        ({"r3999": {"text": "ab"}}, {"read": -9}, "position -9 of 3 tokens"),
    ],
    ids=str,
)
def test_a_document_that_ends_the_run_is_refused_in_the_words_of_the_run(
    changes: dict[str, Any], more: dict[str, Any], words: str, command: Command, tmp_path: Path
) -> None:
    data, directions = jsonl(tmp_path / "a.jsonl", labelled(4000, **changes)), [{**DIRECTION, **more}]
    status, out, err = command("plan", data, directions=directions)
    assert (status, out, err.count("\n")) == (2, "", 1)
    number = next(iter(changes))[1:]
    assert f"document {number} (" in err
    assert words in err
    remedy = "leaves such documents out" + ("" if words == "null" else " of the direction, and counts them")
    assert f"; data.on_bad = 'skip' {remedy}" in err
    assert command("plan", data, "data.on_bad=skip", directions=directions)[0] == 0
    assert not (tmp_path / "run").exists()
    small = jsonl(tmp_path / "a.jsonl", labelled(4000, **changes)[int(number) - 5 : int(number) + 1])
    status, _, told = command("run", small, "tokens.context=64", directions=directions)
    assert status == 1
    assert told.splitlines()[-1].partition(words)[2] == err.strip().partition(words)[2], "the run says the same"


def test_a_label_that_never_counts_is_no_obstacle(command: Command, tmp_path: Path) -> None:
    """An empty text is skipped before its label is asked for; and nobody asks a label beyond the limit."""
    data = jsonl(tmp_path / "a.jsonl", labelled(40, r7={"text": "", "label": "9"}, r30={"label": "8"}))
    assert command("plan", data, "data.limit=30", directions=[DIRECTION])[0] == 0
    assert command("run", data, "data.limit=30", directions=[DIRECTION])[0] == 0
    assert "'8' is in no group" in command("plan", data, directions=[DIRECTION])[2]


def test_groups_are_counted_with_their_labels_and_those_in_none(command: Command, tmp_path: Path) -> None:
    rows = labelled(3000, r5={"label": "2"}, r2500={"label": "2"}, r2600={"label": None})
    rows[7]["label"] = rows[9]["label"] = "yes"
    data = jsonl(tmp_path / "a.jsonl", rows)
    asked = {**DIRECTION, "positive": ["1", "yes"]}
    status, out, _ = command("plan", data, "data.on_bad=skip", directions=[asked])
    assert status == 0
    assert line_of(out, "direction d").split(maxsplit=2)[2] == (
        "A 1,499 ('1' 1,497, 'yes' 2); B 1,498 ('0' 1,498); "
        "in no group 3 ('2' 2, empty 1): left out of the direction, and counted"
    )
    found = json.loads(command("plan", data, "data.on_bad=skip", directions=[asked], as_json=True)[1])["groups"]
    labels = [row["label"] for row in rows]
    assert found["directions"]["d"]["A"] == {"'1'": labels.count("1"), "'yes'": 2}
    assert found["directions"]["d"]["B"] == {"'0'": labels.count("0")}
    assert found["directions"]["d"]["neither"] == {"'2'": 2, "empty": 1}
    assert (found["documents"], found["whole"]) == (3000, True)
    only = {**DIRECTION, "modes": ["single_group"]}
    del only["negative"]
    out = command("plan", data, directions=[only])[1]
    assert "in no group 1,503" in out
    assert "not asked for" in out


def test_a_count_that_is_cut_says_of_how_many(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harvest.planning.survey.COUNTED", 100)
    out = command("plan", jsonl(tmp_path / "a.jsonl", labelled(300)), directions=[DIRECTION])[1]
    assert "of the first 100 documents: A 50 ('1' 50); B 50 ('0' 50)" in line_of(out, "direction d")


def test_a_document_that_a_budget_of_tokens_may_never_reach_is_no_refusal(command: Command, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", labelled(40, r30={"label": "2"}))
    status, out, _ = command("plan", data, "data.max_tokens=50", directions=[DIRECTION])
    assert status == 0
    assert "in no group 1 ('2' 1): the run stops at the first of them" in out
    assert command("run", data, "data.max_tokens=50", directions=[DIRECTION])[0] == 0


# ---- nothing, or nothing that can be read ----------------------------------------------------------------------------


def _nothing(folder: Path, kind: str) -> Path:
    path = folder / kind
    if kind == "empty.parquet":
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    elif kind.endswith(".gz"):
        path.write_bytes(gzip.compress(b""))
    else:
        path.write_text({"header.csv": "text,label\n", "header.tsv": "text\r\n", "array.json": "[]"}.get(kind, "\n"))
    return path


NOTHING = ["header.csv", "header.tsv", "blank.jsonl", "empty.parquet", "array.json", "empty.jsonl.gz"]


@pytest.mark.parametrize("kind", NOTHING)
def test_data_without_a_row_are_refused_by_plan_and_run(kind: str, command: Command, tmp_path: Path) -> None:
    data = _nothing(tmp_path, kind)
    for what in ("plan", "run"):
        status, out, err = command(what, data)
        assert (status, out, err.count("\n")) == (2, "", 1), err
        assert f"data.path = '{data}': no row in {kind}" in err
    assert not (tmp_path / "run").exists()


def test_a_folder_of_empty_files_is_refused_and_an_empty_file_among_others_is_not(
    command: Command, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (folder / name).write_text("")
    assert "no row in a.jsonl, b.jsonl" in command("plan", folder)[2]
    jsonl(folder / "c.jsonl", [{"text": "one"}])
    assert command("plan", folder)[0] == 0


def test_a_sample_that_keeps_nothing_is_named(command: Command, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", labelled(12))
    for what in ("plan", "run"):
        status, _, err = command(what, data, "data.sample=0.0001")
        assert status == 2
        assert "data.sample = 0.0001: none of the 12 rows" in err


def test_a_run_that_skips_every_document_says_so_loudly(command: Command, tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", [{"text": ""}, {"text": ""}, {"text": None}])
    status, _, err = command("run", data, "data.on_bad=skip")
    assert status == 0
    assert "warning: no document was harvested: all 3 were skipped (" in err
    assert "2 empty" in err
    assert "1 null" in err
    good = jsonl(tmp_path / "b.jsonl", [{"text": ""}, {"text": "x"}])
    assert "no document was harvested" not in command("run", good, f"run.path={tmp_path}/run2")[2]


def test_an_iterable_without_a_record_is_refused(tmp_path: Path) -> None:
    from tiny import byte_tokenizer, tiny_llama

    for data in ([], iter([]), lambda: iter([])):
        with pytest.raises(harvest.RequestError, match="no row"):
            harvest.run(
                {"run": {"path": str(tmp_path / "run")}},
                model=tiny_llama(vocab=300),
                tokenizer=byte_tokenizer(),
                data=data,
            )
    assert not (tmp_path / "run").exists()


def written_csv(path: Path, rows: int) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([f"some text {i}", i % 2] for i in range(rows))
    return path


def test_an_unclosed_quote_is_named_by_file_and_line_wherever_it_is_opened(command: Command, tmp_path: Path) -> None:
    data = written_csv(tmp_path / "a.csv", 3000)
    lines = data.read_text().splitlines()
    lines[2500] = '"never closed,1'
    data.write_text("\n".join(lines) + "\n")
    status, _, err = command("plan", data)
    assert status == 2
    assert "a.csv line 2501: not valid CSV: a quoted cell is never closed" in err
    assert "data.on_bad = 'skip' leaves such documents out" in err


@pytest.mark.parametrize("name", ["a.csv", "b.csv"])
def test_foreign_bytes_are_named_by_file_and_line_in_every_file(name: str, command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for each in ("a.csv", "b.csv"):
        written_csv(folder / each, 2000)
    content = (folder / name).read_bytes().replace(b"some text 4,", "caf\u00e9,".encode("latin-1"))
    (folder / name).write_bytes(content)
    status, _, err = command("plan", folder)
    assert status == 2
    assert f"{name} line 6: not valid UTF-8: byte 0xe9 at byte 3 of the line; save the file as UTF-8" in err


def test_a_file_with_semicolons_is_told_what_stands_between_cells(command: Command, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text;label\ngood;1\n")
    for what in ("plan", "run"):
        status, _, err = command(what, tmp_path / "a.csv")
        assert status == 2
        assert "a.csv: line 1, the header: 'text;label' is one cell, and has ';' in it" in err
        assert "save it with ','" in err
    (tmp_path / "b.tsv").write_text("text,label\ngood,1\n")
    assert "has ',' in it" in command("plan", tmp_path / "b.tsv")[2]
    (tmp_path / "c.csv").write_text("text;label\ngood\n")
    assert command("plan", tmp_path / "c.csv", "data.text=text;label")[0] == 0, "a column may be called so"


# ---- how many tokens -------------------------------------------------------------------------------------------------


def tokens_of(rows: list[dict[str, Any]]) -> int:
    """A byte each, and one at the beginning."""
    return sum(len(row["text"].encode()) + 1 for row in rows if row["text"])


def planned(command: Command, data: Path, *settings: str) -> dict[str, Any]:
    status, out, err = command("plan", data, "tokens.context=64", *settings, as_json=True)
    assert status == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("whole", [True, False])
def test_data_sorted_by_length_are_judged_as_a_whole(
    order: int, whole: bool, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = sorted(
        ({"text": "y" * (1 + (i * 7919) % 200)} for i in range(5000)), key=lambda row: order * len(row["text"])
    )
    data, true = jsonl(tmp_path / "a.jsonl", rows), tokens_of(rows)
    if not whole:
        monkeypatch.setattr("harvest.planning.totals.WHOLE_BYTES", 0)
    found = planned(command, data)
    assert found["judged"]["from"] == ("lengths" if whole else "places")
    assert abs(found["tokens"] - true) < 0.03 * true
    assert found["tokens_low"] <= true <= found["tokens_high"]
    assert found["tokens_high"] - found["tokens_low"] < 0.2 * true
    assert abs(found["rows"] - true) < 0.03 * true


def test_one_very_long_text_counts_for_what_it_is(command: Command, tmp_path: Path) -> None:
    rows = [{"text": f"short text {i}"} for i in range(3000)]
    rows[1234] = {"text": "long " * 20_000}
    found, true = planned(command, jsonl(tmp_path / "a.jsonl", rows)), tokens_of(rows)
    assert abs(found["tokens"] - true) < 0.02 * true
    rows[1234] = {"text": "long " * 400_000}  # beyond what is tokenised for a plan
    found, true = planned(command, jsonl(tmp_path / "a.jsonl", rows)), tokens_of(rows)
    assert abs(found["tokens"] - true) < 0.2 * true
    assert found["tokens_low"] <= true <= found["tokens_high"]


def test_few_documents_are_counted_and_a_stream_says_how_many_it_was_judged_from(
    command: Command, tmp_path: Path
) -> None:
    rows = [{"text": "z" * (i % 50 + 1)} for i in range(700)]
    data = jsonl(tmp_path / "a.jsonl", rows)
    found = planned(command, data)
    assert (found["tokens"], found["tokens_low"], found["tokens_high"]) == (tokens_of(rows),) * 3
    assert found["judged"] == {"from": "all", "documents": 700}
    assert line_of(command("plan", data)[1], "tokens").split()[1] == f"{tokens_of(rows):,},"
    limited = planned(command, data, "data.limit=100")
    assert limited["tokens"] == tokens_of(rows[:100])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data.read_bytes()))
    assert planned(command, tmp_path / "a.jsonl.gz")["tokens"] is None
    each = sum(len(row["text"]) + 1 for row in rows[:256]) / 256
    told = f"an unknown number, about {each:,.0f} a document by the first 256 documents"
    assert told in line_of(command("plan", tmp_path / "a.jsonl.gz")[1], "tokens")


def test_what_is_judged_is_printed_with_how_far_it_may_be_off(command: Command, tmp_path: Path) -> None:
    rows = [{"text": "w" * (1 + i % 97)} for i in range(20_000)]
    out = command("plan", jsonl(tmp_path / "a.jsonl", rows))[1]
    told = line_of(out, "tokens")
    assert told.split()[1] == "about"
    assert " to " in told
    assert told.count("(") == 1
