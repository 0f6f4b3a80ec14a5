"""Kills a run at random moments until it has had enough, lets it finish, and compares it with one that was left alone.

    python jobs/chaos.py --kills 30 --seed 7            # a tiny model over thousands of short texts
    python jobs/chaos.py --kills 30 --job jobs/demo.toml
    python jobs/chaos.py --kills 50 --workers 3         # on Ray; workers are killed too

Every life is a process of its own, `python -m harvest run`, ended by SIGKILL. Half of the kills fall anywhere from
its start on, half some time after its first commit. With several workers half of the kills hit a worker instead, and
the life goes on; each life has another number of them. The run that all are compared with is one worker's, in one
process. The last line is `identical` (exit status 0) or the first difference (1). A run that finishes before the kills
are used up is compared, and another is begun.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # the tiny model and the plain reader that the tests are built on

from plainrun import attempts_without_record, first_difference, read_plain  # noqa: E402

WAIT_SECONDS = 600
"""For one life to finish or to commit; a run that hangs is a failure."""
POLL_SECONDS = 0.01


def main() -> int:
    """Runs the loop; returns the exit status."""
    options = _options()
    folder = Path(options.folder or tempfile.mkdtemp(prefix="harvest-chaos-"))
    job = Path(options.job) if options.job else tiny_job(folder, documents=options.documents)
    dice = random.Random(options.seed)
    print(f"seed {options.seed}, {options.kills} kills, in {folder}", flush=True)
    begin = time.monotonic()
    start_up = _clean_run(job, folder / "clean")
    print(f"clean run {time.monotonic() - begin:.1f} s, its first commit after {start_up:.1f} s", flush=True)
    stages: Counter[str] = Counter()
    difference, number = None, 0
    while difference is None and stages.total() < options.kills:
        number += 1
        difference = _one_run(job, folder, number, options, start_up, dice, stages)
    for stage, count in sorted(stages.items()):
        print(f"{count:4d} killed {stage}")
    if not options.folder:
        shutil.rmtree(folder)
    print(difference or f"identical: {number} runs, {stages.total()} kills, seed {options.seed}", flush=True)
    return 1 if difference else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10_000))
    parser.add_argument("--job", help="a job file; its run.path is not used")
    parser.add_argument("--folder", help="where the runs go, and stay; a temporary one by default")
    parser.add_argument("--documents", type=int, default=1500, help="texts of the tiny job")
    parser.add_argument("--workers", type=int, default=1, help="the most that a life has; more than one means Ray")
    return parser.parse_args()


def _one_run(
    job: Path,
    folder: Path,
    number: int,
    options: argparse.Namespace,
    start_up: float,
    dice: random.Random,
    stages: Counter[str],
) -> str | None:
    """Kills one run until it completes or the kills are used up; returns how it differs from the clean one."""
    run, finished = folder / f"run-{number}", False
    while not finished and stages.total() < options.kills:
        after_commit = dice.random() < 0.5
        delay = dice.uniform(0, 2.0) if after_commit else dice.uniform(0, 1.2 * start_up)
        workers = dice.randint(1, options.workers)
        if options.workers > 1 and dice.random() < 0.5:
            killed, finished = kill_a_worker(job, run, delay, workers, dice)
        else:
            stage = kill_one(job, run, delay, after_commit=after_commit, workers=workers)
            killed, finished = [stage] if stage else [], stage is None
        stages.update(killed)
        when = f"{delay:.2f} s after {'its first commit' if after_commit else 'its start'}"
        shards = len(list(run.glob("ledger/f*.json")))
        for stage in killed:
            print(f"run {number}, kill {stages.total():3d}: {when}: {stage}, {shards} shards committed", flush=True)
    finish(job, run)
    difference = first_difference(read_plain(folder / "clean"), read_plain(run))
    if difference is None and (left := attempts_without_record(run)):
        difference = f"attempts left behind: {[path.name for path in left]}"
    if difference is None and harvest("verify", str(run)).wait(WAIT_SECONDS) != 0:
        difference = "harvest verify found damage"
    return f"run {number}: {difference}" if difference else None


def kill_one(job: Path, run: Path, delay: float, *, after_commit: bool, workers: int = 1) -> str | None:
    """One life, killed `delay` seconds after its start or its first commit: the stage that it was in.

    None where it finished before that; raises RuntimeError where it failed by itself.
    """
    before, life = _ledger(run), life_of(run)
    process = harvest("run", str(job), "--set", f"run.path='{run}'", "--set", f"run.workers={workers}")
    if after_commit:
        _wait_for_commit(process, run, before)
    try:
        status = process.wait(delay)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return stage_of(run, before_life=life, before=before)
    if status != 0:
        raise RuntimeError(f"harvest run ended with status {status}")
    return None


def kill_a_worker(job: Path, run: Path, delay: float, workers: int, dice: random.Random) -> tuple[list[str], bool]:
    """A life on Ray, one of whose workers is killed after its first commit, and half of the time the life too.

    Returns who was killed, and whether the run has finished.
    """
    settings = [f"run.path='{run}'", f"run.workers={workers}", "run.executor=ray"]
    before = _ledger(run)
    process = harvest("run", str(job), *(word for setting in settings for word in ("--set", setting)))
    _wait_for_commit(process, run, before)
    killed = []
    time.sleep(delay / 4)
    if found := workers_of(process.pid):
        os.kill(dice.choice(found), signal.SIGKILL)
        killed.append("a worker")
    try:
        status = process.wait(delay if dice.random() < 0.5 else WAIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return [*killed, "the coordinator of a crew"], False
    if status != 0:
        raise RuntimeError(f"harvest run ended with status {status}")
    return killed, True


def workers_of(coordinator: int) -> list[int]:
    """Processes of Ray's actors that descend from a coordinator which started its own Ray."""
    return descendants(coordinator, "HarvestWorker")


