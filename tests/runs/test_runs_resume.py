"""A resume with something other is refused by what differs alone, early, and with what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commandcase import jsonl
from plainrun import first_difference, read_plain
from runcase import job
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.errors import DamageError, RequestError, WorkError
from harvest.planning.lock import asked_of, differences
from harvest.store import ledger as ledger_module
from harvest.store.ledger import Ledger
from harvest.store.opening import open_files

LONG = {"text": 40 * "long", "label": "1"}
DIRECTION = {"name": "tone", "column": "label", "positive": ["1"], "negative": ["0"]}


def rows(count: int, *, upper: bool = False) -> list[dict[str, str]]:
    return [{"text": f"{'TEXT' if upper else 'text'} {i}", "label": str(i % 2)} for i in range(count)]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    tiny_llama(vocab=300).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    jsonl(tmp_path / "texts.jsonl", rows(6))
    tables: dict[str, Any] = {
        "model": {"name": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "texts.jsonl")},
        "store": {"shard_documents": 2},
        "directions": [DIRECTION],
    }
    return job(tmp_path / "run", **tables)


def refused(settings: dict[str, Any]) -> str:
    with pytest.raises(RequestError) as raised:
        harvest.run(settings)
    head, _, tail = str(raised.value).partition("the run began with other settings: ")
    assert head.startswith("run.path = ")
    different, _, remedy = tail.partition("; ")
    assert remedy == "undo that, choose another run.path, or run.overwrite = true to begin anew"
    return different


@pytest.mark.parametrize(
    ("strict", "table", "forgiving", "bad"),
    [
        ({"on_bad": "fail"}, "data", {"on_bad": "skip"}, {"text": None, "label": "1"}),
        ({"on_bad": "fail"}, "data", {"on_bad": "skip"}, {"text": "in no group", "label": "2"}),
        (
            {"long": "fail", "context": 12},
            "tokens",
            {"long": "truncate", "context": 12},
            LONG,
        ),
        (
            {"long": "fail", "context": 12},
            "tokens",
            {"long": "chunk", "context": 12},
            LONG,
        ),
    ],
)
def test_a_run_that_a_document_stopped_goes_on_with_what_its_refusal_advises(
    strict: dict[str, Any], table: str, forgiving: dict[str, Any], bad: dict[str, Any], settings: Any, tmp_path: Path
) -> None:
    """What is committed met no such document, so it is what the forgiving job makes of it; no way leads back."""
    jsonl(tmp_path / "texts.jsonl", [*rows(5), bad, *rows(3)])
    path, settings["data"] = tmp_path / "run", {**settings["data"], "on_bad": "fail"}
    settings["data" if table == "data" else "tokens"] = {**settings.get(table, {}), **strict}
    with pytest.raises(WorkError, match="document 5"):
        harvest.run(settings)
    committed = {record.shard.key: record.attempt for record in harvest.open(path).shards}
    assert 0 < len(committed) < 5
    other = {**settings, table: {**settings.get(table, {}), **forgiving}}
    found = harvest.run(other)
    assert found.complete
    assert committed.items() <= {record.shard.key: record.attempt for record in found.shards}.items()
    clean = {**other, "run": {**other["run"], "path": str(tmp_path / "clean")}}
    harvest.run(clean)
    assert first_difference(read_plain(tmp_path / "clean"), read_plain(path)) is None
    ((key, value),) = ((key, value) for key, value in forgiving.items() if key != "context")
    assert refused(settings) == f"{table}.{key}: {value!r} -> 'fail'"


@pytest.mark.parametrize(
    ("directions", "told"),
    [
        ([{**DIRECTION, "read": "mean"}], "directions.tone.read: 'last' -> 'mean'"),
        ([{**DIRECTION, "holdout": 0.5, "negative": "rest"}], None),
        ([], "directions.tone: there -> none"),
        ([DIRECTION, {**DIRECTION, "name": "more"}], "directions.more: none -> there"),
    ],
    ids=["read", "two", "gone", "more"],
)
def test_a_changed_direction_is_told_setting_by_setting(
    directions: list[dict[str, Any]], told: str | None, settings: dict[str, Any]
) -> None:
    harvest.run(settings)
    found = refused({**settings, "directions": directions})
    if told is not None:
        assert found == told
    else:
        assert found == "directions.tone.holdout: 0.2 -> 0.5, directions.tone.negative: ['0'] -> 'rest'"


def test_a_changed_data_file_is_told_by_its_name_its_size_and_rows_or_its_contents(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    harvest.run(settings)
    file = tmp_path / "texts.jsonl"
    before = file.stat().st_size
    jsonl(file, rows(9))
    now = file.stat().st_size
    assert refused(settings) == f"data file texts.jsonl: {before:,} bytes -> {now:,} bytes, 6 rows -> 9 rows"
    jsonl(file, rows(6, upper=True))
    found = refused(settings)
    assert found.startswith(f"data file texts.jsonl: {before:,} bytes as before, other contents (checksum ")
    assert len(found) < 120


def test_a_run_of_before_a_setting_existed_goes_on_where_the_default_is_what_was_done(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    harvest.run({**settings, "data": {**settings["data"], "limit": 2}})
    files = Ledger(open_files(str(tmp_path / "run")))
    record = files.read_run()
    assert record is not None
    lock = {key: value for key, value in record.fingerprint.items() if key != "capture.exclude"}
    lock["directions"] = [{key: value for key, value in lock["directions"][0].items() if key != "holdout"}]
    old = {table: dict(value) if isinstance(value, dict) else value for table, value in record.job.items()}
    del old["capture"]["exclude"]
    files.replace_run(type(record)(job=old, plan=record.plan, fingerprint=lock, provenance=record.provenance))
    assert refused({**settings, "capture": {"exclude": ["bos"]}}) == "capture.exclude: [] -> ['bos']"
    assert refused({**settings, "directions": [{**DIRECTION, "holdout": 0.5}]}) == "directions.tone.holdout: 0.2 -> 0.5"
    assert len(harvest.run(settings).documents()) == 6


def test_equal_jobs_differ_in_nothing_and_another_tells_its_setting_alone(settings: dict[str, Any]) -> None:
    one = asked_of(harvest.Job.model_validate(settings))
    assert differences(one, one) == []
    other = asked_of(harvest.Job.model_validate({**settings, "tokens": {"context": 8}}))
    assert differences(one, other) == [f"tokens.context: {one['tokens.context']!r} -> 8"]


def test_another_job_is_refused_before_torch_is_imported(settings: dict[str, Any], tmp_path: Path) -> None:
    harvest.run({**settings, "directions": []})
    file = tmp_path / "job.toml"
    file.write_text(
        f'[model]\nname = "{tmp_path}/model"\n[data]\npath = "{tmp_path}/texts.jsonl"\n'
        f'[store]\nshard_documents = 2\n[tokens]\ncontext = 8\n[run]\npath = "{tmp_path}/run"\nthreads = 1\n'
    )
    code = (
        "import sys; from harvest.__main__ import _status; status = _status(['run', sys.argv[1]]); "
        "print(status, sorted({'torch', 'ray', 'transformers'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    assert found.stdout == "2 []\n"
    assert "the run began with other settings: tokens.context: " in found.stderr


def test_a_damaged_run_json_says_what_mends_it_and_that_is_true(settings: dict[str, Any], tmp_path: Path) -> None:
    run = harvest.run(settings)
    whole, path = run["residual.0"].numpy(), tmp_path / "run/run.json"
    path.write_text(path.read_text()[:-40])
    with pytest.raises(DamageError) as raised:
        harvest.open(tmp_path / "run")
    assert str(raised.value).endswith(f"; {ledger_module.REMADE}")
    harvest.run({**settings, "run": {**settings["run"], "path": str(tmp_path / "other")}})
    shutil.copy(tmp_path / "other/run.json", path)
    assert (harvest.open(tmp_path / "run")["residual.0"].numpy() == whole).all()
    harvest.run(settings)
    assert json.loads(path.read_text())["format"] == 1
