"""Benchmarks: what a line of the table says, that no row loses another, and that peers do the same work. No speeds."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchwork import tiny_work
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "jobs"))

import bench  # noqa: E402
import bench_gpu  # noqa: E402
import bench_peers  # noqa: E402
import measuring  # noqa: E402
import peer  # noqa: E402
from measuring import Found, Line, NotHereError, Row  # noqa: E402

GOALS = {
    "one name (residual.15), float32 / limit": 0.97,
    "residual at all 30 layers, bfloat16 / trunk": 0.92,
    "residual, attn, mlp at all layers, bfloat16 / trunk": 0.85,
    "4 names of block 15, stored, one run / SAELens' four runs": 3.5,
    "real reviews cut at 512, isolated, stored / padded in dataset order": 2,
    "moments and a direction, 30 layers, float32 / the same run without": 1.03,
    "moments and a direction, 30 layers, bfloat16 / the same run without": 1.06,
    "writing, durable / one plain file": 0.8,
    "shuffled reading / numpy memmap gather": 1,
    "shuffled reading / SAELens' cached reader": 2,
    "two Ray workers of one thread / two bare processes": 0.95,
    "scheduler and ledger, commits": 500,
    "peak memory, dataset 20 times as large / once": 1.05,
    "harvest --help": 0.5,
    "a wrong setting": 3,
    "CUDA, 1B Llama, bfloat16, residual at 3 layers stored / limit": 0.95,
}
"""What was set before anything was measured."""


def asked(*words: str) -> argparse.Namespace:
    return measuring.read(measuring.parser(None), words)


def cells(line: object) -> list[str]:
    return [cell.strip() for cell in str(line).strip("|").split("|")]


# ---- a line ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.001, 900), min_size=1, max_size=9), st.floats(0.1, 10), st.booleans())
def test_a_line_tells_median_spread_and_whether_the_goal_is_kept(
    figures: list[float], goal: float, at_most: bool
) -> None:
    line = Line(what="x", goal=goal, at_most=at_most, figures=figures)
    told = cells(line)
    median = float(np.median(figures))
    assert [float(cell) for cell in told[1:4]] == pytest.approx([median, min(figures), max(figures)], abs=5.1e-4)
    assert told[4] == str(len(figures))
    assert told[6] == ("yes" if (median <= goal if at_most else median >= goal) else "no")


def test_ratios_say_how_many_times_as_fast_the_second_is_and_the_warm_up_is_in_none() -> None:
    first, second = iter([90.0, 3.0, 8.0]), iter([1.0, 1.0, 2.0])
    assert measuring.ratios(measuring.in_turn(lambda: next(first), lambda: next(second), 2)) == [3.0, 4.0]


def test_a_row_that_cannot_be_measured_says_why_and_a_failed_one_how() -> None:
    def missing() -> Found:
        raise NotHereError("no such device")

    def broken() -> Found:
        raise ValueError("first\nlast | word")

    assert cells(measuring.measured(Row(what="a", goal=1, measure=missing)))[1:] == [
        *("not measured", "", "", "", ">= 1", "", "no such device")
    ]
    line = measuring.measured(Row(what="a", goal=None, measure=broken))
    assert line.failed
    assert cells(line)[1:] == ["failed", "", "", "", "", "", "ValueError: last / word"]


def test_results_keep_what_a_hand_wrote_and_other_rows_and_replace_their_own(tmp_path: Path) -> None:
    old = [Line(what=name, goal=1, figures=[2.0]) for name in ("one", "one more", "two")]
    path = measuring.write(tmp_path, "speed", "Title", asked("--threads", "1"), old)
    path.write_text(path.read_text() + "\nWhy it is so: a finding.\n")
    new = [Line(what="one", goal=1, figures=[0.5]), Line(what="three", goal=None, remark="why", figures=[7.0])]
    assert measuring.write(tmp_path, "speed", "Title", asked("--threads", "1", "--quick"), new) == path
    text = path.read_text()
    table = [cells(line) for line in text.splitlines() if line.startswith("| ")][1:]
    assert [(row[0], row[1], row[6]) for row in table] == [
        *(("one", "0.500", "no"), ("one more", "2.000", "yes"), ("two", "2.000", "yes"), ("three", "7.000", ""))
    ]
    assert "quick" in table[0][7]
    assert table[3][7].startswith("why; ")
    assert "Why it is so: a finding." in text
    assert f"torch {torch.__version__}" in text


# ---- the whole table -------------------------------------------------------------------------------------------------


def test_every_goal_has_a_row_and_no_two_rows_one_name() -> None:
    rows = [row for name in bench.SCRIPTS for row in bench.declared(name, asked("--threads", "1"))]
    assert len({row.what for row in rows}) == len(rows)
    goals = {row.what: row.goal for row in rows}
    assert {what: goals[what] for what in GOALS} == GOALS
    ceilings = {row.what for row in rows if row.at_most}
    assert {"harvest --help", "a wrong setting", "peak memory, dataset 20 times as large / once"} <= ceilings


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of three benchmarks: the second dies in its second row, the third cannot be imported."""
    for name, third in (("whole", "8.0"), ("dying", "os._exit(3)")):
        (tmp_path / f"bench_{name}.py").write_text(
            textwrap.dedent(f"""
            import os, sys
            sys.path.insert(0, {str(ROOT / "jobs")!r})
            from pathlib import Path
            from measuring import Found, Row, main
            def measure(name, value):
                Path({str(tmp_path)!r}, name).touch()
                print("a library's own words")
                return Found(figures=[value()])
            def rows(asked):
                for n, value in enumerate((lambda: 2.0 * asked.pairs, lambda: {third}, lambda: 9.0)):
                    what = f"{name} {{n}}"
                    yield Row(what=what, goal=1, measure=lambda what=what, value=value: measure(what, value))
            if __name__ == "__main__":
                main(__doc__, rows)
            """)
        )
    (tmp_path / "bench_absent.py").write_text("import a_library_that_is_not_here\n")
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "bench.py"))
    monkeypatch.setattr(bench, "SCRIPTS", ["dying", "absent", "whole"])
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("dying", "absent", "whole"):
        sys.modules.pop(f"bench_{name}", None)


