"""The promises of the design, each under its name; those with a file of their own are only touched here."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandcase import jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import TOLERANCE_TINY, alone
from plainrun import digest, files_below, read_plain, snapshot
from runcase import Died, Failing, bury, install, job, run
from tiny import TINY, byte_tokenizer, tiny_llama

import harvest
from harvest.checking.verify import verify_run
from harvest.errors import DamageError, RequestError, WorkError

MODEL, TOKENIZER = tiny_llama(layers=2, vocab=300), byte_tokenizer()
ROOT = Path(__file__).parent.parent.parent


# ---- 2 True ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(TINY))
@pytest.mark.parametrize("batch", [20, 200])
def test_2_true_every_row_is_what_a_hook_sees_of_its_document_alone(family: str, batch: int, tmp_path: Path) -> None:
    dice, model = np.random.default_rng(7), TINY[family]()
    documents = [[int(i) for i in dice.integers(0, 64, n)] for n in (1, 9, 30, 2, 64, 17, 5, 5, 40)]
    names = [f"{site}.{layer}" for site in ("residual", "attn", "mlp") for layer in range(3)]
    plain = run(
        tmp_path / "run",
        [{"input_ids": ids} for ids in documents],
        model=model,
        tokenizer=None,
        data={"ids": "input_ids"},
        capture={"sites": ["residual", "attn", "mlp"]},
        tokens={"batch": batch},
        store={"shard_documents": 4},
    )
    for document, ids in enumerate(documents):
        assert plain.ids(document) == ids
        for name, expected in alone(model, ids, names).items():
            norms = expected.norm(dim=1).clamp_min(1e-6).numpy()
            errors = np.linalg.norm(plain.of(document, name) - expected.numpy(), axis=1) / norms
            assert errors.max() < 2 * TOLERANCE_TINY, (name, document)


# ---- 5 Accounted -------------------------------------------------------------------------------------------------

MESSY = st.lists(
    st.one_of(
        st.fixed_dictionaries({"text": st.text(alphabet=st.characters(), max_size=12)}),
        st.fixed_dictionaries(
            {"text": st.sampled_from([None, "", " ", "\n", "a\ud800b", "\udfff", 3, True, ["a"], {}])}
        ),
        st.sampled_from([{}, {"other": "x"}, None, 7, ["text"]]),
    ),
    max_size=25,
)


def fate(record: Any) -> tuple[str, int]:
    """By hand: (stored or skipped, rows): a BOS, then a token for every byte of UTF-8."""
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str) or not text or any("\ud800" <= letter <= "\udfff" for letter in text):
        return "skipped", 0
    return "stored", len(text.encode()) + 1


@settings(max_examples=15, deadline=None, derandomize=True)
@given(records=MESSY, shard_documents=st.sampled_from([1, 4, 64]))
def test_5_accounted_every_document_is_stored_or_skipped_with_a_reason(
    records: list[Any], shard_documents: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain = run(
            f"{folder}/run",
            [{"text": "first"}, *records],
            model=MODEL,
            tokenizer=TOKENIZER,
            data={"on_bad": "skip"},
            store={"shard_documents": shard_documents},
            capture={"layers": [0]},
        )
        expected = [fate({"text": "first"}), *map(fate, records)]
        assert [row["document"] for row in plain.documents] == list(range(len(expected)))
        assert [(row["status"], row["rows"]) for row in plain.documents] == expected
        assert all((row["reason"] is not None) == (row["status"] == "skipped") for row in plain.documents)
        skipped = sum(sum(record["skipped"].values()) for record in plain.records.values())
        assert skipped == sum(status == "skipped" for status, _ in expected)
        assert len(plain.rows["residual.0"]) == sum(rows for _, rows in expected)
        assert sorted(set(plain.keys)) == plain.keys
        assert not verify_run(f"{folder}/run").damaged


# ---- 6 Bounded ---------------------------------------------------------------------------------------------------

PEAK = """
import resource, sys
from harvest.__main__ import _status
status = _status(sys.argv[1:])
print(status, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def peak_bytes(arguments: list[str]) -> int:
    """Peak resident memory of a process that runs one command to its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, env=environment)
    status, peak = done.stdout.splitlines()[-1].split()
    assert status == "0", done.stderr
    return int(peak)


@pytest.mark.slow
def test_6_bounded_memory_does_not_grow_with_the_dataset(tmp_path: Path) -> None:
    tiny_llama(vocab=300, hidden_size=256).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    peaks = {}
    for documents in (300, 6000):
        file = jsonl(tmp_path / f"{documents}.jsonl", [{"text": f"this is text number {i}"} for i in range(documents)])
        tables = {
            "model": {"name": f"{tmp_path}/model"},
            "data": {"path": str(file)},
            "store": {"shard_documents": 128},
        }
        (tmp_path / "job.toml").write_text(toml(job(tmp_path / f"run-{documents}", **tables)))
        peaks[documents] = peak_bytes(["run", f"{tmp_path}/job.toml"])
    stored = sum((tmp_path / "run-6000" / path).stat().st_size for path in files_below(tmp_path / "run-6000"))
    assert stored > 300e6, "what would be held if it were held"
    assert peaks[6000] < 1.05 * peaks[300] + 8e6, peaks


def toml(tables: dict[str, dict[str, Any]]) -> str:
    lines = (
        f"[{table}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())
        for table, values in tables.items()
    )
    return "".join(lines)


# ---- 7 Locked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"run": {"attempts": 7}}, {"store": {"memory_gb": 500}}], ids=str)
def test_7_locked_settings_that_change_no_value_do_not_count(change: dict[str, Any], tmp_path: Path) -> None:
    once = {"model": MODEL, "tokenizer": TOKENIZER}
    run(tmp_path / "run", ["a", "b"], **once)
    before = snapshot(tmp_path / "run")
    run(tmp_path / "run", ["a", "b"], **once, **change)
    assert snapshot(tmp_path / "run") == before


# ---- 8 Careful ---------------------------------------------------------------------------------------------------


def plant(folder: Path, paths: list[str]) -> dict[str, str]:
    """Files of someone else's among a run's own; path -> hash."""
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"mine: {path}")
    return {path: digest(folder / path) for path in paths}


def test_8_careful_nothing_goes_that_the_run_did_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, tables = ["a", "bb", "ccc", "dddd"], {"store": {"shard_documents": 1}}
    with monkeypatch.context() as patch:
        install(patch, lambda files: Failing(files, 40))
        with pytest.raises(Died):
            run(tmp_path / "run", list(texts), model=MODEL, tokenizer=TOKENIZER, **tables)
    bury(tmp_path / "run")
    attempt = next((tmp_path / "run/shards").iterdir()).name
    mine = plant(
        tmp_path / "run",
        ["notes.txt", "shards/notes.txt", f"shards/{attempt}/notes.txt", "shards/mine/zarr.json", "directions/a.txt"],
    )
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/tokens.parquet").write_text("mine")
    (tmp_path / "run/shards/f00000-s000009.0123abcd-1").symlink_to(tmp_path / "elsewhere")
    run(tmp_path / "run", list(texts), model=MODEL, tokenizer=TOKENIZER, **tables)
    run(tmp_path / "run", texts[:1], model=MODEL, tokenizer=TOKENIZER, run={"overwrite": True}, **tables)
    assert {path: digest(tmp_path / "run" / path) for path in mine} == mine
    assert (tmp_path / "elsewhere/tokens.parquet").read_text() == "mine"
    assert len(read_plain(tmp_path / "run").documents) == 1


@pytest.mark.parametrize("harm", ["missing", "empty", "short", "flipped"])
@pytest.mark.parametrize("what", ["residual.1/c.0.0", "tokens.parquet", "states.safetensors"])
def test_8_careful_a_damaged_object_is_found_and_never_read_as_zeros(harm: str, what: str, tmp_path: Path) -> None:
    run(tmp_path / "run", ["some text", "more"], model=MODEL, tokenizer=TOKENIZER)
    target = next((tmp_path / "run/shards").iterdir()) / what
    content = bytearray(target.read_bytes())
    if harm == "missing":
        target.unlink()
    else:
        content[len(content) // 2] ^= 64
        target.write_bytes({"empty": b"", "short": content[:-9], "flipped": content}[harm])
    report = verify_run(tmp_path / "run")
    assert report.damaged
    assert any(what in finding.object for finding in report.findings if finding.damage)
    if harm != "flipped" and what != "states.safetensors":  # a flipped bit is what `verify` reads checksums for
        opened = harvest.open(tmp_path / "run")
        with pytest.raises(DamageError, match=re.escape(what)):
            opened.tokens() if what == "tokens.parquet" else opened["residual.1"].numpy()


# ---- 9 Clear -----------------------------------------------------------------------------------------------------


def test_9_clear_success_is_only_said_when_everything_succeeded(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="document 3") as raised:
        run(
            tmp_path / "run", ["a", "b", "c", None, "e"], model=MODEL, tokenizer=TOKENIZER, store={"shard_documents": 1}
        )
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run/complete.json").exists()
    assert not (tmp_path / "run/statistics.parquet").exists()
    assert harvest.open(tmp_path / "run").complete is False


# ---- 10 Safe -----------------------------------------------------------------------------------------------------


def test_10_safe_nothing_under_harvest_imports_pickle_or_unpickles() -> None:
    """But for one export, whose format is what torch.save writes; it is written, never read."""
    for path in sorted((ROOT / "harvest").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)]
            names += [getattr(node, "module", None) or ""]
            assert not {name.split(".")[0] for name in names} & {"pickle", "dill", "cloudpickle", "joblib", "shelve"}, (
                path
            )
            if isinstance(node, ast.Call):
                call = ast.unparse(node.func)
                assert call not in ("torch.load", "eval", "exec"), (path, node.lineno)
                assert call != "torch.save" or path.name == "activault.py", (path, node.lineno)
                assert "allow_pickle=True" not in ast.unparse(node), (path, node.lineno)


SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "GOOGLE_API_KEY", "DATABASE_PASSWORD")


def test_10_safe_no_secret_of_the_environment_lands_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, f"hunter2-{name}")
    run(tmp_path / "run", ["a", "b"], model=MODEL, tokenizer=TOKENIZER)
    for path in files_below(tmp_path):
        assert b"hunter2" not in (tmp_path / path).read_bytes(), path


@pytest.mark.parametrize(
    "settings",
    [
        {"run": {"storage": {"key": "hunter2"}}},
        {"run": {"storage": {"client_secret": "hunter2"}}},
        {"run": {"path": "s3://user:hunter2@bucket/run"}},
    ],
    ids=str,
)
def test_10_safe_a_secret_in_the_job_is_refused_and_not_repeated(settings: dict[str, Any], tmp_path: Path) -> None:
    tables = {**settings, "run": {"path": str(tmp_path / "run"), **settings["run"]}}
    with pytest.raises(RequestError) as raised:
        harvest.run(tables, model=MODEL, tokenizer=TOKENIZER, data=["a"])
    assert "hunter2" not in str(raised.value)
    assert files_below(tmp_path) == []


OURS = re.compile(
    r"(run|complete|coordinator)\.json|statistics\.parquet|report\.html|\.[a-z.]+\.lock|ledger/f\d{5}-s\d{6}\.json"
    r"|shards/f\d{5}-s\d{6}\.[0-9a-f]{8}-\d+/(zarr\.json|tokens\.parquet|documents\.parquet|states\.safetensors"
    r"|(residual|mlp)\.\d/(zarr\.json|c\.\d+\.0))"
)
EVIL = ["../../evil", "/etc/passwd", "..", "a/../../b", "\x00", "C:\\evil", "~root", "zarr.json", "%2e%2e%2f"]


def test_10_safe_names_from_data_never_become_paths(tmp_path: Path) -> None:
    column = "../../column"
    records = [{"text": text, column: text, "@odd": text} for text in EVIL]
    file = jsonl(tmp_path / "..texts;rm -rf.jsonl", records)
    before = files_below(tmp_path)
    plain = run(
        tmp_path / "deep/er/run",
        file,
        model=MODEL,
        tokenizer=TOKENIZER,
        data={"keep": [column, "@file"]},
        store={"shard_documents": 4},
    )
    assert [row[column] for row in plain.documents] == EVIL
    written = [path for path in files_below(tmp_path) if path not in before]
    for path in written:
        assert path.startswith("deep/er/run/")
        assert OURS.fullmatch(path.removeprefix("deep/er/run/")), path


def test_10_safe_code_beside_a_checkpoint_runs_only_when_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_llama(vocab=300).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(model_type="brand_new", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(RequestError, match=r"model\.name") as raised:
        harvest.run(job(tmp_path / "run", model={"name": str(folder)}), data=["a"])
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "run").exists()
