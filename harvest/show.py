"""What the commands print: each result once as text for people and once as plain data for programs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harvest.errors import RequestError
from harvest.stages import Stages, stages_of
from harvest.store import layout

if TYPE_CHECKING:
    from harvest.concepts.directions import Result
    from harvest.plan import Plan
    from harvest.planning.survey import Survey
    from harvest.reading.reader import Run
    from harvest.reduce.direction import Direction

ENDS = {"float16": 65504}
"""Dtype of a forward -> its largest number, where models outgrow it."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One result, twice."""

    text: str
    data: Any


def plan(plan: Plan, found: Survey | None = None) -> Shown:
    """What a job will do and need, and what was `found` in its data."""
    from harvest.planning import survey
    from harvest.planning.sizes import row_bytes  # torch, which is loaded wherever there is a plan

    estimate, resolved = plan.estimate, plan.resolved
    size = {str(name): row_bytes(name.width, resolved.store_dtype) for name in plan.names}
    compressed = "" if plan.job.store.compression == "none" else " before compression"
    data = {
        "documents": estimate.documents,
        "tokens": estimate.tokens,
        "tokens_low": estimate.tokens_low,
        "tokens_high": estimate.tokens_high,
        "judged": {"from": estimate.judged, "documents": estimate.judged_documents},
        "rows": estimate.rows,
        "shards": estimate.shards,
        "bytes_per_row": size,
        "state_bytes": estimate.state_bytes,
        "store_bytes": estimate.store_bytes,
        "memory_bytes": estimate.memory_bytes,
        "free_bytes": estimate.free_bytes,
        "resolved": {key: getattr(resolved, key) for key in resolved.__dataclass_fields__},
        "fingerprint": plan.fingerprint,
        "groups": None if found is None else survey.data(found),
    }
    rows = [
        ("model", f"{plan.job.model.name}, {resolved.dtype} on {resolved.device}, attention {resolved.attention}"),
        ("names", f"{len(plan.names):,}: {_few([str(name) for name in plan.names])}"),
        ("data", f"{plan.job.data.path}, {_plural(len(plan.source.files), 'file')}"),
        ("documents", _count(estimate.documents)),
        ("tokens", f"{survey.judged(estimate)}, windows of at most {resolved.context}"),
        *([] if found is None else survey.said(found, plan.job.data.on_bad)),
        ("rows", f"about {_count(estimate.rows)}, {_bytes(estimate.bytes_per_row)} each as {resolved.store_dtype}"),
        ("sums", f"{_bytes(estimate.state_bytes)} a shard"),
        ("store", f"about {_bytes(estimate.store_bytes)}{compressed} ({_bytes(estimate.free_bytes)} free)"),
        ("memory", f"at most {_bytes(estimate.memory_bytes)} a worker"),
        ("shards", f"{_count(estimate.shards)} of {resolved.shard_documents:,} source rows"),
        ("threads", str(resolved.threads)),
        ("run", plan.job.run.path),
    ]
    return Shown(_table(rows), data)


def run(run: Run) -> Shown:
    """What a finished run holds, and what to try next."""
    summary = run.summary()
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in summary["skipped"].items())
    rows = [
        ("run", _place(run.path)),
        ("documents", f"{summary['documents']:,}" + (f" ({skipped} skipped)" if skipped else "")),
        ("tokens", f"{summary['tokens']:,}" + _dropped(summary["dropped_tokens"])),
        ("rows", f"{summary['rows']:,} in each of {_plural(len(run.names), 'name')}"),
        ("names", _few(run.names)),
        ("bytes", f"{_bytes(summary['bytes'])} in {_plural(summary['shards'], 'shard')}"),
        ("speed", _speed(summary)),
        ("self-check", _self_check(summary["self_check"])),
        *(("direction", _best(result)) for result in run.direction_results),
    ]
    if run.files.exists(layout.REPORT):
        rows.append(("report", _place(f"{run.files.url}/{layout.REPORT}")))
    if summary["span_documents"]:
        found = [f"{name}: {_plural(count, 'document')}" for name, count in summary["span_documents"].items()]
        rows.append(("spans", ", ".join(found)))
    if summary["non_finite"]:
        rows.append(("non-finite", _non_finite(summary)))
    spent = stages_of(run.shards)
    data = {"run": run.path, "names": run.names, **summary, "stages": None if spent is None else spent.data()}
    return Shown(_table(rows) + _below(spent), data)


def _best(result: Result) -> str:
    """Where a direction is best, by what it was chosen by."""
    from harvest.concepts.best import bests  # torch, which is loaded wherever there is a run

    found = bests(result)
    return max(found, key=lambda one: one.in_folds).text if found else f"{result.name}: nothing to choose a best one by"


