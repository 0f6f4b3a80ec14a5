"""Which rows go out: the filter against numpy, contexts against plain loops, casts against the dtype's end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from fakes import Fake, write_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import harvest
from harvest.errors import RequestError, WorkError
from harvest.export import selection
from harvest.export.casting import cast_rows
from harvest.export.naming import label
from harvest.export.rowfilter import row_filter
from harvest.export.selection import choose_units, context_starts
from harvest.store.tables import tokens_schema

SCHEMA = tokens_schema(spans=True)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return write_run(tmp_path_factory.mktemp("run") / "r", files_of=[0, 0, 1, 1])


FILTERS = {
    "position > 0": lambda t: t["position"] > 0,
    "position >= 1 and not special": lambda t: (t["position"] >= 1) & ~t["special"],
    "special": lambda t: t["special"],
    "special == False": lambda t: ~t["special"],
    "token in [5, 18, 31] or document == 1099511627776": lambda t: (
        np.isin(t["token"], [5, 18, 31]) | (t["document"] == 2**40)
    ),
    "token not in (5,)": lambda t: t["token"] != 5,
    "0 < position <= 3": lambda t: (t["position"] > 0) & (t["position"] <= 3),
    "position != chunk and -1 < position": lambda t: t["position"] != t["chunk"],
    " (position < 2 or (position > 4)) ": lambda t: (t["position"] < 2) | (t["position"] > 4),
}


@pytest.mark.parametrize("text", FILTERS)
def test_a_filter_keeps_the_rows_that_numpy_keeps(text: str, fake: Fake) -> None:
    run = harvest.open(fake.path)
    kept = run.rows_where(row_filter(text, run.tokens(slice(0, 0)).schema))
    np.testing.assert_array_equal(kept, np.flatnonzero(FILTERS[text](fake.tokens)))


@pytest.mark.parametrize(("text", "kept"), [("span == 'a'", [0]), ("span != 'a'", [1, 2]), ("span == ''", [2])])
def test_a_token_outside_all_spans_has_the_empty_span(text: str, kept: list[int]) -> None:
    table = pa.table({"span": pa.array(["a", "b", None]).dictionary_encode(), "row": [0, 1, 2]})
    assert table.filter(row_filter(text, SCHEMA))["row"].to_pylist() == kept


@pytest.mark.parametrize(
    "text",
    [
        "",
        "position",
        "1",
        "position >",
        "layer == 3",
        "__import__('os').system('true') == 0",
        "position.__class__ == 1",
        "position + 1 == 2",
        "position == 'a'",
        "position in token",
        "token in [position]",
        "position is None",
        "[x for x in (1,)] == 1",
        "lambda: 1",
        "not position",
        "position == None",
        "position = 3",
        "span > 3",
        "(" * 5000 + "position" + ")" * 5000,
        "not " * 4000 + "special",
        "special " + "x" * 20_000,
        "position == 1\x00",
        "position == 99999999999999999999999",
    ],
    ids=lambda text: text[:30],
)
def test_what_is_no_filter_is_refused_in_one_short_line(text: str) -> None:
    with pytest.raises(RequestError, match="--rows") as error:
        row_filter(text, SCHEMA)
    assert len(str(error.value)) < 700
    assert "\n" not in str(error.value)


def contexts_by_hand(tokens: dict[str, np.ndarray], rows: Sequence[int], context: int) -> list[int]:
    """First rows: stretches are cut from their own first row on."""
    starts, at = [], 0
    while at + context <= len(rows):
        piece = rows[at : at + context]
        first = piece[0]
        whole = all(
            row == first + i
            and tokens["document"][row] == tokens["document"][first]
            and tokens["position"][row] == tokens["position"][first] + i
            for i, row in enumerate(piece)
        )
        starts += [first] if whole else []
        if whole:
            at += context
        else:  # on to the row where the stretch breaks
            broken = next(
                i
                for i, row in enumerate(piece)
                if row != first + i or tokens["document"][row] != tokens["document"][first]
            )
            at += broken
    return starts


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), context=st.integers(1, 4), slab=st.integers(1, 9))
def test_contexts_are_whole_and_of_one_document_whatever_the_filter_leaves(
    data: st.DataObject, context: int, slab: int, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "SLAB_ROWS", slab)
    kept = data.draw(st.none() | st.lists(st.booleans(), min_size=31, max_size=31))
    rows = list(range(31)) if kept is None else np.flatnonzero(kept).tolist()
    expected = contexts_by_hand(fake.tokens, rows, context)
    run, numbers = harvest.open(fake.path), None if kept is None else np.array(rows, np.int64)
    if expected:
        assert context_starts(run, numbers, context).tolist() == expected
    else:
        with pytest.raises(RequestError, match="--context"):
            context_starts(run, numbers, context)


def test_every_context_goes_out_once_and_the_limit_counts_rows(fake: Fake) -> None:
    run = harvest.open(fake.path)
    plain = choose_units(run, None, 2, None, None)
    shuffled = choose_units(run, None, 2, 7, None)
    rows = shuffled.numbers(0, shuffled.count)
    assert sorted(rows) == plain.numbers(0, plain.count).tolist()
    assert rows.tolist() != plain.numbers(0, plain.count).tolist()
    limited = choose_units(run, None, 2, 7, 5)
    assert limited.numbers(0, limited.count).tolist() == rows[:4].tolist()
    with pytest.raises(RequestError, match="--limit = 1"):
        choose_units(run, None, 2, None, 1)


@pytest.mark.parametrize(("dtype", "largest", "beyond"), [("float16", 65504.0, 65520.0), ("bfloat16", 3.38e38, 3.4e38)])
def test_a_cast_stops_at_the_first_value_beyond_the_end_of_the_dtype(dtype: str, largest: float, beyond: float) -> None:
    rows = torch.tensor([[1.0, largest], [float("nan"), float("-inf")]])
    cast = cast_rows(rows, dtype, str)
    assert cast.isfinite().tolist() == [[True, True], [False, False]]
    rows[1, 0] = -beyond
    with pytest.raises(WorkError, match=f"^row 1: -.* does not fit into {dtype}"):
        cast_rows(rows, dtype, lambda row: f"row {row}")


PLAN: dict[str, Any] = {
    "residual.3": {"module": "model.layers.3"},
    "residual_pre.3": {"module": "model.layers.3"},
    "mlp.3": {"module": "model.layers.3.mlp"},
    "module:model.layers.3.mlp.act_fn": {"module": "model.layers.3.mlp.act_fn"},
}


@pytest.mark.parametrize(
    ("name", "naming", "expected"),
    [
        ("residual.3", None, "residual.3"),
        ("residual.3", "tl", "blocks.3.hook_resid_post"),
        ("residual_pre.3", "tl", "blocks.3.hook_resid_pre"),
        ("attn_heads.11", "tl", "blocks.11.attn.hook_z"),
        ("embedding", "tl", "blocks.0.hook_resid_pre"),
        ("residual.3", "hf", "model.layers.3"),
        ("mlp.3", "hf", "model.layers.3.mlp"),
        ("module:model.layers.3.mlp.act_fn", "hf", "model.layers.3.mlp.act_fn"),
    ],
)
def test_a_name_has_its_spelling_elsewhere(name: str, naming: str | None, expected: str) -> None:
    assert label(name, naming, PLAN) == expected


@pytest.mark.parametrize(("name", "naming"), [("mlp.3", "tl"), ("residual_pre.3", "hf"), ("residual.3", "nnsight")])
def test_a_name_without_that_spelling_is_refused(name: str, naming: str) -> None:
    with pytest.raises(RequestError, match="--naming"):
        label(name, naming, PLAN)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("variant in [300]", 0),
        ("variant not in [-129]", 3),
        ("variant in [1, 300]", 2),
        ("variant in [1.5, 1.0, 1e999]", 2),
        (f"document in [{2**70}]", 0),
    ],
)
def test_a_number_that_no_row_can_have_is_no_row_and_no_error(text: str, kept: int) -> None:
    columns = {"variant": pa.array([0, 1, 1], pa.int8()), "document": pa.array([2**60, 1, 2], pa.int64())}
    table = pa.table(columns)
    assert len(table.filter(row_filter(text, table.schema))) == kept
