"""What Prometheus sees of a run with two workers, at the address where it would look: scraped while the run goes on."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from plainrun import read_plain
from rayhead import Head, ray_head

from harvest.runtime.metrics import METRICS, OF_THE_COORDINATOR, OF_WORKERS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "jobs"))

from chaos import tiny_job  # noqa: E402

WAIT_SECONDS = 240
LINE = re.compile(r"^ray_(harvest_\w+)\{([^}]*)\} (\S+)$", flags=re.MULTILINE)
EVENTS = {"harvest_retries_total", "harvest_lost_workers_total", "harvest_non_finite_total"}
"""Of what does not happen in an undisturbed run there is no number."""
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(head: Head) -> Series:
    """Our series as they are now: (name, labels) -> value; none before the node's agent listens."""
    try:
        with urllib.request.urlopen(head.metrics, timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    return {
        (name, frozenset(re.findall(r'(\w+)="([^"]*)"', labels))): float(value)
        for name, labels, value in LINE.findall(text)
    }


def label(labels: frozenset[tuple[str, str]], key: str) -> str:
    return dict(labels).get(key, "")


def total(series: Series, name: str) -> float:
    return sum(value for (found, _), value in series.items() if found == name)


@pytest.mark.slow
def test_prometheus_sees_every_number_with_its_run_and_worker(tmp_path: Path) -> None:
    """E64, its quiet half: what is scraped in time equals the ledger, which is what summaries are made of."""
    job = tiny_job(tmp_path, documents=400, shard_documents=4)
    seen: Series = {}
    with ray_head() as head:
        command = [sys.executable, "-m", "harvest", "run", str(job), "--set", f"run.address='{head.address}'"]
        environment = {**head.client, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with open(tmp_path / "log", "wb") as log:
            process = subprocess.Popen(
                [*command, "--set", "run.workers=2"], env=environment, cwd=tmp_path, stdout=log, stderr=log
            )
        give_up = time.monotonic() + WAIT_SECONDS
        while process.poll() is None and time.monotonic() < give_up:
            seen |= scrape(head)
            time.sleep(0.3)
        assert process.wait(1) == 0, (tmp_path / "log").read_text()
        records = read_plain(tmp_path / "run").records.values()
        rows, shards = (sum(record["rows"] for record in records), len(records))
        while total(seen, "harvest_committed_rows_total") < rows and time.monotonic() < give_up:
            seen |= scrape(head)

    names = {re.sub(r"(harvest_shard_forward_seconds)_(bucket|sum|count)$", r"\1", name) for name, _ in seen}
    assert names == set(METRICS) - EVENTS
    assert {label(labels, "run") for _, labels in seen} == {"run"}
    for metric in OF_WORKERS:
        workers = {label(labels, "worker") for name, labels in seen if name == metric.name}
        assert workers == {"worker-0", "worker-1"}, metric.name
    for metric in OF_THE_COORDINATOR:
        workers = {label(labels, "worker") for name, labels in seen if name.startswith(metric.name)}
        assert workers <= {"coordinator"}, metric.name
    for metric in METRICS.values():
        for name, labels in seen:
            if name == metric.name:
                assert all(label(labels, key) for key in metric.labels), metric.name
    assert total(seen, "harvest_committed_rows_total") == rows
    assert total(seen, "harvest_committed_shards_total") == shards
    assert total(seen, "harvest_shard_forward_seconds_count") == shards
    tokens = sum(record["tokens"] for record in records)
    assert 0 < total(seen, "harvest_tokens_total") <= 2 * tokens  # the last shards may be read by both workers
