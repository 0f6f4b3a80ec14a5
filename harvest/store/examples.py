"""The examples of a direction as an Arrow file: which they are, and their states at every name; any row can be read."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from harvest.errors import DamageError
from harvest.store.files import Files
from harvest.store.tables import whole_object

KEYS = pa.schema(
    [
        pa.field("read", pa.string(), nullable=False),
        pa.field("document", pa.int64(), nullable=False),
        pa.field("variant", pa.int8(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),
        pa.field("group", pa.int8(), nullable=False),
        pa.field("weight", pa.float64(), nullable=False),
        pa.field("logit_diff", pa.float64()),
        pa.field("held_out", pa.bool_(), nullable=False),
        pa.field("pair", pa.binary()),
    ]
)
"""One column per name follows: float32 [d] each."""
STATES = "state."
"""Before the names in the file, so that none meets a key column."""


def examples_bytes(keys: Mapping[str, np.ndarray | Sequence[str | None]], states: Mapping[str, np.ndarray]) -> bytes:
    """One Arrow file of n examples; `keys` are the columns of KEYS, `states` name -> float32 [n, d]."""
    columns = {**keys, "pair": [None if key is None else key.encode("utf-8", "surrogatepass") for key in keys["pair"]]}
    arrays = [pa.array(columns[field.name], field.type) for field in KEYS]
    fields = list(KEYS)
    for name, block in states.items():
        flat = pa.array(np.ascontiguousarray(block, np.float32).reshape(-1))
        arrays.append(pa.FixedSizeListArray.from_arrays(flat, block.shape[1]))
        fields.append(pa.field(f"{STATES}{name}", arrays[-1].type, nullable=False))
    schema = pa.schema(fields)
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return sink.getvalue()


class StoredExamples:
    """One shard's examples of a direction; mapped where the store is local."""

    def __init__(self, files: Files, path: str) -> None:
        """Raises DamageError naming a file that is missing or not ours."""
        self.where = f"{files.url}/{path}"
        try:
            self._table = pa.ipc.open_file(pa.BufferReader(whole_object(files, path))).read_all()
            keys = self._table.select(KEYS.names)
        except FileNotFoundError:
            raise DamageError(f"{self.where}: missing") from None
        except (pa.ArrowException, OSError, KeyError) as error:
            raise DamageError(
                f"{self.where}: not a readable Arrow file of examples ({' '.join(str(error).split())[:200]})"
            ) from None
        self.keys = {
            name: keys.column(name).to_numpy(zero_copy_only=False)
            for name in KEYS.names
            if name not in ("read", "pair", "held_out")
        }
        """Numeric columns of KEYS."""
        self.held_out = np.array(keys.column("held_out").to_pylist(), bool)
        self.read: list[str] = keys.column("read").to_pylist()
        raw = keys.column("pair").to_pylist()
        self.pair = None if None in raw or not raw else [key.decode("utf-8", "surrogatepass") for key in raw]
        """Keys of the pairs; None without pairs."""

    def __len__(self) -> int:
        return len(self.read)

    def some(self, rows: np.ndarray) -> bytes:
        """A file of only the examples at int64 rows."""
        sink = io.BytesIO()
        with pa.ipc.new_file(sink, self._table.schema) as writer:
            writer.write_table(self._table.take(pa.array(rows)))
        return sink.getvalue()

    def states(self, name: str, index: np.ndarray) -> np.ndarray:
        """float32 [k, d] of the examples at int64 indices."""
        if f"{STATES}{name}" not in self._table.column_names:
            raise DamageError(f"{self.where}: no states of {name!r}")
        column = self._table.column(f"{STATES}{name}").combine_chunks()
        values = column.flatten().to_numpy(zero_copy_only=True).reshape(len(self), column.type.list_size)
        found: np.ndarray = values[index]
        return found