def _place(path: str) -> str:
    """As one names it from here."""
    here = os.path.join(os.getcwd(), "")
    return path.removeprefix(here) if path != here else path


def warnings(run: Run) -> list[str]:
    """What a finished run should not keep to itself, a line each."""
    summary, dtype = run.summary(), run.record.plan["resolved"]["dtype"]
    lines = _nothing(summary) + [
        f"capture.positions: no document has a token in span {name!r}"
        for name, count in summary["span_documents"].items()
        if not count
    ]
    if summary["non_finite"]:
        lines.append(f"values that are no finite numbers: {_non_finite(summary)}; documents() names them{_end(dtype)}")
    for result in run.direction_results:
        for mode, found in result.found.items():
            whys = [f"{at}: {direction.status}" for at, direction in found.items() if direction.status != "ok"]
            if whys:
                lines.append(f"direction {result.name!r}, {mode}: undefined at {len(whys)} of {len(found)}, {whys[0]}")
    return lines


def _nothing(summary: Mapping[str, Any]) -> list[str]:
    """Where the run is complete, and empty."""
    skipped, documents = summary["skipped"], summary["documents"]
    if sum(skipped.values()) < documents:
        return []
    if not documents:
        return ["no document was harvested: the data had none"]
    whys = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
    return [f"no document was harvested: all {documents:,} were skipped ({whys}); documents() lists them"]


def _end(dtype: str) -> str:
    if dtype not in ENDS:
        return ""
    return f"; model.dtype = {dtype!r} ends at {ENDS[dtype]}, 'bfloat16' and 'float32' do not"


def _non_finite(summary: Mapping[str, Any]) -> str:
    found = _few([f"{name}: {count:,}" for name, count in summary["non_finite"].items()])
    return f"{found}, in {_plural(summary['non_finite_documents'], 'document')}"


def _dropped(tokens: int) -> str:
    return f" (and {tokens:,} cut off by truncation)" if tokens else ""


def _self_check(errors: Mapping[str, float]) -> str:
    if not errors:
        return "nothing to compare"
    worst = max(errors, key=lambda name: errors[name])
    return f"a batch and a document alone agree to {errors[worst]:.1e} of a row's norm ({worst})"


def _speed(summary: Mapping[str, Any]) -> str:
    forward = summary["seconds"].get("forward", 0.0)
    if not forward:
        return "nothing ran"
    return f"{summary['forward_tokens'] / forward:,.0f} tokens/s in the forward"


def status(status: Mapping[str, Any]) -> Shown:
    """How a run stands."""
    rows = [
        ("run", f"{status['run']}: {status['state']}"),
        ("shards", f"{status['committed']} committed, {_count(status['missing'])} missing"),
        ("running", ", ".join(status["running"]) or _doing(status["worker"])),
        ("failed", "; ".join(status["failed"].values()) or "none"),
        ("documents", f"{status['documents']:,} of {_count(status['expected_documents'])}"),
        ("skipped", ", ".join(f"{count:,} {reason}" for reason, count in status["skipped"].items()) or "none"),
        ("rows", f"{status['rows']:,}"),
        ("non-finite", _non_finite(status) if status["non_finite"] else "none"),
        ("tokens", _tokens(status)),
        ("bytes", _bytes(status["bytes"])),
        ("forward", _forward(status)),
    ]
    if status["worker"]:
        worker = status["worker"]
        heard = f"heard of {worker['seconds_since_heartbeat']} s ago"
        rows.append(("at work", f"pid {worker['pid']} on {worker['host']}, {heard}"))
    spent: Stages | None = status["stages"]
    return Shown(_table(rows) + _below(spent), {**status, "stages": None if spent is None else spent.data()})


def _doing(worker: Mapping[str, Any] | None) -> str:
    """Where no shard is under way."""
    if not worker or not worker["doing"]:
        return "none"
    return f"none yet: {worker['doing']}, for {worker['doing_seconds']:.0f} s"


def _forward(status: Mapping[str, Any]) -> str:
    rate = status["tokens_per_forward_second"]
    return "nothing ran" if rate is None else f"{rate:,.0f} tokens/s"


def _tokens(status: Mapping[str, Any]) -> str:
    done = f"{status['tokens']:,}"
    return done if status["state"] == "complete" else f"{done} of about {_count(status['expected_tokens'])}"


