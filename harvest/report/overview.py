"""What was run and what it holds, out of run.json and the commit records; nothing here reads a row."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harvest.errors import DamageError
from harvest.reading.reader import Run
from harvest.report import words
from harvest.report.positions import chosen_names
from harvest.store import layout
from harvest.store.tables import StoredTable

MOST_LISTED = 20
"""Skipped documents that are named."""
MOST_FILES = 5
"""Fingerprints of data files that are shown."""
Line = tuple[str, str]
"""What it is, and what it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The head of the page."""

    path: str
    model: str
    complete: bool
    what: tuple[Line, ...]
    """Model, data, job."""
    versions: tuple[Line, ...]
    """What the bits stand on: versions, hardware, hashes."""
    holds: tuple[tuple[str, str, str], ...]
    """(What, how much, what else there is to say): documents, tokens, rows, bytes."""
    skipped: tuple[tuple[str, int], ...]
    """(Reason, documents), most first."""
    listed: tuple[tuple[int, str], ...]
    """(Document, reason) of the first skipped ones."""
    job: str
    """Every setting, as JSON."""
    commands: tuple[Line, ...]
    """What to do next, and the command for it."""


def overview(run: Run, summary: Mapping[str, Any]) -> Overview:
    """`summary` as `run.summary()`."""
    job = run.record.job
    skipped = sorted(summary["skipped"].items(), key=lambda item: (-item[1], item[0]))
    return Overview(
        path=run.path,
        model=str(job["model"]["name"]),
        complete=run.complete,
        what=tuple(_what(run)),
        versions=tuple(_versions(run, summary)),
        holds=tuple(_holds(run, summary)),
        skipped=tuple(skipped),
        listed=_listed(run),
        job=json.dumps(job, indent=1, ensure_ascii=False),
        commands=tuple(_commands(run)),
    )


def _what(run: Run) -> Iterator[Line]:
    job, resolved = run.record.job, run.record.plan["resolved"]
    model, data, tokens = job["model"], job["data"], job["tokens"]
    yield "model", str(model["name"])
    yield "revision", str(model["revision"])
    for key in ("adapter", "quantization"):
        if model.get(key):
            yield key, str(model[key])
    yield "forward", f"{resolved['dtype']} on {resolved['device']}, attention {resolved['attention']}"
    files = run.record.plan["files"]
    yield "data", f"{data['path']}{'' if len(files) == 1 else f' ({len(files):,} files)'}"
    for key in ("name", "split", "revision", "text", "messages", "ids", "contrast", "limit", "max_tokens", "sample"):
        if data.get(key) is not None:
            yield f"data.{key}", _plain(data[key])
    yield "windows", f"at most {resolved['context']:,} tokens, longer documents: {tokens['long']}"
    yield "batching", f"{resolved['batching']}, {resolved['tokens_per_batch']:,} tokens a forward"
    yield "sites", _plain(job["capture"]["sites"])
    yield "layers", _plain(job["capture"]["layers"])
    yield "positions", _plain(job["capture"]["positions"])
    stored = f"{resolved['store_dtype']}, compression {job['store']['compression']}"
    yield "stored as", stored if job["capture"]["store"] else "no rows, sums only"


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _versions(run: Run, summary: Mapping[str, Any]) -> Iterator[Line]:
    yield from ((key, str(value)) for key, value in run.record.provenance.items())
    environments = summary["environments"]
    for number, environment in enumerate(environments):
        label = "computed by" if len(environments) == 1 else f"computed by ({number + 1} of {len(environments)})"
        yield label, ", ".join(f"{key} {value}" for key, value in environment.items())
    locks = [(key, value) for key, value in run.record.fingerprint.items() if key.startswith("fingerprint.")]
    files = [lock for lock in locks if lock[0].startswith("fingerprint.data.")]
    for key, value in [lock for lock in locks if lock not in files] + files[:MOST_FILES]:
        yield f"hash of {key.removeprefix('fingerprint.')}", str(value)
    if len(files) > MOST_FILES:
        yield "hashes of more files", f"{len(files) - MOST_FILES:,}, in run.json"


def _holds(run: Run, summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    expected = run.record.plan.get("documents")
    of = "" if run.complete or expected is None else f"of about {expected:,}"
    cut = f"and {summary['dropped_tokens']:,} cut off by truncation" if summary["dropped_tokens"] else ""
    yield "documents", words.count(summary["documents"]), of
    yield "skipped", words.count(sum(summary["skipped"].values())), ""
    yield "tokens", words.count(summary["tokens"]), cut
    yield "rows of each name", words.count(summary["rows"]), ""
    yield "names", words.count(len(run.names)), ""
    yield "on disk", words.size(summary["bytes"]), f"in {words.plural(summary['shards'], 'shard')}"
    odd = sum(summary["non_finite"].values())
    if odd:
        documents = words.plural(summary["non_finite_documents"], "document")
        yield "values that are no finite numbers", words.count(odd), f"in {documents}"
    for span, count in summary["span_documents"].items():
        yield "documents with span", words.count(count), span


def _listed(run: Run) -> tuple[tuple[int, str], ...]:
    """The first skipped documents; only tables of shards that have some are read, and torn ones passed over."""
    found: list[tuple[int, str]] = []
    for record in run.shards:
        if record.skipped and len(found) < MOST_LISTED:
            path = f"{layout.attempt_path(record.attempt)}/{layout.DOCUMENTS}"
            with contextlib.suppress(DamageError):
                table = StoredTable(run.files, path).read(["document", "status", "reason"])
                found += [(row["document"], row["reason"]) for row in table.to_pylist() if row["status"] == "skipped"]
    return tuple(found[:MOST_LISTED])


def _commands(run: Run) -> Iterator[Line]:
    path = shlex.quote(run.path)
    if not run.complete:
        yield "go on where it ended, with the job file that made it", "harvest run JOB"
    for key in ("limit", "max_tokens"):
        if run.complete and (most := run.record.job["data"].get(key)) is not None:
            yield (
                "more of the same data, with the job file that made it",
                f"harvest run JOB --set data.{key}={2 * most}",
            )
    yield "read everything again and compare it with the ledger", f"harvest verify {path}"
    yield "harvest damaged shards again", f"harvest verify {path} --repair"
    if run.record.job["capture"]["store"]:
        name = f" --name {shlex.quote(chosen_names(run.names)[-1])}" if run.names else ""
        yield "rows for SAELens", f"harvest export saelens {path} OUT{name}"
        yield "rows as numpy arrays", f"harvest export npy {path} OUT{name}"
        yield "rows as a datasets folder", f"harvest export hf {path} OUT{name}"
    if run.record.job.get("directions"):
        yield "directions as a table", f"harvest directions {path}"
        yield "directions for other tools", f"harvest export safetensors {path} OUT --directions"
    yield "this page again", f"harvest report {path}"
