"""Groups counted before anything runs: against plain counting, over files, limits and samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harvest.config import Job, load_job
from harvest.errors import RequestError
from harvest.planning import groups
from harvest.planning.groups import GroupsBefore, count_groups
from harvest.source.open import open_source

LABEL = {"1": 0, "0": 1}


def direction(**more: Any) -> dict[str, Any]:
    return {"name": "d", "column": "label", "positive": ["1"], "negative": ["0"], **more}


def job_of(folder: Path, *directions: dict[str, Any], **data: Any) -> Job:
    path = str(folder / "*.jsonl")
    settings = {"model": {"name": "m"}, "data": {"path": path, **data}, "run": {"path": "r"}}
    return load_job({**settings, "directions": list(directions)})


def counted(folder: Path, files: list[list[str]], size: int, *directions: dict[str, Any], **data: Any) -> GroupsBefore:
    for old in folder.glob("*.jsonl"):
        old.unlink()
    for number, labels in enumerate(files):
        rows = [{"text": "t", "label": label} for label in labels]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = job_of(folder, *directions, **data)
    return count_groups(job, open_source(job.data, ["text", "label"], None), size)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.sampled_from(["0", "1", "2"]), min_size=1, max_size=9), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_pairs_by_order_know_what_lies_before_each_shard_and_no_other_does(
    tmp_path: Path, files: list[list[str]], size: int
) -> None:
    every = [label for labels in files for label in labels]
    if not {"0", "1"} <= set(every):
        return
    ordered = direction(pair="order", modes=["paired_rejection"], negative=["0", "2"])
    before = counted(tmp_path, files, size, ordered, direction(name="e"), on_bad="skip")
    seen = [0, 0]
    for number, labels in enumerate(files):
        for row, label in enumerate(labels):
            if row % size == 0:
                assert before(number, row) == {"d": tuple(seen)}
            seen[0 if label == "1" else 1] += 1


def test_sorted_data_are_counted_to_the_end(tmp_path: Path) -> None:
    before = counted(tmp_path, [["0"] * 50 + ["1"] * 50], 25, direction(pair="order", modes=["paired_rejection"]))
    assert [before(0, start)["d"] for start in (0, 25, 50, 75)] == [(0, 0), (0, 25), (0, 50), (25, 50)]


def test_files_of_one_group_each_are_both_met(tmp_path: Path) -> None:
    counted(tmp_path, [["0"] * 5, ["1"] * 5], 2, direction())
    before = counted(tmp_path, [["0"] * 5, ["1"] * 5], 2, direction(pair="order", modes=["paired_rejection"]))
    assert before(1, 4)["d"] == (4, 5)


def test_a_group_beyond_the_limit_is_met_but_not_counted(tmp_path: Path) -> None:
    ordered = direction(pair="order", modes=["mean_difference"])
    before = counted(tmp_path, [["0", "1", "0", "1"]], 1, ordered, limit=2)
    assert [before(0, row) for row in range(3)] == [{"d": (0, 0)}, {"d": (0, 1)}, {}]
    counted(tmp_path, [["0"] * 6 + ["1"]], 2, direction(), limit=3)  # no error: the limit may grow


@pytest.mark.parametrize(
    ("labels", "more", "words"),
    [
        (["0", "0"], {}, "group A is empty (A 0 documents, B 2): label is '1' in none of 2 documents"),
        (["1", "1"], {}, "group B is empty (A 2 documents, B 0): label is '0' in none of 2"),
        (["1", "1"], {"negative": "rest"}, "group B is empty (A 2 documents, B 0): label is rest"),
        (["0", "0"], {"negative": None, "modes": ["single_group"]}, "group A is empty"),
        (["1", "0", "0"], {"pair": "order", "modes": ["paired_rejection"]}, "1 documents of A and 2 of B"),
        (["1", "0", "0"], {"pair": "order", "modes": ["pca"]}, "pair = 'order' of 1 documents of A"),
    ],
)
def test_what_cannot_become_a_direction_is_refused_with_counts(
    tmp_path: Path, labels: list[str], more: dict[str, Any], words: str
) -> None:
    asked = {key: value for key, value in direction(**more).items() if value is not None}
    with pytest.raises(RequestError) as caught:
        counted(tmp_path, [labels], 4, asked)
    assert words in str(caught.value)
    assert str(caught.value).startswith("direction 'd': ")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "text,label\ncaf\xe9,1\n".encode("latin-1"),
            "1 cannot be read, the first one: data.csv line 2: not valid UTF-8",
        ),
        (b'text,label\n"open,1\nmore,0\n', "1 cannot be read, the first one: data.csv line 2: not valid CSV: a quoted"),
    ],
)
def test_where_documents_cannot_be_read_an_empty_group_tells_the_first(
    tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "data.csv").write_bytes(content)
    job = job_of(tmp_path, direction(), path=str(tmp_path / "data.csv"))
    with pytest.raises(RequestError) as caught:
        count_groups(job, open_source(job.data, ["text", "label"], None), 4)
    assert "group A is empty" in str(caught.value)
    assert words in str(caught.value)


def test_unequal_groups_pass_where_pairs_are_not_used_or_documents_may_be_skipped(tmp_path: Path) -> None:
    counted(tmp_path, [["1", "0", "0"]], 4, direction(pair="order"))
    counted(tmp_path, [["1", "0", "0"]], 4, direction(pair="order", modes=["paired_rejection"]), on_bad="skip")


def test_reading_stops_once_every_group_has_been_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    inner = groups._rows

    def noting(source: Any) -> Any:
        for file, row in inner(source):
            read.append(row.row)
            yield file, row

    monkeypatch.setattr(groups, "_rows", noting)
    counted(tmp_path, [["1", "0"] + ["1"] * 500], 4, direction())
    assert len(read) <= 3
    read.clear()
    monkeypatch.setattr(groups, "SCAN_ROWS", 20)
    counted(tmp_path, [["1"] * 500], 4, direction())  # too many to look at: only the end can tell
    assert len(read) <= 22


def test_a_stream_pairs_by_column_only_and_may_turn_out_empty(tmp_path: Path) -> None:
    stream = ({"text": "t", "label": "1"} for _ in range(3))
    job = job_of(tmp_path, direction(pair="order", modes=["paired_rejection"]))
    with pytest.raises(RequestError, match="counts the groups ahead, which a stream does not allow"):
        count_groups(job, open_source(job.data, ["text", "label"], stream), 4)
    job = job_of(tmp_path, direction())
    count_groups(job, open_source(job.data, ["text", "label"], ({"text": "t", "label": "1"} for _ in range(3))), 4)


def test_token_groups_are_no_business_of_the_data(tmp_path: Path) -> None:
    tokens = {"name": "t", "positive": {"tokens": ["a"]}, "negative": {"tokens": ["b"]}}
    counted(tmp_path, [["7"]], 4, tokens)
