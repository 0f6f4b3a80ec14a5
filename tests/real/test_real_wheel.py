"""The demo, run by the wheel where there is no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from plainrun import first_difference, read_plain
from realdata import REAL, REVIEWS, ROOT
from wheel import build, install

pytestmark = REAL


def test_the_wheel_runs_the_demo_without_a_checkout_and_its_bits_are_those_of_the_checkout(
    run: Any, tmp_path: Path
) -> None:
    programs = install(build(tmp_path)[1], tmp_path / "env")
    work = tmp_path / "work"
    work.mkdir()
    shutil.copy(ROOT / "jobs/demo.toml", work)
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for command in (["run", "demo.toml", "--set", f"data.sample={REVIEWS / 33_530}"], ["verify", "runs/demo"]):
        done = subprocess.run(
            [programs / "harvest", *command], cwd=work, env=outside, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert first_difference(read_plain(run.path), read_plain(work / "runs/demo")) is None
    assert "</html>" in (work / "runs/demo/report.html").read_text(encoding="utf-8")
