"""What an export says of itself: export.json for programs, with every checksum, and README.md for people."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import harvest
from harvest.export.format import Format
from harvest.export.naming import site_and_layer
from harvest.export.selection import Selected
from harvest.reading.reader import Run
from harvest.results import summarise

VERSION = 1
MODEL = ("name", "revision", "adapter", "quantization")
DATA = ("path", "name", "files", "split", "revision")


def make_card(selected: Selected, asked: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values. `asked`: the request's options by name; `extra`: what the format adds."""
    run, units = selected.run, selected.units
    return {
        "version": VERSION,
        "harvest": harvest.__version__,
        "format": asked["format"],
        "rows": units.rows,
        "context": asked["context"],
        "contexts": units.count if asked["context"] else None,
        "order": _order(asked),
        "shuffle": asked["shuffle"],
        "filter": asked["rows"],
        "limit": asked["limit"],
        "rows_left_out": len(run) - units.rows,
        "columns": {column.label: _column(selected, column) for column in selected.columns},
        "tokens": "tokens.parquet: row by row with the data",
        "model": _some(run.record.job.get("model", {}), MODEL) | {"dtype": _resolved(run, "dtype")},
        "data": _some(run.record.job.get("data", {}), DATA),
        "run": _run_card(run),
        **extra,
    }


def _order(asked: Mapping[str, Any]) -> str:
    seed = asked["shuffle"]
    if seed is None:
        return "dataset order: by document, then position"
    if asked["context"]:
        return f"contexts shuffled with seed {seed}"
    where = ", where=the filter" if asked["rows"] else ""
    return f"shuffled with seed {seed}: the first epoch of run.batches(..., seed={seed}{where})"


def _column(selected: Selected, column: Any) -> dict[str, Any]:
    site, layer = site_and_layer(column.name)
    return {
        "name": column.name,
        "site": site,
        "layer": layer,
        "module": selected.run.record.plan["names"][column.name].get("module"),
        "width": column.width,
        "dtype": column.dtype,
        "stored_dtype": column.array.stored,
    }


def _run_card(run: Run) -> dict[str, Any]:
    summary = summarise(run.shards)
    keys = hashlib.blake2b("".join(record.keys_digest for record in run.shards).encode(), digest_size=16)
    lock = json.dumps(run.record.fingerprint, sort_keys=True, default=str).encode()
    return {
        "path": run.path,
        "complete": run.complete,
        "shards": len(run.shards),
        "rows": len(run),
        "fingerprint": hashlib.blake2b(lock, digest_size=16).hexdigest(),
        "fingerprints": {key: run.record.fingerprint[key] for key in run.record.fingerprint if "fingerprint." in key},
        "tokens_digest": keys.hexdigest(),
        "non_finite": summary["non_finite"],
    }


def _resolved(run: Run, key: str) -> Any:
    return run.record.plan["resolved"].get(key)


def _some(settings: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: settings[key] for key in keys if settings.get(key) is not None}


def text(card: Mapping[str, Any]) -> str:
    """What the command prints."""
    columns = list(card["columns"])
    shown = columns if len(columns) <= 4 else [*columns[:3], "...", columns[-1]]
    dtypes = sorted({column["dtype"] for column in card["columns"].values()})
    rows = f"{card['rows']:,} of {card['run']['rows']:,}"
    if card["context"]:
        rows += f", in {card['contexts']:,} contexts of {card['context']}"
    size = sum(file["bytes"] for file in card["files"].values())
    lines = [
        ("export", f"{card['out']} ({card['format']})"),
        ("rows", rows),
        ("columns", f"{len(columns)}: {', '.join(shown)}, {' and '.join(dtypes)}"),
        ("order", card["order"]),
        ("bytes", f"{size:,} in {len(card['files'])} files"),
    ]
    if not card["run"]["complete"]:
        lines.append(("source", f"unfinished: the {card['run']['shards']} shards that are committed"))
    return "\n".join(f"{key:<8}{value}" for key, value in lines)


def readme(card: Mapping[str, Any], format: Format, out: str) -> str:
    """README.md."""
    first = next(iter(card["columns"]))
    names = "\n".join(
        f"| `{label}` | `{column['name']}` | {column['width']} | {column['dtype']} |"
        for label, column in card["columns"].items()
    )
    context = f", in contexts of {card['context']}" if card["context"] else ""
    state = "" if card["run"]["complete"] else f" (unfinished: {card['run']['shards']} shards)"
    return (
        f"{format.front}# Activations of {card['model'].get('name') or 'a model'}\n\n"
        f"Exported by Harvest {card['harvest']} as `{card['format']}`: {card['rows']:,} rows{context}.\n\n"
        f"- Order: {card['order']}.\n"
        f"- Filter: {'`' + card['filter'] + '`' if card['filter'] else 'none'}; "
        f"{card['rows_left_out']:,} of the run's {card['run']['rows']:,} rows are left out.\n"
        f"- `tokens.parquet`: which document, position and token each row is, row by row with the data.\n"
        f"- `export.json`: this card for programs, with the size and crc32c of every file.\n"
        f"- Source: run `{card['run']['path']}`{state}, fingerprint {card['run']['fingerprint']}.\n\n"
        f"| here | in the run | width | dtype |\n| --- | --- | --- | --- |\n{names}\n\n"
        f"```python\n{format.opens.format(folder=out, label=first, context=card['context'] or 1)}\n```\n"
    )
