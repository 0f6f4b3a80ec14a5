"""`activault`: OUT/<name>/<uuid>--<n>_0.saved.pt, files of one shape, as its S3 reader fetches them by byte ranges.

The reader wants every file alike, so the rows that are left over, fewer than there are files, do not go out.
The files are pickles of torch tensors, as that format is; they load with `weights_only=True`.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import uuid
from collections.abc import Mapping
from typing import Any

import torch

from harvest.export.folder import Folder
from harvest.export.format import Format
from harvest.export.selection import Column, Selected
from harvest.store import layout

FILE_BYTES = 128 << 20
"""Of a file, at most about: it is built in memory."""


def even(selected: Selected) -> None:
    """Leaves out what would make a last, smaller file."""
    selected.units.count -= selected.units.count % _files(selected)


def _files(selected: Selected) -> int:
    units = selected.units
    widest = max(column.row_bytes for column in selected.columns) * units.context
    return min(units.count, math.ceil(units.count * widest / FILE_BYTES))


def write(selected: Selected, folder: Folder) -> Mapping[str, Any]:
    """One pass over the rows per name; file n of every name holds the same rows and has the same uuid."""
    files, units = _files(selected), selected.units
    each = units.count // files
    for column in selected.columns:
        path, sums, largest = layout.array_path(column.label), _Sums(column.width), 0
        for number in range(files):
            data = _file(selected, column, number * each, (number + 1) * each, sums)
            folder.blob(f"{path}/{_uuid(selected, number)}--{number}_0.saved.pt", data)
            largest = max(largest, len(data))
        shape = [each, units.context, column.width]
        described = {
            "batch_size": each,
            "sequence_length": units.context,
            "dtype": f"torch.{column.dtype}",
            "d_in": column.width,
            "batches_per_file": 1,
            "shape": shape,
            "input_ids_shape": shape[:2],
            "bytes_per_file": largest,
        }
        folder.blob(f"{path}/metadata.json", json.dumps(described).encode())
        folder.blob(f"{path}/statistics.json", json.dumps(sums.figures()).encode())
    config = {"total_tokens": units.rows, "n_total_files": files, "batches_processed": files}
    folder.blob("cfg.json", json.dumps(config).encode())
    return {"files_per_name": files}


def _file(selected: Selected, column: Column, start: int, stop: int, sums: _Sums) -> bytes:
    """Units [start, stop) as torch saves them."""
    context = selected.units.context
    parts = []
    for block in selected.blocks([column], start, stop):
        parts.append(block.values[column.label])
        sums.add(parts[-1])
    states = torch.cat(parts).reshape(stop - start, context, column.width)
    tokens = [torch.tensor(table.column("token").to_numpy()) for table in selected.tokens(["token"], start, stop)]
    ids = torch.cat(tokens).to(torch.int64).reshape(stop - start, context)
    saved = io.BytesIO()
    torch.save({"states": states, "input_ids": ids, "tensor_bytes": states.nbytes}, saved)
    return saved.getvalue()


def _uuid(selected: Selected, number: int) -> str:
    """The same for every name, and for the same export made again."""
    run = selected.run
    keys = "".join(record.keys_digest for record in run.shards)
    return str(uuid.UUID(bytes=hashlib.blake2b(f"{keys}/{number}".encode(), digest_size=16).digest()))


class _Sums:
    """Mean and squared deviations in float64, merged block by block; rows that are not finite are left out."""

    def __init__(self, width: int) -> None:
        self.count, self.norms = 0, 0.0
        self.mean = torch.zeros(width, dtype=torch.float64)
        self.squares = torch.zeros(width, dtype=torch.float64)

    def add(self, rows: torch.Tensor) -> None:
        """[n, d]"""
        block = rows.double()
        block = block[block.isfinite().all(dim=1)]
        if not len(block):
            return
        mean = block.mean(dim=0)
        total, shift = self.count + len(block), mean - self.mean
        self.squares += (block - mean).square().sum(dim=0) + shift.square() * (self.count * len(block) / total)
        self.mean += shift * (len(block) / total)
        self.norms += float(block.norm(dim=1).sum())
        self.count = total

    def figures(self) -> dict[str, Any]:
        """mean, std (of the population) and M2 per feature, the mean norm."""
        count = max(1, self.count)
        std = (self.squares / count).sqrt()
        return {
            "mean": self.mean.tolist(),
            "std": std.tolist(),
            "norm": self.norms / count,
            "M2": self.squares.tolist(),
        }


FORMAT = Format(
    write=write,
    dtypes=("float32", "float16", "bfloat16"),
    known=("float32", "float16", "bfloat16"),
    opens=(
        "# <s3_prefix> is OUT/{label}/ with the slash: the reader takes every object below it\n"
        'torch.load("{folder}/{label}/<file>.saved.pt", weights_only=True)["states"]'
    ),
    prepare=even,
)