def test_a_script_that_dies_or_cannot_start_loses_no_other_row(scripts: Path) -> None:
    lines = list(bench.table(bench.SCRIPTS, asked("--pairs", "3", "--threads", "1")))
    assert [(line.what, list(line.figures), line.failed) for line in lines] == [
        ("dying 0", [6.0], False),
        ("dying 1", [], True),
        ("dying 2", [], True),
        ("bench_absent.py", [], True),
        ("whole 0", [6.0], False),
        ("whole 1", [8.0], False),
        ("whole 2", [9.0], False),
    ]
    assert "bench_dying.py ended with status 3" in lines[1].remark
    assert "a_library_that_is_not_here" in lines[3].remark


def test_only_measures_the_rows_whose_name_contains_the_text(
    scripts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.signal, "signal", lambda *_: None)
    words = ["dying", "whole", "--only", "whole 1", "--out", str(scripts), "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    bench.main()
    assert sorted(path.name for path in scripts.iterdir() if path.name[:5] in ("whole", "dying")) == ["whole 1"]
    printed = [line for line in capfd.readouterr().out.splitlines() if line.startswith("| ")]
    assert [cells(line)[:2] for line in printed] == [["what", "median"], ["whole 1", "8.000"]]
    (path,) = scripts.glob("bench_*_2*.md")
    assert "| whole 1 | 8.000 |" in path.read_text()
    for words, status in ((["whole", "--only", "nothing"], "'nothing'"), (["nobody"], "2")):
        monkeypatch.setattr(sys, "argv", ["bench", *words])
        with pytest.raises(SystemExit, match=status):
            bench.main()


# ---- peers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A peer's script that is here: sums to 10 the first time, to 11 the second, then ends with an error."""
    monkeypatch.setattr(peer, "SCRIPTS", tmp_path)
    (tmp_path / "fake.py").write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(ROOT / "jobs/peers")!r})
        from answering import answer
        print("a banner")
        turns = iter([(0.5, [10.0]), (0.25, [11.0])])
        def once():
            for turn in turns: return turn
            raise ValueError("out of turns")
        answer(once)
        """)
    )
    return tmp_path


def test_a_peer_works_when_told_is_checked_and_its_last_word_is_told(fake: Path) -> None:
    with peer.Peer(sys.executable, "fake.py", [], [10.0]) as process:
        assert process.seconds() == 0.5
        with pytest.raises(RuntimeError, match=r"something else: absolute values sum to 11\.0, not 10\.0"):
            process.seconds()
        with pytest.raises(RuntimeError, match=r"fake\.py ended: ValueError: out of turns"):
            process.seconds()


def test_a_peer_without_its_environment_says_how_to_make_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "ENVIRONMENTS", tmp_path)
    with pytest.raises(NotHereError, match=r"make \.peers/nnsight/installed"):
        peer.python("nnsight")


def test_hidden_states_of_a_middle_block_are_what_is_harvested_and_the_last_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with bench_peers.started(tiny_work(monkeypatch, 1), "", "hidden_states.py", ["residual"]) as process:
        assert process.seconds() > 0
    with (
        bench_peers.started(tiny_work(monkeypatch, 2), "", "hidden_states.py", ["residual"]) as process,
        pytest.raises(RuntimeError, match="something else"),  # they are normed
    ):
        process.seconds()


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def gpu(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "jobs/bench_gpu.py"), "--pairs", "1", "--threads", "1", "--json", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd="/")


BARE = """
import importlib.metadata, re, runpy, sys
from importlib.machinery import PathFinder

