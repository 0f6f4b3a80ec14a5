"""Shards whose contents are wrong, with checksums, records, merged files and totals that all vouch for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
from safetensors import safe_open
from safetensors.numpy import load, save

from harvest.records import StoredObject
from harvest.results import write_results
from harvest.store.ledger import Ledger
from harvest.store.opening import open_files

SHARD = "f00000-s000001"
STATES = "states.safetensors"


def object_of(path: Path, inside: str, shard: str = SHARD) -> Path:
    """A file of the shard's committed attempt."""
    attempt = json.loads((path / f"ledger/{shard}.json").read_text())["attempt"]
    return path / "shards" / attempt / inside


def spoil(path: Path, inside: str, data: bytes, shard: str = SHARD) -> None:
    """Replaces an object, and makes everything that follows from it anew."""
    object_of(path, inside, shard).write_bytes(data)
    ledger = Ledger(open_files(str(path)))
    record = ledger.record(shard)
    record.objects[inside] = StoredObject(bytes=len(data), crc32c=f"{google_crc32c.value(data):08x}")  # type: ignore[index]
    ledger.remove(shard)
    assert ledger.commit(record)
    write_results(ledger.files)


def spoil_sums(path: Path, change: Callable[[dict[str, np.ndarray]], None], shard: str = SHARD) -> None:
    """Changes arrays of a shard's saved sums."""
    target = object_of(path, STATES, shard)
    arrays = {key: array.copy() for key, array in load(target.read_bytes()).items()}
    change(arrays)
    with safe_open(target, "numpy") as file:
        metadata = file.metadata()
    spoil(path, STATES, save(arrays, metadata=metadata), shard)


def spoil_examples(path: Path, direction: str, change: Callable[[pa.Table], pa.Table], shard: str = SHARD) -> None:
    """Changes the table of examples that a shard keeps of a direction."""
    inside = f"examples-{direction}.arrow"
    with pa.ipc.open_file(pa.BufferReader(object_of(path, inside, shard).read_bytes())) as file:
        table = change(file.read_all())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    spoil(path, inside, sink.getvalue().to_pybytes(), shard)
