"""The rendered schemas are those of the code, and real files obey them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jsonschema
import pyarrow.parquet as pq
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest import schemas
from harvest.store.tables import TOKENS_SCHEMA

ROOT = Path(__file__).parents[2]


def test_the_rendered_files_are_what_the_code_says() -> None:
    found = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "schemas").iterdir()}
    assert found == schemas.render(), "run `make schemas`"


def test_every_job_file_here_obeys_the_schema() -> None:
    schema = json.loads((ROOT / "schemas/job.schema.json").read_text())
    for path in (ROOT / "jobs").glob("*.toml"):
        jsonschema.validate(tomllib.loads(path.read_text()), schema)


def test_the_files_of_a_real_run_obey_the_schemas(tmp_path: Path) -> None:
    path = tmp_path / "run"
    harvest.run({"run": {"path": path}}, model=tiny_llama(vocab=300), tokenizer=byte_tokenizer(), data=["ab", "c"])
    (ledger,) = (path / "ledger").iterdir()
    for file, name in [(path / "run.json", "run"), (ledger, "ledger"), (path / "coordinator.json", "coordinator")]:
        schema = json.loads((ROOT / f"schemas/{name}.schema.json").read_text())
        jsonschema.validate(json.loads(file.read_text()), schema)
    (tokens,) = path.glob("shards/*/tokens.parquet")
    assert pq.read_schema(tokens).remove_metadata() == TOKENS_SCHEMA
