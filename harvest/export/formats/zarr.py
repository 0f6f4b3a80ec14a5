"""`zarr`: a Zarr v3 group with one array per name, laid out as a run's own shards: raw rows that can also be mapped.

`bfloat16` has no place in zarr-python; it goes out as float32 unless it is asked for, which TensorStore reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from harvest.export.folder import Folder
from harvest.export.format import Format
from harvest.export.formats.safetensors import raw
from harvest.export.naming import site_and_layer
from harvest.export.selection import Column, Selected
from harvest.records import ArraySpec
from harvest.store import layout
from harvest.store.grid import Grid, array_metadata, chunk_index, plan_grid

CHUNK_BYTES = 8 << 20


def write(selected: Selected, folder: Folder) -> Mapping[str, Any]:
    """One pass over the rows per name; the group's own metadata last, without which there is none."""
    for column in selected.columns:
        site, layer = site_and_layer(column.name)
        attributes = {"name": column.name, "site": site, "layer": layer}
        spec = ArraySpec(rows=selected.units.rows, width=column.width, dtype=column.dtype, attributes=attributes)
        grid = plan_grid(spec, CHUNK_BYTES)
        path = layout.array_path(column.label)
        for number in range(grid.objects):
            _write_object(selected, column, folder, f"{path}/{layout.object_name(number)}", grid, number)
        folder.blob(f"{path}/{layout.ZARR}", _json(array_metadata(spec, grid)))
    above = {"/".join(parts[:depth]) for parts in _parts(selected) for depth in range(1, len(parts))}
    for group in [*(f"{path}/" for path in sorted(above, reverse=True)), ""]:
        folder.blob(f"{group}{layout.ZARR}", _json({"zarr_format": 3, "node_type": "group", "attributes": {}}))
    return {}


def _parts(selected: Selected) -> list[list[str]]:
    return [layout.array_path(column.label).split("/") for column in selected.columns]


def _write_object(selected: Selected, column: Column, folder: Folder, path: str, grid: Grid, number: int) -> None:
    """The rows of one object, which need not begin or end with a unit, then its padding and chunk index."""
    context = selected.units.context
    first = number * grid.outer
    stop = first + grid.rows_of(number)
    with folder.open(path) as file:
        for block in selected.blocks([column], first // context, -(-stop // context)):
            row = block.start * context
            rows = block.values[column.label][max(0, first - row) : stop - row]
            file.write(raw(rows))
        file.write(np.zeros((grid.padded_rows_of(number) - grid.rows_of(number)) * grid.row_bytes, np.uint8))
        file.write(chunk_index(grid, number))


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1, allow_nan=False).encode()


FORMAT = Format(
    write=write,
    dtypes=("float32", "float16", "bfloat16"),
    known=("float32", "float16"),
    opens='zarr.open_group("{folder}", mode="r")["{label}"][:10]',
)
