"""Objects of the caller's: each record once, whatever kind of object holds them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvest.errors import RequestError, WorkError
from harvest.records import DOCUMENTS_PER_FILE
from harvest.settings.tables import DataSettings
from harvest.source.open import open_source
from harvest.source.sample import Sample, uniform

RECORDS = [{"text": f"t{i}", "n": i, "data": {"body": f"b{i}"}} for i in range(700)]


def generate() -> Iterator[dict[str, Any]]:
    yield from RECORDS


class Again:
    """An iterable that starts anew each time."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(RECORDS)


class MapStyle:
    """What torch calls a map-style dataset."""

    def __len__(self) -> int:
        return len(RECORDS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return RECORDS[index]


KINDS = {
    "list": lambda: RECORDS,
    "tuple": lambda: tuple(RECORDS),
    "map style": MapStyle,
    "dataset": lambda: datasets.Dataset.from_list(RECORDS).with_format("numpy"),
    "iterable dataset": lambda: datasets.Dataset.from_list(RECORDS).to_iterable_dataset(num_shards=3),
    "iterable": Again,
    "function": lambda: generate,
    "generator": generate,
}


def open_objects(objects: Any, columns: tuple[str, ...] = ("text", "data.body", "n"), **data: Any) -> Any:
    return open_source(DataSettings(path="mine", **data), columns, objects)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_object_gives_each_record_once_in_slices(kind: str) -> None:
    source = open_objects(KINDS[kind]())
    (file,) = source.files
    assert (file.name, file.path, file.format) == ("mine", "", "objects")
    rows, cursor = [], None
    for start in range(0, 900, 150):
        piece = source.rows(0, start, start + 150, cursor)
        rows += list(piece)
        cursor = piece.cursor
        assert piece.ended is (start + 150 >= 700)
    assert [(row.row, dict(row.values)) for row in rows] == [
        (i, {"text": f"t{i}", "data.body": f"b{i}", "n": i}) for i in range(700)
    ]
    reference = open_objects(RECORDS).rows(0, 450, 600)
    piece = open_objects(KINDS[kind]()).rows(0, 450, 600)
    assert list(piece) == list(reference)
    assert piece.digest == reference.digest


def test_plain_texts_are_a_column_text_and_other_things_are_bad_rows() -> None:
    rows = list(open_objects(["a", 3, None, {"text": "b"}], ("text", "@file")).rows(0, 0, 9))
    assert [dict(row.values) for row in (rows[0], rows[3])] == [{"text": t, "@file": "mine"} for t in "ab"]
    assert rows[1].error == "mine row 1: neither text nor a record but a int"
    assert rows[2].error == "mine row 2: neither text nor a record but a NoneType"


def test_numpy_values_have_the_digest_of_the_plain_ones() -> None:
    plain = open_objects([{"ids": [1, 2]}], ("ids",)).rows(0, 0, 1)
    numpy = open_objects([{"ids": np.array([1, 2])}], ("ids",)).rows(0, 0, 1)
    list(plain), list(numpy)
    assert plain.digest == numpy.digest


def test_a_generator_allows_a_look_ahead_and_a_second_try_but_never_other_rows() -> None:
    source = open_objects(generate())
    assert len(list(source.rows(0, 0, 256))) == 256
    for start in (0, 100, 100, 200, 100):
        assert [row.values["n"] for row in source.rows(0, start, start + 100)] == list(range(start, start + 100))
    assert [row.values["n"] for row in source.rows(0, 600, 650)] == list(range(600, 650))
    with pytest.raises(RequestError, match="can be read once and has moved on to row 600, row 0 is gone"):
        list(source.rows(0, 0, 10))
    assert list(source.rows(0, 800, 900)) == []


def test_a_generator_is_held_in_memory_for_two_slices_only() -> None:
    alive: set[int] = set()

    class Text(str):
        def __init__(self, _: str) -> None:
            alive.add(id(self))

        def __del__(self) -> None:
            alive.discard(id(self))

    source = open_objects((Text(f"t{i}") for i in range(3000)), ("text",))
    for start in range(0, 3000, 100):
        for _ in source.rows(0, start, start + 100):
            pass
        assert len(alive) <= 210


def test_what_is_no_sequence_of_records_is_refused() -> None:
    split = datasets.DatasetDict({"train": datasets.Dataset.from_list(RECORDS[:2])})
    for wrong in ("one text", b"bytes", {"text": ["a"]}, split, 3, str):
        with pytest.raises(RequestError, match="is no sequence of texts or records"):
            open_objects(wrong)
    with pytest.raises(RequestError, match=r"column 'text'.* it has body"):
        open_objects([{"body": "x"}])


def test_lists_and_arrays_of_token_ids_are_documents_where_data_ids_names_them() -> None:
    ids = [[1, 2, 3], np.array([4, 5]), (6,), {"ids": [7]}]
    job = DataSettings(path="mine", ids="ids")
    for source in (ids, iter(ids), lambda: iter(ids)):
        rows = list(open_source(job, ["ids"], source).rows(0, 0, 9))
        assert [list(row.values["ids"]) for row in rows] == [[1, 2, 3], [4, 5], [6], [7]]
    for source in (ids, np.array([[1, 2], [3, 4]])):
        with pytest.raises(RequestError, match=r"data\.ids = 'ids'"):
            open_source(DataSettings(path="mine"), ["text"], source)


def test_a_data_frame_is_refused_with_the_way_out() -> None:
    frame = pandas.DataFrame({"text": ["a", None]})
    for wrong in (frame, frame["text"]):
        with pytest.raises(RequestError, match=r"datasets\.Dataset\.from_pandas\(frame\)"):
            open_objects(wrong)


def test_a_generator_that_raises_names_its_row() -> None:
    def broken() -> Iterator[str]:
        yield "a"
        raise KeyError("oops")

    source = open_objects(broken(), ("text",))
    with pytest.raises(WorkError, match="mine row 1: reading it raised KeyError: 'oops'"):
        list(source.rows(0, 0, 5))


def _uniform_of(document: int, seed: int) -> float:
    """splitmix64 in whole numbers."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = (x + golden) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    return (mix(document ^ mix((seed + golden) & mask)) >> 11) / 2**53


@given(file=st.integers(0, 9000), row=st.integers(0, 2**39), seed=st.integers(-(2**40), 2**63 - 1))
@settings(deadline=None)
def test_the_sample_is_one_hash_of_id_and_seed_whether_for_one_or_for_many(file: int, row: int, seed: int) -> None:
    ids = np.arange(row, row + 5) + file * DOCUMENTS_PER_FILE
    expected = [_uniform_of(int(document), seed) for document in ids]
    assert uniform(ids, seed).tolist() == expected
    for share in (0.2, 0.5, 0.9):
        assert Sample(share=share, seed=seed).keep(file, row, row + 5).tolist() == [u < share for u in expected]


def test_shares_are_nested_fair_and_counted_without_reading() -> None:
    kept = {}
    for share in (0.01, 0.1, 0.2, 1.0, None):
        sample = Sample(share=share, seed=7)
        kept[share] = set(np.flatnonzero(sample.keep(3, 1000, 201_000)).tolist())
        assert sample.count(3, 1000, 201_000) == len(kept[share])
    assert kept[0.01] < kept[0.1] < kept[0.2] < kept[1.0] == kept[None]
    for share in (0.01, 0.1, 0.2):
        assert abs(len(kept[share]) - 200_000 * share) < 5 * (200_000 * share * (1 - share)) ** 0.5
    other = Sample(share=0.1, seed=8).keep(3, 1000, 201_000)
    assert 0.05 < len(kept[0.1] & set(np.flatnonzero(other).tolist())) / len(kept[0.1]) < 0.15


def test_sampled_rows_are_those_of_the_mask_and_the_others_are_not_parsed(tmp_path: Path) -> None:
    kept = Sample(share=0.3, seed=5).keep(0, 0, 500)
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{i}"}}\n' if keep else "{\n" for i, keep in enumerate(kept)))
    source = open_source(DataSettings(path=str(tmp_path / "a.jsonl"), sample=0.3, seed=5), ["text"])
    rows = list(source.rows(0, 0, 500))
    assert [row.row for row in rows] == np.flatnonzero(kept).tolist()
    assert [row.values["text"] for row in rows] == [str(row.row) for row in rows]
    assert source.kept(0, 100, 400) == kept[100:400].sum() == len(list(source.rows(0, 100, 400)))
    for kind in ("list", "dataset", "generator"):
        sampled = open_objects(KINDS[kind](), sample=0.3, seed=5)
        assert [row.row for row in sampled.rows(0, 0, 500)] == np.flatnonzero(kept).tolist()
