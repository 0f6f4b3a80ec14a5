"""Sums that every checksum vouches for are still made again from the stored rows: all reductions, also one's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commandcase import jsonl
from runcase import run
from spoilt import SHARD, STATES, object_of, spoil_sums
from tiny import byte_tokenizer, tiny_llama

from harvest import reduce
from harvest.checking.findings import Report
from harvest.checking.repair import repair_run
from harvest.checking.verify import verify_run
from harvest.errors import DamageError

TEXTS = ["".join(chr(97 + (i * k + k * k) % 26) for i in range(40 + 3 * k)) for k in range(12)]
JOB = {"store": {"shard_documents": 6}, "capture": {"layers": [1, 2]}}
STATISTICS = {"covariance": True, "also": ["places", "health"]}

PLACES = '''
"""Sums that ask where a row is from, and whether they come in dataset order."""
import numpy as np


class Places:
    kind, version = "places", 1

    def zero(self):
        return {"rows": np.zeros(1, np.int64), "turns": np.zeros(1, np.int64), "last": np.zeros(0, np.int64),
                "sum": np.zeros(0)}

    def update(self, state, block):
        if not len(block.rows):
            return state
        order = block.document * 1000 + block.position
        weights = (1.0 + block.document % 7 + block.position + 0.5 * block.special)[:, None]
        part = {"rows": np.array([len(order)]), "turns": np.array([int((np.diff(order) < 0).sum())]),
                "last": order[-1:], "sum": (block.rows.double().numpy() * weights).sum(axis=0)}
        return self.merge(state, part)

    def merge(self, first, second):
        if not first["rows"][0] or not second["rows"][0]:
            return first if first["rows"][0] else second
        turned = int(second["last"][0] < first["last"][0])
        return {"rows": first["rows"] + second["rows"], "turns": first["turns"] + second["turns"] + turned,
                "last": second["last"], "sum": first["sum"] + second["sum"]}

    def finalise(self, state):
        return state

    def arrays(self, state):
        return state

    def from_arrays(self, arrays):
        return dict(arrays)


REDUCTION = Places()
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reduction of one's own, in a folder that the package then spreads over."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/places.py").write_text(PLACES)
    monkeypatch.setattr(reduce, "__path__", [*reduce.__path__, str(tmp_path / "own")])
    monkeypatch.delitem(sys.modules, "harvest.reduce.places", raising=False)


@pytest.fixture
def path(own: None, tmp_path: Path) -> Path:
    """A complete run of two shards."""
    source = jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    run(tmp_path / "run", source, **JOB, statistics=STATISTICS)
    return tmp_path / "run"


def damage(report: Report) -> list[str]:
    return [finding.what for finding in report.findings if finding.damage]


def test_a_sound_run_has_every_reduction_made_again_in_blocks_of_any_size(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows in (10**6, 7, 1):
        monkeypatch.setattr("harvest.checking.scan.SCAN_BYTES", 16 * 4 * rows)
        report = verify_run(path)
        assert report.findings == ()
        assert report.remade == ("covariance", "health", "moments", "places")
        assert "sums made again from rows: covariance, health, moments, places; everything is as it was" in report.text
    assert report.data["remade"] == ("covariance", "health", "moments", "places")


CHANGES: list[tuple[str, str, Callable[[np.ndarray], np.ndarray]]] = [
    ("covariance", "upper", lambda upper: upper * np.where(np.arange(len(upper)) == 20, 1 + 1e-6, 1)),
    ("covariance", "mean", lambda mean: mean + 1e-5 * np.eye(len(mean))[3]),
    ("covariance", "rows", lambda rows: rows - 1),
    ("places", "sum", lambda total: total * (1 + 1e-6)),
    ("places", "rows", lambda rows: rows + 1),
    ("places", "turns", lambda turns: turns + 1),
    ("places", "last", lambda last: last - 1),
    ("moments", "ordinary.m2", lambda m2: m2 * (1 + 1e-6)),
    ("moments", "ordinary.floats", lambda floats: floats * (1 + 1e-6)),
    ("health", "counts", lambda counts: counts + np.eye(len(counts), dtype=np.int64)[0]),
]


@pytest.mark.parametrize(("kind", "field", "change"), CHANGES)
def test_a_state_that_its_checksum_the_ledger_and_every_merged_file_vouch_for_is_damage_where_rows_say_otherwise(
    kind: str, field: str, change: Callable[[np.ndarray], np.ndarray], path: Path
) -> None:
    def spoil(arrays: dict[str, np.ndarray]) -> None:
        key = f"{kind}/residual.2/{field}"
        arrays[key] = change(arrays[key]).astype(arrays[key].dtype)

    spoil_sums(path, spoil)
    report = verify_run(path)
    told = "" if kind == "moments" else f"{kind}: "
    assert damage(report) == [f"residual.2: {told}{field} is not what the stored rows give"]
    assert report.findings[0].shard == SHARD


def test_repair_harvests_the_shard_of_such_a_state_again_and_brings_back_its_bits(path: Path) -> None:
    def spoil(arrays: dict[str, np.ndarray]) -> None:
        arrays["places/residual.1/sum"] += 1e-3

    clean = object_of(path, STATES).read_bytes()
    spoil_sums(path, spoil)
    repaired = repair_run(path, model=tiny_llama(vocab=300), tokenizer=byte_tokenizer())
    assert (repaired.harvested, repaired.after.findings) == ((SHARD,), ())
    assert object_of(path, STATES).read_bytes() == clean


def test_rounding_of_another_grouping_is_no_damage(path: Path) -> None:
    def round_otherwise(arrays: dict[str, np.ndarray]) -> None:
        for key in ("covariance/residual.1/upper", "places/residual.1/sum", "moments/residual.1/ordinary.m2"):
            arrays[key] = arrays[key] * (1 + 1e-13)

    spoil_sums(path, round_otherwise)
    assert verify_run(path).findings == ()


def test_sums_that_are_missing_or_cannot_be_read_are_damage_by_name(path: Path) -> None:
    def lose(arrays: dict[str, np.ndarray]) -> None:
        del arrays["places/residual.1/sum"], arrays["places/residual.1/last"]
        del arrays["places/residual.1/rows"], arrays["places/residual.1/turns"]
        arrays["covariance/residual.2/upper"] = arrays["covariance/residual.2/upper"][:-1]

    with pytest.raises(DamageError, match=r"covariance of 'residual\.2' cannot be read: a triangle of 135 values"):
        spoil_sums(path, lose)
    found = damage(verify_run(path))
    assert "residual.1: places: no sums are saved" in found
    assert any("covariance of 'residual.2' cannot be read: a triangle of 135 values" in what for what in found)


def test_a_reduction_that_is_no_longer_installed_is_noted_and_the_others_are_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduce, "__path__", [where for where in reduce.__path__ if "own" not in Path(where).name])
    report = verify_run(path)
    (note,) = report.findings
    assert not report.damaged
    assert str(note).startswith("note: run.json: statistics.also = 'places': no such reduction here")
    assert report.remade == ("covariance", "health", "moments")


def test_a_run_that_stores_no_rows_says_that_no_sums_were_made_again(own: None, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    run(tmp_path / "run", source, store=JOB["store"], capture={"store": False}, statistics=STATISTICS)
    report = verify_run(tmp_path / "run")
    assert (report.findings, report.remade) == ((), ())
    assert "sums made again from rows: none" in report.text
