"""Looks up a text in a run: where it occurs, its rows, the rows nearest to one of them, what documents project on.

    python jobs/examples/look_up.py [JOB] [--text " boring"] [--name residual.15] [--most 4]

JOB is harvested first, or opened where that is done. Its `data.keep` has to name the columns that are shown of a
document: `data.keep = ["label", "text"]`. Rows are compared a batch at a time, in the order in which they lie on disk,
so that any number of them fits.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import harvest

JOB = Path(__file__).with_name("reviews.toml")
SHOWN = ["label", "text"]
"""Columns of the data, of each document that is shown."""


def quoted(run: harvest.Run, row: int) -> str:
    """The text around a row on one line, its own token in brackets."""
    return " ".join(str(run.quote(int(row), before=10, after=4)).split())


def nearest(run: harvest.Run, name: str, row: int, among: np.ndarray, most: int) -> list[tuple[float, int]]:
    """(cosine, row) of the rows of a mask that lie closest to one row, away from the mean of all of them."""
    mean = torch.cat([x for x, _ in zip(run.batches(name, where=among, dtype="float32"), range(4))]).mean(0)
    wanted = torch.nn.functional.normalize(run[name][[row]].float() - mean)[0]
    best: list[tuple[float, int]] = []
    for states, rows in run.batches(name, where=among, shuffle=False, with_rows=True, dtype="float32"):
        cosines = torch.nn.functional.normalize(states - mean) @ wanted
        top = cosines.topk(min(most, len(rows)))
        best += zip(top.values.tolist(), rows[top.indices].tolist())
        best = sorted(best, reverse=True)[:most]
    return best


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", nargs="?", default=JOB)
    parser.add_argument("--text", default=" boring")
    parser.add_argument("--name", default="residual.15")
    parser.add_argument("--direction", default="sentiment")
    parser.add_argument("--most", type=int, default=4)
    given = parser.parse_args(arguments)

    told = tomllib.loads(Path(given.job).read_text())
    if not {*SHOWN} <= {*told.get("data", {}).get("keep", [])}:
        raise SystemExit(f"{given.job}: what is shown of a document has to be kept: data.keep = {json.dumps(SHOWN)}")
    run = harvest.run(given.job)
    rows = run.find(text=given.text)
    keys = run.tokens(columns=["document", "position"])
    documents, positions = (keys.column(column).to_numpy() for column in keys.column_names)
    print(f"{given.text!r}: {len(rows)} rows in {len(set(documents[rows]))} documents")
    for row in rows[: given.most]:
        norm = run[given.name][int(row)].float().norm()
        print(f"  row {row:6}, norm {norm:5.0f}  {quoted(run, row)}")

    print(f"\nnearest to row {rows[0]} in other documents, at {given.name}")
    others = (documents != documents[rows[0]]) & (positions > 0)  # first tokens are the attention's parking place
    for cosine, row in nearest(run, given.name, int(rows[0]), others, given.most):
        print(f"  row {row:6}, cosine {cosine:.2f}  {quoted(run, row)}")

    direction = run.directions()[given.direction][given.name]
    pooled, about = run.features(given.name, "mean", labels=["document", *SHOWN])
    along = pooled @ direction.vector - direction.midpoint
    order = along.argsort()
    for what, chosen in (("most", order[::-1]), ("least", order)):
        print(f"\n{what} along {given.direction} at {given.name}")
        for at in chosen[: given.most]:
            of = about.slice(int(at), 1).to_pylist()[0]
            print(f"  {along[at]:+6.2f}  document {of['document']:6}, label {of['label']}: {of['text'][:70]!r}")


if __name__ == "__main__":
    main()
