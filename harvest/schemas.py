"""The formats of the run folder and the job file as schemas, rendered from the code that reads and writes them.

    python -m harvest.schemas FOLDER

Drift between the code and the rendered files fails the tests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from harvest.config import Job
from harvest.records import FORMAT_VERSION, ShardRecord
from harvest.runtime import events
from harvest.store.lease import Holder
from harvest.store.ledger import RunRecord
from harvest.store.tables import schemas as arrow_schemas

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def render() -> dict[str, str]:
    """File name -> content: JSON Schemas of job, run, ledger, lease and events; Arrow schemas as text."""
    adapters: dict[str, TypeAdapter[Any]] = {
        "job": TypeAdapter(Job),
        "run": TypeAdapter(RunRecord),
        "ledger": TypeAdapter(ShardRecord),
        "coordinator": TypeAdapter(Holder),
        "events": TypeAdapter(events.ANY),
    }
    rendered = {f"{name}.schema.json": _json_schema(name, adapter) for name, adapter in adapters.items()}
    return rendered | {f"{name}.arrow.txt": f"{schema}\n" for name, schema in arrow_schemas().items()}


def _json_schema(name: str, adapter: TypeAdapter[Any]) -> str:
    schema = adapter.json_schema()
    if name in ("run", "ledger"):  # each carries a checksum of itself, which is no field of the record
        schema["properties"]["crc32c"] = {"type": "string", "pattern": "^[0-9a-f]{8}$"}
        schema["required"] = [*schema["required"], "crc32c"]
    version = events.VERSION if name == "events" else FORMAT_VERSION
    title = f"Harvest {name}, format version {version}"
    return json.dumps({"$schema": DRAFT, **schema, "title": title}, indent=2, sort_keys=True) + "\n"


def main() -> None:
    """Writes every schema into the folder named on the command line."""
    folder = Path(sys.argv[1])
    for name, text in render().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
