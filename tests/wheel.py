"""The distributions of this checkout, and an environment that has the wheel and its requirements but no checkout."""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BESIDE = shutil.ignore_patterns(
    ".git", ".venv", ".peers", ".*cache", ".hypothesis", "*.egg-info", "build", "dist", "runs"
)
"""What tools leave at the top of a checkout."""


def build(folder: Path) -> tuple[Path, Path]:
    """(source distribution, wheel made from it), as `python -m build` makes them; the checkout is left as it is."""
    copy = folder / "checkout"

    def left_out(where: str, names: list[str]) -> set[str]:
        return {"__pycache__"} | (BESIDE(where, names) if Path(where) == ROOT else set())

    shutil.copytree(ROOT, copy, ignore=left_out)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (source,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return source, wheel


def install(wheel: Path, folder: Path) -> Path:
    """The `bin` of a new environment with the wheel; of this environment it sees what the wheel requires.

    The `.pth` files of a folder that a `.pth` file names are not read: this checkout, installed by one, is not seen.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "requirements.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    return python.parent
