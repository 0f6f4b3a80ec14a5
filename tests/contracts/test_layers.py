"""The shape of the package: imports point one way, heavy libraries have one home, importing harvest stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "harvest"
LEVELS = {
    "errors": 0,
    "records": 0,
    "settings": 1,
    "config": 2,
    "overlap": 2,
    "interrupt": 2,
    "glance": 2,
    "stages": 2,
    "source": 3,
    "text": 3,
    "model": 3,
    "reduce": 3,
    "store": 3,
    "environment": 3,
    "buffers": 3,
    "planning": 4,
    "plan": 4,
    "shardwork": 4,
    "shardarrays": 4,
    "selfcheck": 4,
    "states": 4,
    "concepts": 4,
    "reading": 4,
    "results": 4,
    "outcome": 4,
    "pipeline": 4,
    "runtime": 5,
    "export": 5,
    "report": 5,
    "checking": 6,
    "show": 6,
    "schemas": 6,
    "options": 6,
    "__main__": 7,
}
HOMES = {
    "ray": ["runtime/cluster.py"],
    "datasets": ["source/hub.py"],
    "zarr": ["store/bfloat16.py"],
    "transformers": ["model/load.py", "model/quantization.py"],
    "peft": ["model/adapter.py"],
    "gguf": ["model/gguffile.py", "export/directions.py"],
    "huggingface_hub": ["model/checkpoint.py", "source/"],
    "pyarrow": [
        "source/",
        "store/tables.py",
        "store/examples.py",
        "store/chunks.py",
        "reading/rowset.py",
        "reading/reader.py",
        "reading/several.py",
        "reading/joined.py",
        "reading/features.py",
        "reading/tokens.py",
        "reading/batches.py",
        "checking/runcheck.py",
        "export/",
        "report/health.py",
    ],
    "google_crc32c": ["store/", "checking/shardcheck.py", "export/folder.py"],
    "typer": ["options.py", "__main__.py"],
    "rich": ["runtime/terminal.py"],
    "fsspec": ["store/", "source/"],
    "safetensors": ["reduce/base.py", "reduce/saved.py", "model/cache.py", "model/adapter.py"],
    "matplotlib": ["report/charts.py"],
    "jinja2": ["report/page.py"],
    "markupsafe": ["report/page.py"],
    "sklearn": ["reduce/logistic.py"],
}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part_of(module: str) -> str | None:
    """`harvest.store.files.Files` -> `store`; None for what is not a part of the package."""
    head, _, rest = module.partition(".")
    part = rest.partition(".")[0]
    return part if head == "harvest" and part in LEVELS else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_to_lower_levels_and_siblings_below_the_product_never_meet(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for module in imports(path):
        part = part_of(module)
        if part is None or part == own:
            continue
        assert LEVELS[part] <= LEVELS[own], f"{own} (level {LEVELS[own]}) imports {module} (level {LEVELS[part]})"
        if LEVELS[own] <= 3:
            assert LEVELS[part] < LEVELS[own], f"{own} imports its sibling {module}"


def test_no_module_reaches_itself_through_its_imports() -> None:
    names = {".".join(("harvest", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in FILES}
    graph = {}
    for name, path in names.items():
        found = imports(path)
        graph[name] = {
            other for other in names if other != name and any(f == other or f.startswith(other + ".") for f in found)
        }
    for name in graph:
        seen, todo = set(), [name]
        while todo:
            for other in graph[todo.pop()]:
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        assert name not in seen, f"{name} imports itself in a circle"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_heavy_library_has_one_home(path: Path) -> None:
    here = path.relative_to(PACKAGE).as_posix()
    for module in imports(path):
        homes = HOMES.get(module.partition(".")[0])
        assert homes is None or any(here.startswith(home) for home in homes), (
            f"{here} imports {module}; its home is {homes}"
        )


def test_init_files_of_the_folders_hold_a_docstring_and_nothing_else() -> None:
    for path in PACKAGE.glob("*/__init__.py"):
        body = ast.parse(path.read_text()).body
        assert [type(node) for node in body] == [ast.Expr], path


def test_every_module_says_what_it_promises() -> None:
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text())), path


@pytest.mark.parametrize("code", ["import harvest", "import harvest.config", "from harvest.__main__ import app"])
def test_importing_harvest_loads_neither_torch_nor_ray(code: str) -> None:
    heavy = ["torch", "ray", "transformers", "datasets", "zarr", "pyarrow", "pandas", "matplotlib", "jinja2"]
    probe = f"import sys; {code}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
