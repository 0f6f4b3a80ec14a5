"""Run by the interpreter of an environment without Harvest: reads a run and its exports with plain libraries.

python plain_read.py RUN NAME EXPORTS OUT: writes OUT/<reader>.npy, float32, and prints the tokens that each found
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.numpy
import tensorstore
import zarr

assert importlib.util.find_spec("harvest") is None
run, name, exports, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
shards = [run / "shards" / json.loads(path.read_text())["attempt"] for path in sorted((run / "ledger").iterdir())]
found: dict[str, Any] = {}
tokens: dict[str, list[int]] = {}


def stored(path: Path) -> np.ndarray:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return np.asarray(tensorstore.open(spec, open=True, read=True).result().read().result()).astype(np.float32)


found["run-tensorstore"] = np.concatenate([stored(shard / name) for shard in shards])
tokens["run"] = pa.concat_tables([pq.read_table(shard / "tokens.parquet") for shard in shards])["token"].to_pylist()
groups = [zarr.open_group(str(shard), mode="r") for shard in shards]
if json.loads((shards[0] / name / "zarr.json").read_text())["data_type"] == "bfloat16":
    try:
        groups[0][name]
    except (KeyError, ValueError):  # of bfloat16 zarr knows nothing, and says so
        pass
    else:
        raise AssertionError("zarr opened bfloat16: as what?")
else:
    found["run-zarr"] = np.concatenate([group[name][:] for group in groups]).astype(np.float32)

found["zarr"] = zarr.open_group(str(exports / "zarr"), mode="r")[name][:]
found["zarr-tensorstore"] = stored(exports / "zarr" / name)
found["npy"] = np.load(exports / "npy" / f"{name}.npy", mmap_mode="r")
found["safetensors"] = safetensors.numpy.load_file(exports / "safetensors" / f"{name}-00000.safetensors")["activations"]
table = pa.concat_tables([pq.read_table(path) for path in sorted((exports / "parquet").glob("data-*.parquet"))])
found["parquet"] = np.stack(table[name].to_numpy())
tokens["parquet"] = table["token"].to_pylist()
loaded = datasets.load_dataset(str(exports / "parquet"), split="train", cache_dir=str(out / "cache"))
found["parquet-datasets"] = np.asarray(loaded.with_format("numpy")[name][:])
tokens["parquet-datasets"] = list(loaded["token"])
held = datasets.load_from_disk(str(exports / "hf"))
found["hf"] = np.asarray(held.with_format("numpy")[name][:])
tokens["hf"] = list(held["token"])
for reader, rows in found.items():
    np.save(out / f"{reader}.npy", np.asarray(rows, np.float32))
print(json.dumps({"readers": list(found), "tokens": tokens}))