def descendants(ancestor: int, word: str) -> list[int]:
    """Processes below another one whose command lines hold a word."""
    parents, found = {}, []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
            if word.encode() in (stat.parent / "cmdline").read_bytes():
                found.append(int(stat.parent.name))
        except OSError:  # it has ended meanwhile
            continue
    return [pid for pid in found if ancestor in _ancestors(pid, parents)]


def _ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    found: set[int] = set()
    while pid in parents and pid not in found:
        found.add(pid)
        pid = parents[pid]
    return found


def _wait_for_commit(process: subprocess.Popen[bytes], run: Path, before: set[str]) -> None:
    give_up = time.monotonic() + WAIT_SECONDS
    while process.poll() is None and _ledger(run) <= before and time.monotonic() < give_up:
        time.sleep(POLL_SECONDS)


def stage_of(run: Path, *, before_life: str | None, before: set[str]) -> str:
    """Where a life was when it died, told from what it left on disk."""
    if life_of(run) == before_life:
        return "while starting up"
    if not (run / "run.json").exists():
        return "before run.json"
    if (run / "statistics.parquet").exists():
        return "after the merge"
    strays = attempts_without_record(run)
    if any((attempt / "zarr.json").exists() for attempt in strays):
        return "between a whole attempt and its record"
    if strays:
        return "in the middle of an attempt"
    return "between two shards" if _ledger(run) > before else "before the first attempt"


def _ledger(run: Path) -> set[str]:
    return {path.name for path in run.glob("ledger/f*.json")}


def life_of(run: Path) -> str | None:
    """Who took the lease last."""
    try:
        life: str = json.loads((run / "coordinator.json").read_text())["life"]
    except FileNotFoundError:
        return None
    return life


def finish(job: Path, run: Path) -> None:
    """Lets a run come to its end."""
    status = harvest("run", str(job), "--set", f"run.path='{run}'").wait(WAIT_SECONDS)
    if status != 0:
        raise RuntimeError(f"harvest run ended with status {status}")


def _clean_run(job: Path, run: Path) -> float:
    """Lets the run that all others are compared with come to its end; returns the seconds to its first commit."""
    begin = time.monotonic()
    process = harvest("run", str(job), "--set", f"run.path='{run}'")
    while process.poll() is None and not _ledger(run):
        time.sleep(POLL_SECONDS)
    seconds = time.monotonic() - begin
    if process.wait(WAIT_SECONDS) != 0:
        raise RuntimeError(f"harvest run ended with status {process.returncode}")
    return seconds


def harvest(*arguments: str) -> subprocess.Popen[bytes]:
    """A process of its own, quiet; one thread, so that every life computes with the same number."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-m", "harvest", *arguments], env=environment, stdout=subprocess.DEVNULL)


def tiny_job(folder: Path, *, documents: int, shard_documents: int = 8, seed: int = 5) -> Path:
    """A job over a random model of three layers and short texts, empty and null ones among them; its path."""
    import tiny

    tiny.tiny_llama(vocab=300).save_pretrained(folder / "model")
    tiny.byte_tokenizer().save_pretrained(folder / "model")
    dice = random.Random(seed)
    rows = [{"text": "".join(dice.choices("abc defgh", k=dice.choice([0, 1, 7, 30, 90])))} for _ in range(documents)]
    rows[documents // 3]["text"] = None  # type: ignore[typeddict-item]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = folder / "job.toml"
    job.write_text(
        f'[model]\nname = "{folder}/model"\n'
        f'[data]\npath = "{folder}/texts.jsonl"\non_bad = "skip"\n'
        '[tokens]\ncontext = 32\n[capture]\nsites = ["residual", "mlp.1"]\n'
        f"[store]\nshard_documents = {shard_documents}\n"
        f'[run]\npath = "{folder}/run"\nthreads = 1\n'
    )
    return job


if __name__ == "__main__":
    sys.exit(main())
