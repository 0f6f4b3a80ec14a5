"""`npy`: one array per name, OUT/<name>.npy, that `numpy.load(..., mmap_mode="r")` maps."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from harvest.export.folder import Folder
from harvest.export.format import Format
from harvest.export.selection import Selected
from harvest.store import layout

DESCR = {"float32": "<f4", "float16": "<f2"}


def write(selected: Selected, folder: Folder) -> Mapping[str, Any]:
    """One pass over the rows per name."""
    for column in selected.columns:
        header = io.BytesIO()
        described = {
            "descr": DESCR[column.dtype],
            "fortran_order": False,
            "shape": (selected.units.rows, column.width),
        }
        np.lib.format.write_array_header_1_0(header, described)
        with folder.open(f"{layout.array_path(column.label)}.npy") as file:
            file.write(header.getvalue())
            for block in selected.blocks([column]):
                file.write(block.values[column.label].numpy())
    return {}


FORMAT = Format(
    write=write, dtypes=tuple(DESCR), known=tuple(DESCR), opens='numpy.load("{folder}/{label}.npy", mmap_mode="r")'
)