def sites(sites: Mapping[str, Any]) -> Shown:
    """What can be captured from a model."""
    rows = [("model", f"{sites['model']} ({sites['architecture']}, {sites['layers']} layers)")]
    for site, entry in sites["sites"].items():
        layers = "" if entry["layers"] is None else f"layers {entry['layers']}, "
        rows.append((site, f"width {entry['width']}, {layers}{entry['module']}"))
    return Shown(_table(rows), dict(sites))


def directions(run: Run) -> Shown:
    """Every direction of a run, mode by mode and name by name, and where each mode tells the groups apart best."""
    if not run.direction_results:
        raise RequestError(f"{run.path}: its job asks for no [[directions]]")
    from harvest.concepts.cards import groups  # torch, which a run with directions needs anyway

    lines = []
    for result in run.direction_results:
        lines.append(f"{result.name}: {groups(run.record, result.card['settings'])}")
        rows: list[tuple[str, ...]] = [("mode", "at", "A", "B", "norm", "AUROC", "accuracy", "Cohen's d", "status")]
        for mode, found in result.found.items():
            rows += [_direction(mode, at, direction) for at, direction in found.items()]
        why = _shared_reason(rows[1:])
        if why is not None:
            rows[1:] = [(*row[:-1], "ok") for row in rows[1:]]
        lines += [*_columns(rows), *([] if why is None else [why]), *_worth(result.card), ""]
    return Shown("\n".join(lines[:-1]), [result.card for result in run.direction_results])


def _direction(mode: str, at: str, direction: Direction) -> tuple[str, ...]:
    judged, norm = direction.evaluation, "-" if direction.norm is None else f"{direction.norm:.4g}"
    figures = ("-", "-", "-") if judged is None else (str(judged.auroc), str(judged.accuracy), str(judged.cohens_d))
    why = direction.status
    if why == "ok" and judged is not None and judged.auroc.value is None:
        why = f"ok; {judged.reason}"
    return (mode, at, *(f"{rows:,}" for rows in direction.counts.rows), norm, *figures, why)


def _shared_reason(rows: Sequence[tuple[str, ...]]) -> str | None:
    """Why no direction has figures, where that is the same for all."""
    whys = {row[-1] for row in rows}
    why = (
        whys.pop().removeprefix("ok; ") if len(whys) == 1 and all(row[-1].startswith("ok; ") for row in rows) else None
    )
    return None if why is None else f"  no figures: {why}; a larger holdout, or 'column:NAME', gives some"


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _worth(card: Mapping[str, Any]) -> list[str]:
    """Which name to take, chosen without the held-out examples, and what shuffled labels reach there."""
    from harvest.concepts.cards import added

    lines = []
    counts = card["directions"][0]["counts"]
    if counts["unknown"]:
        lines.append(f"  in no group, and so in no direction: {counts['unknown']:,} examples")
    wrong = counts["wrong"]
    if any(wrong):
        lines.append(f"  left out for a wrong answer: A {wrong[0]:,}, B {wrong[1]:,}")
    for mode, at in card["best"].items():
        if at is None:
            continue
        control = card["control"][mode]
        shuffled = "" if control["auroc"] is None else f"; with shuffled labels {control['auroc']:.2f}"
        best = next(entry for entry in card["directions"] if (entry["mode"], entry["at"]) == (mode, at))
        held_out = "no held-out AUROC" if best["evaluation"] is None else _held_out(best["evaluation"]["auroc"])
        folds = f"{best['cross_validated_auroc']:.2f} in folds of the training examples"
        lines.append(f"  best of {mode}: {at} ({held_out}; {folds}{shuffled})")
    return lines + [f"  {mode} {added(check)}" for mode, check in (card["check"] or {}).items()]


def _held_out(auroc: Mapping[str, float | None]) -> str:
    """With its interval."""
    from harvest.reduce.evaluate import Figure

    return "no held-out AUROC" if auroc["value"] is None else f"held-out AUROC {Figure(**auroc)}"


def _below(spent: Stages | None) -> str:
    """The report of the stages; nothing for runs of versions that measured none."""
    return "" if spent is None else f"\n\n{spent.text}"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(key) for key, _ in rows)
    return "\n".join(f"{key:<{width}}  {value}" for key, value in rows)


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _few(items: Sequence[str], most: int = 6) -> str:
    if len(items) <= most:
        return ", ".join(items)
    return f"{', '.join(items[: most - 1])} ... {items[-1]}"


def _count(number: float | None) -> str:
    return "an unknown number" if number is None else f"{number:,}"


def _bytes(number: int | None) -> str:
    """Decimal units, as disks are sold."""
    if number is None:
        return "an unknown size"
    value = float(number)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    raise AssertionError
