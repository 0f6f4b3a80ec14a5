"""Directions exported, read back by the libraries that their users have."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from commandcase import jsonl
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
from runcase import run  # the runs' own helpers

import harvest
from harvest.__main__ import _status

ROWS = [{"text": "abcdef"[: 2 + i % 4] + "xy"[i % 2], "label": str(i % 2)} for i in range(20)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    direction = {
        "name": "s",
        "column": "label",
        "positive": ["1"],
        "negative": ["0"],
        "modes": ["mean_difference", "single_group"],
        "holdout": 0,
    }
    capture = {"sites": ["residual", "mlp"]}
    run(tmp_path / "run", jsonl(tmp_path / "a.jsonl", ROWS), directions=[direction], capture=capture)
    return tmp_path


def found(folder: Path, mode: str = "mean_difference") -> Any:
    return harvest.open(folder / "run").directions(mode)["s"]


def test_gguf_holds_block_k_as_direction_k_in_float32_of_one_dimension(folder: Path) -> None:
    assert _status(["export", "gguf", str(folder / "run"), str(folder / "out"), "--directions"]) == 0
    for file, mode in (("s.gguf", "mean_difference"), ("s.single_group.gguf", "single_group")):
        reader = gguf.GGUFReader(folder / "out" / file)
        assert reader.get_field("general.architecture").contents() == "controlvector"
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        assert sorted(tensors) == ["direction.1", "direction.2"]
        for block in (1, 2):
            tensor = tensors[f"direction.{block}"]
            assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
            assert tensor.shape.tolist() == [16]
            expected = found(folder, mode)[f"residual.{block}"].raw.astype(np.float32)
            assert tensor.data.tobytes() == expected.tobytes()
    card = json.loads((folder / "out" / "export.json").read_text())
    assert "residual.0" in card["left_out"]["s.gguf"]
    assert "mlp.1" in card["left_out"]["s.gguf"]


def test_safetensors_hold_every_name_in_the_units_of_the_activations(folder: Path) -> None:
    assert _status(["export", "safetensors", str(folder / "run"), str(folder / "out"), "--directions"]) == 0
    vectors = load_file(folder / "out" / "s.safetensors")
    directions = found(folder)
    assert sorted(vectors) == sorted(directions)
    for name, vector in vectors.items():
        assert vector.tobytes() == directions[name].raw.tobytes()
    assert json.loads((folder / "out" / "s.json").read_text())["direction"] == "s"


def test_other_formats_and_runs_without_directions_are_refused(folder: Path, capsys: Any) -> None:
    assert _status(["export", "npy", str(folder / "run"), str(folder / "out"), "--directions"]) == 2
    assert "safetensors, gguf" in capsys.readouterr().err
    run(folder / "bare", jsonl(folder / "b.jsonl", ROWS))
    assert _status(["export", "gguf", str(folder / "bare"), str(folder / "out"), "--directions"]) == 2
    assert not (folder / "out").exists()
