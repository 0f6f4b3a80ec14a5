"""What directions come from is made again too: states from stored rows, sums from states, vectors from sums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from commandcase import jsonl
from runcase import job, run
from safetensors.numpy import load, save
from spoilt import SHARD, spoil_examples, spoil_sums
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.checking.verify import verify_run
from harvest.concepts.directions import content_hash

ROWS = [
    {"text": "abcdefgh"[i % 5 :] + "xy"[i % 2] * (1 + i % 3), "label": str(i % 2), "pid": i // 2, "w": 1 + i % 3}
    for i in range(24)
]
DIRECTION = {"name": "s", "column": "label", "positive": ["1"], "negative": ["0"], "holdout": 0.2}


def made(folder: Path, direction: dict[str, Any] | None = None, **tables: Any) -> Path:
    """A complete run of three shards."""
    source = jsonl(folder / "rows.jsonl", ROWS)
    data = {"path": str(source)}
    tables = {"data": data, "capture": {"layers": [0, 1]}, "store": {"shard_documents": 8}, **tables}
    asked = job(folder / "run", directions=[{**DIRECTION, **(direction or {})}], **tables)
    harvest.run(asked, model=tiny_llama(vocab=300), tokenizer=byte_tokenizer())
    return folder / "run"


@pytest.mark.parametrize(
    "direction",
    [
        {"read": ["last", "first", -2, "mean", {"at": -1, "on": 0}]},
        {"read": "all"},
        {"read": "all", "examples": 16},
        {"pair": "column:pid", "modes": ["paired_rejection", "mean_difference", "pca"]},
        {"pair": "order", "holdout": 0, "read": ["mean", -1], "modes": ["paired_rejection", "single_group"]},
        {"weight": "column:w", "modes": ["mean_difference", "whitened"], "examples": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_sound_directions_of_every_read_have_no_finding(direction: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    path = made(tmp_path, direction, store={"shard_documents": 8, "dtype": dtype})
    assert verify_run(path).findings == ()


@pytest.mark.parametrize("capture", [{"positions": "first"}, {"exclude": ["bos"]}, {"store": False}], ids=str)
def test_states_of_rows_that_are_not_stored_are_no_damage(capture: dict[str, Any], tmp_path: Path) -> None:
    path = made(tmp_path, {"read": ["last", "first"]}, capture={"layers": [1], **capture})
    assert verify_run(path).findings == ()


def test_states_with_values_that_are_no_numbers_are_no_damage(tmp_path: Path) -> None:
    model = tiny_llama(vocab=300)
    model.model.embed_tokens.weight.data[ord("x") % 300] = float("nan")
    run(tmp_path / "run", jsonl(tmp_path / "rows.jsonl", ROWS), model=model, directions=[DIRECTION])
    assert not verify_run(tmp_path / "run").damaged


@pytest.mark.parametrize("read", ["last", "mean"])
@pytest.mark.parametrize("field", ["means", "sums", "counts"])
def test_sums_that_the_kept_states_do_not_give_are_damage_though_everything_vouches_for_them(
    field: str, read: str, tmp_path: Path
) -> None:
    path = made(tmp_path, {"read": read})

    def change(arrays: dict[str, np.ndarray]) -> None:
        key = f"directions/s/residual.1/{field}"
        arrays[key] = arrays[key] + 1 if field == "counts" else arrays[key] * (1 + 1e-4)

    spoil_sums(path, change)
    (finding,) = verify_run(path).findings
    assert (finding.damage, finding.shard) == (True, SHARD)
    assert finding.object.endswith("/states.safetensors")
    assert finding.what.startswith("direction 's' at residual.1: ")


def test_a_state_that_is_not_its_stored_row_is_damage_by_its_document(tmp_path: Path) -> None:
    path = made(tmp_path, {"read": ["last", "first"]})
    told = []

    def change(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index("state.residual.1")
        values = table.column(at).combine_chunks()
        rows = values.flatten().to_numpy().reshape(len(table), -1).copy()
        rows[2, 5] = np.nextafter(rows[2, 5], np.float32(9))
        told.append(
            f"residual.1@{table['read'][2]}: the state of document {table['document'][2]} is not its stored row"
        )
        changed = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
        return table.set_column(at, table.schema.field(at), changed)

    spoil_examples(path, "s", change)
    (finding,) = verify_run(path).findings
    assert (finding.damage, finding.shard, [finding.what]) == (True, SHARD, told)
    assert finding.object.endswith("/examples-s.arrow")


def test_a_vector_that_the_sums_do_not_give_is_damage_though_the_completion_vouches_for_it(tmp_path: Path) -> None:
    path = made(tmp_path, {"modes": ["mean_difference", "single_group"]})
    target = path / "directions/s.safetensors"
    arrays = load(target.read_bytes())
    arrays["single_group/residual.0/raw"] = arrays["single_group/residual.0/raw"] * (1 + 1e-6)
    target.write_bytes(save(arrays))
    told = json.loads((path / "complete.json").read_text())
    told["directions"]["directions/s.safetensors"] = content_hash(target.read_bytes())
    (path / "complete.json").write_text(json.dumps(told))
    (finding,) = verify_run(path).findings
    assert str(finding).startswith(
        "damage: directions/s.safetensors: single_group at residual.0 is not what the shards' sums give; "
    )
