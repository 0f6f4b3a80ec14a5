"""What `harvest plan` says about memory holds: measured peaks of processes of their own, none that grow with time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import byte_tokenizer, tiny_llama

from harvest.runtime import coordinate
from harvest.runtime.progress import Silent

RUN = """
import json, resource, sys
from harvest.runtime import coordinate
from harvest.runtime.progress import Silent

class Peaks(Silent):
    \"\"\"Peak resident bytes after so many batches; in the end after the run.\"\"\"

    def __init__(self, marks):
        self.marks, self.batches, self.found = marks, 0, {}

    def look(self, mark):
        self.found[mark] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def advanced(self, progress):
        self.batches += 1
        if self.batches in self.marks:
            self.look(self.batches)

peaks = Peaks(json.loads(sys.argv[2]))
coordinate.run(sys.argv[1], observer=peaks)
peaks.look("end")
print(json.dumps({"batches": peaks.batches, **peaks.found}))
"""


def write_job(folder: Path, *, layers: int, documents: int, letters: int, **tables: dict[str, Any]) -> Path:
    """A model whose rows are far larger than its weights, and texts of so many letters."""
    tiny_llama(layers=layers, vocab=300, hidden_size=512).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    texts = (f"text number {number} ".ljust(letters, ".") for number in range(documents))
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings: dict[str, dict[str, Any]] = {
        "model": {"name": str(folder / "model")},
        "data": {"path": str(folder / "texts.jsonl")},
        "run": {"path": str(folder / "run"), "threads": 1},
    }
    for table, values in tables.items():
        settings[table] = {**settings.get(table, {}), **values}
    lines = (f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in s.items()) for name, s in settings.items())
    (folder / "job.toml").write_text("".join(lines))
    return folder / "job.toml"


def peaks_of(job: Path, *marks: int) -> dict[str, int]:
    """Runs the job in a process of its own; peak resident bytes after so many batches, and at its end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, str(job), json.dumps(marks)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_runs_peak_is_at_most_what_the_plan_says(tmp_path: Path) -> None:
    """More than three sort windows of 256 MiB of rows; held together they would be more than the plan allows."""
    job = write_job(tmp_path, layers=8, documents=850, letters=63)
    plan = coordinate.plan_run(job)
    rows = 850 * 64 * plan.estimate.bytes_per_row
    assert rows > 3 * plan.resolved.rows_per_sort_window * plan.estimate.bytes_per_row
    peaks = peaks_of(job)
    assert peaks["end"] <= plan.estimate.memory_bytes
    assert peaks["end"] > plan.estimate.memory_bytes / 3, "the plan is a bound that means something"


@pytest.mark.slow
def test_memory_is_flat_from_a_hundred_batches_to_a_thousand(tmp_path: Path) -> None:
    job = write_job(
        tmp_path,
        layers=2,
        documents=1050,
        letters=63,
        tokens={"batch": 64},
        capture={"layers": [0]},
        store={"shard_documents": 32},
    )
    peaks = peaks_of(job, 100, 1000)
    assert peaks["batches"] >= 1000
    stored = sum(path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert stored > 130e6, "what would be held if it were held"
    assert peaks["1000"] <= 1.02 * peaks["100"] + 8e6


class Workers(Silent):
    """The largest peak of each worker's process, looked up at every commit while it is alive."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.peaks: dict[int, int] = {}

    def joined(self, worker: str, where: str, workers: int) -> None:
        found = re.search(r"pid (\d+)", where)
        assert found is not None
        self.pids.add(int(found[1]))

    def committed(self, record: Any) -> None:
        for pid in self.pids:
            told = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
            assert told is not None
            self.peaks[pid] = 1024 * int(told[1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks of other processes are read from /proc")
def test_a_ray_workers_peak_is_at_most_what_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # loopback only
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    job = write_job(
        tmp_path,
        layers=8,
        documents=850,
        letters=63,
        store={"shard_documents": 256},
        run={"executor": "ray", "workers": 1},
    )
    workers = Workers()
    coordinate.run(job, observer=workers)
    (peak,) = workers.peaks.values()
    plan = coordinate.plan_run(job)
    assert plan.estimate.memory_bytes / 3 < peak <= plan.estimate.memory_bytes
