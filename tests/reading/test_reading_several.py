"""Several runs as one and runs aligned by their tokens; concatenations of the single runs are the judges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from fakes import Fake, write_run

import harvest
from harvest.errors import RequestError
from harvest.reading import joined

NAMES = {"residual.0": 6, "mlp.1": 4}


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> list[Fake]:
    """Three runs of one model, of which the second is compressed, and the third has no rows."""
    path = tmp_path_factory.mktemp("runs")
    return [
        write_run(path / "a", [[3, 1], [], [7]], NAMES, "bfloat16"),
        write_run(path / "b", [[5, 2, 9]], NAMES, "bfloat16", compression="zstd", files_of=[1]),
        write_run(path / "c", [[0]], NAMES, "bfloat16", complete=False),
    ]


@pytest.fixture(scope="module")
def runs(fakes: list[Fake]) -> Any:
    return harvest.open([fake.path for fake in fakes])


def whole(fakes: list[Fake], name: str) -> torch.Tensor:
    return torch.cat([fake.rows[name] for fake in fakes])


# ---- harvest.open([a, b]) --------------------------------------------------------------------------------------------


def test_rows_and_tokens_are_those_of_the_first_then_those_of_the_next(runs: Any, fakes: list[Fake]) -> None:
    assert (len(runs), runs.names, runs.complete) == (27, list(NAMES), False)
    for name in NAMES:
        assert torch.equal(runs[name][:], whole(fakes, name))
        picked = [26, 0, 10, 11, -1, 12]
        assert torch.equal(runs[name][picked], whole(fakes, name)[picked])
        assert torch.equal(runs[name][8:20], whole(fakes, name)[8:20])
    tokens = runs.tokens()
    for column in ("document", "position", "token", "chunk", "special"):
        expected = np.concatenate([fake.tokens[column] for fake in fakes])
        np.testing.assert_array_equal(tokens.column(column).to_numpy(zero_copy_only=False), expected)
    assert tokens.column("run").to_pylist() == [0] * 11 + [1] * 16
    assert runs.tokens(rows=[12, 3], columns=["run", "position"]).to_pylist() == [
        {"run": 1, "position": 1},
        {"run": 0, "position": 0},
    ]
    assert runs.tokens(slice(10, 12), columns=["run"]).column("run").to_pylist() == [0, 1]


def test_documents_are_told_apart_by_their_run(tmp_path: Path) -> None:
    """Both have a document 0, the last of one run and the first of the other."""
    one, two = (write_run(tmp_path / which, [[4]], NAMES).path for which in "ab")
    runs = harvest.open([one, two])
    assert runs.find(document=0).tolist() == list(range(8))
    assert runs.rows_where((pc.field("run") == 1) & (pc.field("document") == 0)).tolist() == [4, 5, 6, 7]
    around = runs.context(3)
    assert around.column("position").to_pylist() == [0, 1, 2, 3]
    assert set(around.column("run").to_pylist()) == {0}
    assert runs.documents().select(["run", "document", "rows"]).to_pylist() == [
        {"run": 0, "document": 0, "rows": 4},
        {"run": 1, "document": 0, "rows": 4},
    ]


def test_statistics_features_and_totals_are_over_all_rows(runs: Any, fakes: list[Fake]) -> None:
    for name in NAMES:
        rows = whole(fakes, name).double().numpy()
        found = runs.statistics()[name].all
        assert found.count == 27
        np.testing.assert_allclose(found.mean, rows.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(found.variance, rows.var(axis=0), rtol=1e-9)
    features, labels = runs.features("mlp.1", "last", ["run", "document", "label"])
    table = runs.tokens()
    keys = list(zip(table.column("run").to_pylist(), table.column("document").to_pylist()))
    last = {key: row for row, key in enumerate(keys)}
    assert list(zip(labels["run"].to_pylist(), labels["document"].to_pylist())) == list(last)
    np.testing.assert_array_equal(features, whole(fakes, "mlp.1")[list(last.values())].float().numpy())
    assert runs.summary()["rows"] == 27


@pytest.mark.parametrize("mixing", ["auto", "global", "blocks"])
def test_batches_go_over_the_rows_of_all(runs: Any, fakes: list[Fake], mixing: str) -> None:
    found = list(runs.batches(["mlp.1", "residual.0"], 5, seed=2, with_rows=True, mixing=mixing))
    assert sorted(int(row) for _, rows in found for row in rows) == list(range(27))
    for values, rows in found:
        assert all(torch.equal(values[name], whole(fakes, name)[rows]) for name in NAMES)


def test_local_runs_that_lie_open_are_mapped_as_one(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / which, [[40], [9]], NAMES, dtype="int8").path for which in "abc"]
    batches = harvest.open(paths).batches("mlp.1", 20)
    assert batches.mixing == "global: all 147 rows"
    assert harvest.open(paths[0]).batches("mlp.1", 20).mixing == "global: all 49 rows"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"names": {"residual.0": 6, "mlp.2": 4}}, r"differ in names: \['mlp.2', 'residual.0'\] and \['mlp.1', 'resid"),
        ({"names": {"residual.0": 6, "mlp.1": 5}}, "differ in widths: .*'mlp.1': 5.* and .*'mlp.1': 4"),
        ({"dtype": "float32"}, "differ in store.dtype: float32 and bfloat16"),
        ({"model": "n"}, "differ in fingerprint.model: n and m; .*harvest.join aligns"),
    ],
)
def test_runs_that_do_not_go_together_are_refused_by_what_differs(
    fakes: list[Fake], tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    other = write_run(tmp_path / "r", **{"names": NAMES, "dtype": "bfloat16", **options})
    with pytest.raises(RequestError, match=text):
        harvest.open([fakes[0].path, other.path])


def test_wrong_lists_are_refused_and_a_list_of_one_is_the_run(fakes: list[Fake]) -> None:
    with pytest.raises(RequestError, match=r"open: \[\] names no run"):
        harvest.open([])
    with pytest.raises(RequestError, match="is given twice"):
        harvest.open([fakes[0].path, fakes[1].path, f"{fakes[0].path}/"])
    with pytest.raises(RequestError, match="is not a run"):
        harvest.open([fakes[0].path, f"{fakes[0].path}-none"])
    assert repr(harvest.open([fakes[0].path])) == repr(harvest.open(fakes[0].path))


# ---- harvest.join ----------------------------------------------------------------------------------------------------

LENGTHS = [7, 9, 4, 11, 2]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Fake]:
    """Two models over the same tokens, in other shards, dtypes and compressions; a name of the second is its own."""
    path = tmp_path_factory.mktemp("pair")
    return [
        write_run(path / "base", [LENGTHS[:2], LENGTHS[2:]], NAMES, "bfloat16", model="base"),
        write_run(path / "chat", [LENGTHS], {**NAMES, "mlp.9": 3}, "int8", compression="zstd", model="chat"),
    ]


def test_joined_names_are_read_row_by_row_with_the_same_tokens(pair: list[Fake]) -> None:
    base, chat = pair
    both = harvest.join({"base": base.path, "chat": harvest.open(chat.path)})
    assert both.names == ["base/residual.0", "base/mlp.1", "chat/residual.0", "chat/mlp.1", "chat/mlp.9"]
    assert len(both) == sum(LENGTHS)
    assert torch.equal(both["base/mlp.1"][:], base.rows["mlp.1"])
    assert torch.equal(both["chat/mlp.1"][[5, 2]], chat.rows["mlp.1"][[5, 2]])
    assert torch.equal(both["mlp.9"][:], chat.rows["mlp.9"]), "only one run has it"
    with pytest.raises(RequestError, match=r"name 'mlp\.1': this run has base/residual\.0, base/mlp\.1, chat/"):
        both["mlp.1"]
    assert both.tokens() == harvest.open(base.path).tokens()
    assert both.documents() == harvest.open(base.path).documents()
    assert both.find(document=2).tolist() == harvest.open(chat.path).find(document=2).tolist()
    assert set(both.statistics()) == set(both.names)
    np.testing.assert_array_equal(both.features("chat/mlp.1", "max"), harvest.open(chat.path).features("mlp.1", "max"))
    assert both.runs["chat"].record.fingerprint["fingerprint.model"] == "chat"


@pytest.mark.parametrize("mixing", ["auto", "global"])
def test_batches_of_joined_runs_hold_the_same_tokens_in_every_place(pair: list[Fake], mixing: str) -> None:
    both = harvest.join(*(fake.path for fake in pair))
    names = ["0/residual.0", "1/residual.0", "mlp.9"]
    seen = []
    for values, rows in both.batches(names, 6, seed=3, with_rows=True, mixing=mixing):
        assert list(values) == names
        assert torch.equal(values["0/residual.0"], pair[0].rows["residual.0"][rows])
        assert torch.equal(values["1/residual.0"], pair[1].rows["residual.0"][rows])
        assert torch.equal(values["mlp.9"], pair[1].rows["mlp.9"][rows])
        seen += rows.tolist()
    assert sorted(seen) == list(range(sum(LENGTHS)))
    stacked = next(iter(both.batches(["0/mlp.1", "1/mlp.1"], 6, stack=True, dtype="float32", where=[3, 4, 5])))
    assert stacked.shape == (3, 2, 4)


def token_changed(fake: Fake, row: int) -> None:
    """Rewrites a token of the run's only shard, and the record with it."""
    import dataclasses

    import pyarrow.parquet as pq

    from harvest.store.ledger import Ledger
    from harvest.store.tables import keys_digest

    (record,) = fake.records
    path = Path(fake.path) / "shards" / record.attempt / "tokens.parquet"
    table = pq.read_table(path)
    tokens = table.column("token").to_numpy().copy()
    tokens[row] += 1
    table = table.set_column(table.column_names.index("token"), table.schema.field("token"), pa.array(tokens))
    pq.write_table(table, path)
    ledger = Ledger(fake.files)
    ledger.remove(record.shard.key)
    digest = keys_digest(table.column("document").to_numpy(), table.column("position").to_numpy(), tokens)
    assert ledger.commit(dataclasses.replace(record, keys_digest=digest))


