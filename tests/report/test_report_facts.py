"""Every fact of a report, recomputed from the run's own tables by numpy, pyarrow and json alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from plainrun import read_plain
from reportcase import DIRECTION, records, run
from tiny import tiny_llama

import harvest
from harvest.reading.quote import spelled
from harvest.report.concepts import Projected
from harvest.report.health import massive_dimensions
from harvest.report.page import Facts
from harvest.report.positions import PositionNorms, chosen_names, evenly
from harvest.report.work import work
from harvest.report.write import facts_of
from harvest.store.layout import attempt_name, parse_attempt

ROWS = records(90)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "run"
    data = [*ROWS, {"text": None, "label": "1"}]
    tables = {"data": {"on_bad": "skip"}, "store": {"shard_documents": 32}, "directions": [DIRECTION]}
    run(path, data, **tables)
    return path


@pytest.fixture(scope="module")
def facts(folder: Path) -> Facts:
    found = harvest.open(folder)
    texts = [bytes([value]) for value in range(256)]  # not the run's, but of the right kind
    return facts_of(found, lambda: texts)


def test_what_the_run_holds_is_what_its_tables_hold(folder: Path, facts: Facts) -> None:
    plain = read_plain(folder)
    held = {what: (value, note) for what, value, note in facts.overview.holds}
    assert held["documents"][0] == str(len(plain.documents))
    assert held["rows of each name"][0] == held["tokens"][0] == f"{len(plain.tokens['document']):,}"
    assert held["on disk"][1] == "in 3 shards"
    size = sum(path.stat().st_size for path in (folder / "shards").rglob("*") if path.is_file())
    assert held["on disk"][0] == f"{size / 1000:.2f} kB"
    reasons = [row["reason"] for row in plain.documents if row["status"] == "skipped"]
    assert facts.overview.skipped == ((reasons[0], 1),)
    assert facts.overview.listed == ((90, reasons[0]),)


def test_the_job_and_the_commands_name_this_run(folder: Path, facts: Facts) -> None:
    assert json.loads(facts.overview.job) == json.loads((folder / "run.json").read_text())["job"]
    commands = dict(facts.overview.commands).values()
    assert f"harvest verify {folder}" in commands
    assert f"harvest export safetensors {folder} OUT --directions" in commands
    told = dict(facts.overview.versions)
    assert told["harvest"] == harvest.__version__
    assert "torch" in told["computed by"]


def test_health_is_what_float64_over_the_stored_rows_gives(folder: Path, facts: Facts) -> None:
    plain = read_plain(folder)
    special = plain.tokens["special"]
    assert special.any()
    assert not isinstance(facts.health, str)
    assert [one.name for one in facts.health] == list(plain.rows)
    for one in facts.health:
        rows = plain.rows[one.name].astype(np.float64)
        norms = np.linalg.norm(rows, axis=1)
        assert one.rows == len(rows)
        assert one.mean_norm == pytest.approx(norms.mean())
        assert one.ordinary_norm == pytest.approx(norms[~special].mean())
        assert one.special_norm == pytest.approx(norms[special].mean())
        assert one.largest_norm == pytest.approx(norms.max())
        assert one.largest_value == pytest.approx(rows.flat[np.abs(rows).argmax()])
        assert one.high_norm_share == pytest.approx((norms > 10 * np.median(norms)).mean(), abs=0.02)
        assert one.quantiles is not None
        for share, norm in one.quantiles.items():
            assert norm == pytest.approx(np.quantile(norms, share, method="inverted_cdf"), rel=0.01)
        size = np.sqrt((rows**2).mean(axis=0))
        assert one.massive_dimensions == int((size >= 10 * np.median(size)).sum())


def test_massive_dimensions_are_named_with_their_size() -> None:
    rows = np.random.default_rng(0).normal(size=(500, 9))
    rows[:, 4] = rows[:, 4] * 40 + 7
    rows[:, 2] += 300
    size = np.sqrt((rows**2).mean(axis=0))
    found = massive_dimensions(rows.mean(axis=0), rows.var(axis=0))
    assert [dimension for dimension, _ in found] == [2, 4]
    assert [times for _, times in found] == pytest.approx([size[d] / np.median(size) for d in (2, 4)])
    assert massive_dimensions(np.zeros(4), np.zeros(4)) == []
    assert massive_dimensions(np.zeros(0), np.zeros(0)) == []


def test_norms_by_position_are_means_of_rows_at_those_positions(folder: Path, facts: Facts) -> None:
    plain = read_plain(folder)
    norms = facts.positions
    assert isinstance(norms, PositionNorms)
    assert norms.shards == 3
    positions = plain.tokens["position"]
    assert list(norms.norms) == chosen_names(list(plain.rows)) == ["residual.0", "residual.1", "residual.2"]
    assert norms.ranges[:5] == ((0, 0), (1, 1), (2, 2), (3, 3), (4, 5))
    shard = np.minimum(plain.tokens["document"] // 32, 2)
    sampled = 0
    for i, (first, last) in enumerate(norms.ranges):
        inside = (positions >= first) & (positions <= last)
        sampled += sum(min(8, int((inside & (shard == s)).sum())) for s in range(3))
        for name, found in norms.norms.items():
            every = np.linalg.norm(plain.rows[name][inside].astype(np.float64), axis=1)
            assert every.min() * 0.999 <= found[i] <= every.max() * 1.001
            if all((inside & (shard == s)).sum() <= 8 for s in range(3)):  # all of them are in the sample
                assert found[i] == pytest.approx(every.mean())
    assert norms.rows == sampled
    assert int(positions.max()) <= norms.ranges[-1][1]


def test_the_figures_of_directions_are_those_of_the_card(folder: Path, facts: Facts) -> None:
    card = json.loads((folder / "directions/tone.json").read_text())
    assert not isinstance(facts.concepts, str)
    (concept,) = facts.concepts
    assert concept.groups == "label 1 against 0"
    told = {(entry["mode"], entry["at"]): entry for entry in card["directions"]}
    assert len(concept.entries) == len(told) == 6
    for entry in concept.entries:
        expected = told[entry.mode, entry.at]
        assert entry.auroc.value == expected["evaluation"]["auroc"]["value"]
        assert entry.auroc.low == expected["evaluation"]["auroc"]["low"]
        assert list(entry.counts) == expected["counts"]["rows"]
        assert entry.at == f"{entry.series}.{entry.layer}"
    assert {best.entry.mode: best.entry.at for best in concept.best} == card["best"]


def test_projections_and_coloured_tokens_are_the_rows_along_the_vector(folder: Path, facts: Facts) -> None:
    plain = read_plain(folder)
    assert not isinstance(facts.concepts, str)
    found = facts.concepts[0].projected
    assert isinstance(found, Projected)
    vector = harvest.open(folder).directions(found.mode)["tone"][found.at].vector
    assert vector is not None
    along = plain.rows[found.at].astype(np.float64) @ vector
    last = {int(document): i for i, document in enumerate(plain.tokens["document"])}
    ends = {document: along[i] for document, i in last.items()}
    for values, label in ((found.a, "1"), (found.b, "0")):
        mine = [value for document, value in ends.items() if ROWS[document]["label"] == label]
        assert len(values)
        assert all(np.isclose(value, mine, atol=1e-5).any() for value in values)
    assert 20 < len(found.a) + len(found.b) < 60, "the held-out share of 90"
    assert [one.along for one in found.most] == pytest.approx(sorted([*found.a, *found.b])[::-1][:3])
    assert [one.along for one in found.least] == pytest.approx(sorted([*found.a, *found.b])[:3])
    for one in (*found.most, *found.least):
        assert one.group == ("A" if ROWS[one.document]["label"] == "1" else "B")
        mine = plain.tokens["document"] == one.document
        assert [token.along for token in one.tokens] == pytest.approx(along[mine].tolist(), abs=1e-5)
        assert [token.position for token in one.tokens] == plain.tokens["position"][mine].tolist()
        assert one.along == pytest.approx(one.tokens[-1].along, abs=1e-5)


def test_stages_tries_and_self_check_are_those_of_the_records(folder: Path, facts: Facts) -> None:
    made = [json.loads(path.read_text()) for path in sorted((folder / "ledger").glob("*.json"))]
    told = facts.work
    assert told.stages is not None
    assert told.stages.stages["forward"].busy == pytest.approx(sum(one["seconds"]["forward"] for one in made))
    assert told.lives == 1
    assert told.idle_tries == 0
    errors = {name: max(one["self_check"].get(name, 0.0) for one in made) for one in made for name in one["self_check"]}
    assert dict(told.self_check) == errors
    assert told.failed == ()


def test_a_run_of_several_lives_says_so_and_counts_tries_that_no_record_names(tmp_path: Path) -> None:
    rows, path = records(30), tmp_path / "run"
    run(path, rows, data={"limit": 15}, store={"shard_documents": 10})
    run(path, rows, data={"limit": 30}, store={"shard_documents": 10})
    found = harvest.open(path)
    assert work(found, found.summary()).lives == 2
    assert work(found, found.summary()).idle_tries == 0
    second = found.shards[1]
    key, life, number = parse_attempt(second.attempt) or ("", "", 0)
    found.shards[1] = dataclasses.replace(second, attempt=attempt_name(key, life, number + 3))
    assert work(found, found.summary()).idle_tries == 2, "one of the three numbers is that of the third shard"


def test_values_that_are_no_numbers_are_counted_by_name(tmp_path: Path) -> None:
    import torch

    model = tiny_llama(layers=2, vocab=300)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    run(tmp_path / "run", records(12), model=model)
    found = facts_of(harvest.open(tmp_path / "run"))
    assert not isinstance(found.health, str)
    rows = pq.read_table(next((tmp_path / "run/shards").glob("*/tokens.parquet"))).num_rows
    by_name = {one.name: one for one in found.health}
    assert by_name["residual.0"].non_finite == 0
    assert by_name["residual.1"].non_finite == rows
    assert by_name["residual.1"].rows == 0
    assert by_name["residual.1"].mean_norm is None


def test_tokens_are_spelled_with_letters_of_several_tokens_at_their_last_one() -> None:
    pieces = [b"a", "é".encode()[:1], "é".encode()[1:], b"\xff", b"\n\x00", "漢".encode()]
    assert list(spelled([0, 1, 2, 3, 4, 5, 9], pieces)) == ["a", "", "é", "⟨3⟩", "\n\x00", "漢", "⟨9⟩"]
    assert list(spelled([1, 0], pieces)) == ["", "\ufffda"]
    assert list(spelled([7, 8], None)) == ["⟨7⟩", "⟨8⟩"]


def test_a_few_layers_stand_for_all() -> None:
    names = ["embedding", *(f"residual.{i}" for i in range(30)), "mlp.3"]
    assert chosen_names(names) == ["residual.0", "residual.10", "residual.19", "residual.29"]
    assert chosen_names(["final_norm", "module:x.3"]) == ["final_norm", "module:x.3"]
    assert chosen_names([]) == []
    assert evenly(3, 8) == [0, 1, 2]
    assert evenly(0, 8) == []
    assert evenly(1000, 2) == [0, 999]


@pytest.mark.parametrize(("piece", "sign"), [(b"\n", "↵"), (b"\t", "→"), (b"\x07", "·"), (b"a", "a")])
def test_control_characters_are_shown_as_signs(folder: Path, piece: bytes, sign: str) -> None:
    (concept,) = facts_of(harvest.open(folder), lambda: [piece] * 300).concepts
    assert isinstance(concept.projected, Projected)
    assert {token.text for one in concept.projected.most for token in one.tokens} == {sign}