def needs(name, into):
    key = re.sub("[-_.]+", "-", name).lower()
    if key not in into:
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            return
        into.add(key)
        for line in lines:
            if "extra ==" not in line:
                needs(re.match("[A-Za-z0-9._-]+", line)[0], into)

there = set()
for name in ["torch", "transformers"]:
    needs(name, there)
there |= set(sys.argv.pop(1).split())
packages = importlib.metadata.packages_distributions()

class Bare(PathFinder):
    @classmethod
    def find_spec(cls, module, path=None, target=None):
        homes = {re.sub("[-_.]+", "-", home).lower() for home in packages.get(module, ())}
        return None if homes and not homes & {*there, "harvest"} else PathFinder.find_spec(module, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
sys.argv.pop(0)
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script as if nothing were installed but torch, transformers, what they need, and the packages named first."""


def carried() -> str:
    """What `make .peers/wheels/installed` fetches."""
    recipe = (ROOT / "Makefile").read_text().split("--dest .peers/wheels", 1)[1].split("\ttouch", 1)[0]
    return recipe.replace("\\\n", " ").replace("_", "-")


def test_the_gpu_benchmark_runs_tiny_with_nothing_but_torch_transformers_and_what_is_carried() -> None:
    script = str(ROOT / "jobs/bench_gpu.py")
    options = ["--pairs", "1", "--threads", "1", "--json", "--device", "cpu", "--tiny", "--only", "stored / limit"]
    command = [sys.executable, "-c", BARE, carried(), script, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [json.loads(line)["failed"] for line in done.stdout.splitlines()] == [False]


def test_the_gpu_benchmark_runs_tiny_on_a_cpu() -> None:
    done = gpu("--device", "cpu", "--tiny")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(line["figures"]) for line in lines] == [1, 1]
    assert all(line["figures"][0] > 0 for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_benchmark_says_in_one_line_that_there_is_no_gpu() -> None:
    done = gpu("--only", "stored / limit")
    assert done.returncode == 1
    assert [json.loads(line)["remark"] for line in done.stdout.splitlines()] == ["no CUDA device on this machine"]
    assert done.stderr == ""


def test_a_bare_machine_takes_what_it_lacks_from_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_for_a_test/__init__.py", "answer = 42\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    unpacked: list[Any] = []
    monkeypatch.setattr(bench_gpu.atexit, "register", lambda *call, **options: unpacked.append(call[1]))
    bench_gpu.carry(tmp_path)
    import carried_for_a_test  # type: ignore[import-not-found]

    assert carried_for_a_test.answer == 42
    assert Path(carried_for_a_test.__file__).is_relative_to(unpacked[0])
    bench_gpu.shutil.rmtree(unpacked[0])