@pytest.mark.parametrize("slab", [5, 1 << 20])
@pytest.mark.parametrize("shards", [[LENGTHS], [LENGTHS[:3], LENGTHS[3:]]])
def test_the_first_token_that_differs_is_named_in_both(
    tmp_path: Path, slab: int, shards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined, "SLAB_ROWS", slab)
    one = write_run(tmp_path / "a", shards, NAMES)
    two = write_run(tmp_path / "b", [LENGTHS], NAMES)
    for row in (26, 18):
        token_changed(two, row)
        two.records = list(harvest.open(two.path).shards)
        document, position, token = (int(one.tokens[key][row]) for key in ("document", "position", "token"))
        here, there = (f"document {document}, position {position}, token {token + n}" for n in (1, 0))
        with pytest.raises(RequestError) as raised:
            harvest.join({"a": one.path, "b": two.path})
        assert f"join: b and a differ first in row {row}: {here} in b, {there} in a;" in str(raised.value)


def test_a_run_that_ends_early_is_refused_with_the_token_that_it_lacks(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", [LENGTHS], NAMES)
    two = write_run(tmp_path / "b", [LENGTHS[:3]], NAMES, complete=False)
    for order in ({"a": one.path, "b": two.path}, {"b": two.path, "a": one.path}):
        text = r"join: a goes on with document 3, position 0, token 39 where b ends \(20 rows, unfinished\)"
        with pytest.raises(RequestError, match=text):
            harvest.join(order)


def test_equal_shards_are_told_by_their_hashes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (write_run(tmp_path / which, [[5, 4], [9], [3]], NAMES).path for which in "ab")
    monkeypatch.setattr(joined, "_first_difference", lambda *_: pytest.fail("tokens were read"))
    assert len(harvest.join(one, two)) == 21


def test_several_runs_that_read_as_one_join_others(tmp_path: Path) -> None:
    halves = [write_run(tmp_path / which, [[5, 4]], NAMES).path for which in "ab"]
    others = [write_run(tmp_path / which, [[5], [4]], {"attn.0": 2}).path for which in "cd"]
    both = harvest.join({"one": halves, "two": harvest.open(others)})
    assert len(both) == 18
    assert both["attn.0"].shape == (18, 2)
    assert both.context(8).column("run").to_pylist() == [0] * 4


def test_wrong_joins_are_refused(pair: list[Fake], tmp_path: Path) -> None:
    base, chat = (fake.path for fake in pair)
    for call, text in (
        (lambda: harvest.join(base), "1 runs; give at least two"),
        (lambda: harvest.join({}), "0 runs"),
        (lambda: harvest.join({"a/b": base, "c": chat}), "cannot be called 'a/b'"),
        (lambda: harvest.join(base, write_run(tmp_path / "r", store=False).path), "stores no rows"),
    ):
        with pytest.raises(RequestError, match=text):
            call()


def test_what_cannot_be_read_as_one_is_refused_in_one_line(pair: list[Fake], runs: Any) -> None:
    base, chat = (fake.path for fake in pair)
    both = harvest.join(base, chat)
    assert harvest.open(runs) is runs
    for call, text in (
        (lambda: harvest.join({1: base, "1": chat}), "join: two runs are called '1'"),
        (lambda: harvest.join(both, base), "join: 0 is joined already; give its runs"),
        (lambda: harvest.open([both, base]), r"open: Joined\(.* is several runs; give those"),
        (lambda: harvest.open([base, runs]), r"open: Runs\(.* is several runs; give those"),
        (lambda: harvest.open(both), r"open: Joined\(.* is several runs; give those"),
        (lambda: harvest.open(None), "open: None is no run; allowed are a path, "),
        (lambda: harvest.open([base, 5]), "open: 5 is no run; allowed are a path, "),
        (lambda: harvest.join(base, None), "open: None is no run"),
        (lambda: runs.directions(), r"directions: each run has its own; ask each of \.runs"),
        (lambda: both.directions("pca"), r"directions: each run has its own; ask each of \.runs"),
        (lambda: both.summary(), r"summary: each run has its own; ask each of \.runs"),
    ):
        with pytest.raises(RequestError, match=text) as raised:
            call()
        assert "\n" not in str(raised.value)
