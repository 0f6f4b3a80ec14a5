"""The judge of `covariance.safetensors`: numpy's covariance, in float64, of every row that plain zarr reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import zarr
from safetensors.numpy import load

FILE = "covariance.safetensors"


def stored_rows(folder: Path, name: str) -> np.ndarray:
    """float64 [n, d]: the rows of a name in dataset order, of a run that stores float32."""
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("ledger/f*.json"))]
    attempts = [folder / "shards" / record["attempt"] for record in records]
    parts = [np.asarray(zarr.open_array(attempt / name, mode="r")[:]) for attempt in attempts]
    return np.concatenate(parts).astype(np.float64)


def assert_of_stored_rows(folder: Path) -> None:
    """Every element to 1e-10 of the deviations of its two columns."""
    merged = load((folder / FILE).read_bytes())
    names = json.loads((folder / "run.json").read_text())["plan"]["names"]
    assert len(merged) == 3 * len(names)
    for name in names:
        rows = stored_rows(folder, name)
        expected = np.cov(rows.T, bias=True)
        deviations = np.sqrt(np.diag(expected))
        triangle = np.triu_indices(rows.shape[1])
        assert merged[f"covariance/{name}/rows"].tolist() == [len(rows)]
        found = merged[f"covariance/{name}/upper"] / len(rows)
        assert (np.abs(found - expected[triangle]) <= 1e-10 * np.outer(deviations, deviations)[triangle]).all()
        np.testing.assert_allclose(
            merged[f"covariance/{name}/mean"], rows.mean(axis=0), atol=1e-12 * np.abs(rows).max()
        )
