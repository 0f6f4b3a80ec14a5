"""`harvest export --directions`: vectors as safetensors, or as GGUF control vectors that llama.cpp and repeng load.

One file for each direction and mode, in the units of the activations, and the card of every direction beside them.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import harvest
from harvest.errors import RequestError
from harvest.export.folder import Folder
from harvest.export.known import DIRECTION_FORMATS
from harvest.reading.reader import Run, open_run
from harvest.reduce.direction import Direction
from harvest.reduce.saved import card_bytes, raw_bytes

ARCHITECTURE = "controlvector"
OPENS = {
    "safetensors": 'from safetensors.numpy import load_file; load_file("FILE")   # name -> float64 [d]',
    "gguf": "llama-cli --control-vector FILE ...; repeng.ControlVector.import_gguf(FILE)",
}


def export_directions(format: str, run: str, out: str) -> dict[str, Any]:
    """Writes every direction of a run; returns the card, with `out` and `files`.

    Raises RequestError, with nothing written, for another format, for a run without directions, and for `gguf` where
    none is at a residual stream behind block 0.
    """
    if format not in DIRECTION_FORMATS:
        raise RequestError(f"format {format!r}: with --directions allowed are {', '.join(DIRECTION_FORMATS)}")
    opened = open_run(run)
    if not opened.direction_results:
        raise RequestError(f"{run}: its job asks for no [[directions]]")
    blobs, written, left_out = {}, {}, {}
    for result in opened.direction_results:
        for number, (mode, found) in enumerate(result.found.items()):
            name = result.name if number == 0 else f"{result.name}.{mode}"
            kept = {at: one for at, one in found.items() if one.status == "ok"}
            if format == "gguf":
                kept = {at: one for at, one in kept.items() if _block(at)}
            left_out[f"{name}.{format}"] = sorted(set(found) - set(kept))
            for suffix, one_each in _by_read(kept).items():
                file = f"{name}{suffix}.{format}"
                blobs[file] = _gguf(one_each, opened) if format == "gguf" else raw_bytes(one_each)
                written[file] = {"direction": result.name, "mode": mode, "at": list(one_each)}
        blobs[f"{result.name}.json"] = card_bytes(result.card)
    if not written:
        raise RequestError(f"{run}: no direction that {format} can hold: {_why(format)}")
    folder = Folder(out, opened.files)
    card = {
        "harvest": harvest.__version__,
        "format": format,
        "directions": written,
        "left_out": {file: ats for file, ats in left_out.items() if ats},
        "note": _why(format),
    }
    with folder:
        for file, blob in blobs.items():
            folder.blob(file, blob)
        folder.blob("README.md", _readme(card).encode())
        folder.finish(card)
    return {**card, "out": out, "files": folder.files}


def _block(at: str) -> int:
    """The block whose output a direction was read from, where GGUF can say so: 1 and above; 0 for all else."""
    match = re.fullmatch(r"residual\.(\d+)", at.partition("@")[0])
    return int(match[1]) if match else 0


def _by_read(found: Mapping[str, Direction]) -> dict[str, dict[str, Direction]]:
    """`@read` -> name -> direction; a file has one vector for each name."""
    parts: dict[str, dict[str, Direction]] = {}
    for at, direction in found.items():
        name, mark, read = at.partition("@")
        parts.setdefault(f"{mark}{read}", {})[name] = direction
    return parts


def _gguf(found: Mapping[str, Direction], run: Run) -> bytes:
    """A control vector: `direction.k`, F32 and of one dimension, is added to what block k gives, counted from 0."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vector.gguf"
        writer = gguf.GGUFWriter(str(path), ARCHITECTURE)
        writer.add_string(f"{ARCHITECTURE}.model_hint", str(run.record.job["model"]["name"]))
        writer.add_uint32(f"{ARCHITECTURE}.layer_count", len(found))
        for name, direction in found.items():
            assert direction.raw is not None
            writer.add_tensor(f"direction.{_block(name)}", np.ascontiguousarray(direction.raw, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def _why(format: str) -> str:
    if format == "gguf":
        return (
            "direction.k belongs to the output of block k, counted from 0, which is where llama.cpp adds it; its "
            "loader knows no block 0, and no site but residual, so those are left out"
        )
    return "every defined direction, float64, in the units of the activations"


def _readme(card: Mapping[str, Any]) -> str:
    lines = ["# Directions exported by Harvest", "", card["note"], ""]
    lines += [
        f"- `{file}`: {told['direction']}, {told['mode']}, {len(told['at'])} names"
        for file, told in card["directions"].items()
    ]
    return "\n".join([*lines, "", f"    {OPENS[card['format']]}", ""])
