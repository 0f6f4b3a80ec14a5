"""The reference says everything that there is and nothing else: held against `--help`, the schema, the package, a run.

The pages are read as Markdown tables and headings, by a few lines of our own.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from realdata import ROOT
from safetensors import safe_open
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.__main__ import app
from harvest.config import Job, load_job
from harvest.model.architectures import ARCHITECTURES, WRAPPERS
from harvest.reading.reader import Run
from harvest.reading.several import Runs

sys.path.insert(0, str(ROOT / "docs"))

import reference
from writers import job_file, python, run_folder

NEAR = ("residual", "residual_pre", "residual_mid", "attn", "mlp", "attn_contribution", "mlp_contribution")
SITES = (*NEAR, "attn_input", "mlp_input", "attn_heads", "mlp_neurons", "router", "embedding", "final_norm")


def sections(page: str) -> dict[str, str]:
    """Heading, without signs of code -> what stands below it, up to the next one."""
    parts = re.split(r"^#{1,4} (.+)$", reference.PAGES[page](), flags=re.MULTILINE)
    return {title.strip("`"): text for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def rows(text: str) -> list[list[str]]:
    """Cells of all lines of tables, without their heads."""
    lines = re.findall(r"^\| (.*) \|$", text, flags=re.MULTILINE)
    heads = {at for at, line in enumerate(lines) if set(line) <= set("-| ")}
    return [re.split(r" \| ", line) for at, line in enumerate(lines) if at not in heads and at + 1 not in heads]


def first(text: str) -> list[str]:
    """The first words of the first cells: what each line is about."""
    return [line[0].strip("`").split()[0] for line in rows(text)]


def test_every_command_and_option_that_help_lists_is_there_and_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def help_of(*command: str) -> str:
        app([*command, "--help"], standalone_mode=False)
        return capsys.readouterr().out

    monkeypatch.setenv("COLUMNS", "200")
    found = sections("commands")
    listed = re.findall(r"^[│| ] (\w+) {2,}", help_of().partition("Commands")[2], flags=re.MULTILINE)
    assert listed == [title for title in found if title not in ("Commands", "Exit status")]
    for command in listed:
        told, shown = help_of(command), first(found[command])
        options = set(re.findall(r"^[│| ]+\*? *(--[\w-]+)", told, flags=re.MULTILINE)) - {"--help"}
        assert options == {one for one in shown if one.startswith("--")}, command
        arguments = re.findall(rf"Usage: .* {command} \[OPTIONS\] (.+?) *$", told, flags=re.MULTILINE)
        assert re.findall(r"\w+", arguments[0]) == [one for one in shown if not one.startswith("--")], command
        assert all(cells[-1].strip() for cells in rows(found[command])), command


def test_every_exit_status_is_there() -> None:
    assert first(sections("commands")["Exit status"]) == ["0", "1", "2", "130"]


def test_every_setting_of_the_schema_is_there_with_its_default_and_a_meaning() -> None:
    schema = json.loads((ROOT / "schemas/job.schema.json").read_text())
    found = sections("job_file")
    assert [title.strip("[]") for title in found][1:] == list(Job.model_fields)
    assert set(Job.model_fields) == set(schema["properties"])
    for name, about in schema["properties"].items():
        kind = re.search(r"#/\$defs/(\w+)", json.dumps(about))
        if kind is None:
            continue
        settings = schema["$defs"][kind[1]]["properties"]
        head = "[[directions]]" if name == "directions" else f"[{name}]"
        assert sorted(first(found[head])) == sorted(settings)
        for setting, default, allowed, meaning in rows(found[head]):
            told = settings[setting.strip("`")]
            assert meaning.strip(), setting
            assert allowed.strip(), setting
            assert ("default" in told) == (default != "required"), setting
            assert told["description"].strip()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.limit", "a whole number of at least 1"),
        ("data.sample", "a number above 0 and at most 1"),
        ("store.dtype", "'auto', 'float32', 'float16', 'bfloat16' and 'int8'"),
        ("directions.pair", "'order' and 'column:NAME'"),
        ("run.overwrite", "true and false"),
    ],
)
def test_what_is_allowed_is_what_a_wrong_value_is_told(setting: str, words: str) -> None:
    assert job_file.allowed(*setting.split(".")) == words


@pytest.mark.parametrize("name", list(Job.model_fields))
def test_the_example_of_every_table_is_a_job_that_uses_it(name: str) -> None:
    job = load_job(job_file.example(name))
    assert name in job.model_fields_set


def test_every_site_has_a_line_and_every_family_its_places() -> None:
    found = sections("sites")
    assert first(found["Sites by architecture"])[: len(SITES)] == list(SITES)
    families = [family for title in found if "," in title or title in ARCHITECTURES for family in title.split(", ")]
    assert sorted(families) == sorted(ARCHITECTURES)
    assert all(f"`{wrapper}`" in found["What they do not have"] for wrapper in WRAPPERS)
    llama = dict(cells[:2] for cells in rows(next(text for title, text in found.items() if title.startswith("llama"))))
    assert llama["`attn_heads`"] == "input of `self_attn.o_proj`"
    assert llama["`residual`"] == "output of `layers.L`"
    assert "`router`" not in llama
    assert first(found["mamba"]) == ["residual", "residual_pre", "embedding", "final_norm"]
    neox = {cells[0]: cells[-1].strip() for cells in rows(found["gpt_neox"])}
    assert neox["`residual_mid`"] == "unless `use_parallel_residual`"
    assert neox["`attn`"] == ""


# ---- the run folder ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one of everything."""
    path = tmp_path_factory.mktemp("reference") / "run"
    job = {
        "data": {"contrast": ["yes", "no"], "keep": ["topic"]},
        "capture": {"layers": [1], "pool": ["mean"]},
        "store": {"dtype": "int8"},
        "statistics": {"covariance": True},
        "directions": [{"name": "sentiment", "weight": "logit_diff", "modes": ["mean_difference", "leace"]}],
        "answers": {"yes": "x", "no": "y"},
        "run": {"path": str(path), "threads": 1},
    }
    texts = [{"yes": f"good {i}", "no": f"bad {i}", "topic": i} for i in range(12)]
    harvest.run(job, model=tiny_llama(vocab=300), tokenizer=byte_tokenizer(), data=texts)
    return path


def test_every_file_of_a_run_is_there_and_every_one_told_of_occurs(folder: Path) -> None:
    def general(path: str) -> str:
        path = re.sub(r"f\d{5}-s\d{6}(\.[0-9a-f]{8}-\d+)?", "SHARD", path)
        return re.sub(r"residual\.\d+", "NAME", path)

    told = {general(path) for path in run_folder.FILES}
    assert first(sections("run_folder")["Run folder"]) == list(run_folder.FILES)
    there = {general(str(path.relative_to(folder))) for path in folder.rglob("[!.]*") if path.is_file()}
    assert told <= there
    assert {path for path in there - told if not path.endswith("zarr.json")} == set()


def test_every_column_of_a_real_table_is_there(folder: Path) -> None:
    found = sections("run_folder")
    (attempt,) = (folder / "shards").iterdir()
    tables = {
        "tokens.parquet": pq.read_schema(attempt / "tokens.parquet"),
        "documents.parquet": pq.read_schema(attempt / "documents.parquet"),
        "examples-NAME.arrow": pa.ipc.open_file(str(attempt / "examples-sentiment.arrow")).schema,
        "statistics.parquet": pq.read_schema(folder / "statistics.parquet"),
    }
    for title, schema in tables.items():
        own = [name for name in schema.names if name != "topic" and not name.startswith("state.")]
        assert set(first(found[title])) - {"span"} == set(own), title  # a contrast has no spans
        for cells in rows(found[title]):
            name, kind = cells[0].strip("`"), cells[1]
            if name in own and "list" not in kind:
                real = schema.field(name).type
                assert ("string" if pa.types.is_dictionary(real) else str(real)) == re.findall("`(.+?)`", kind)[0], name


def test_every_field_of_a_real_record_is_there(folder: Path) -> None:
    found = sections("run_folder")
    (ledger,) = (folder / "ledger").iterdir()
    for title, path in [("run.json", folder / "run.json"), ("ledger", ledger), ("coordinator.json", None)]:
        record = json.loads((path or folder / title).read_text())
        assert set(record) - {"crc32c"} <= set(first(found[title])), title
        assert ("crc32c" in record) == ("crc32c`, a checksum" in found[title]), title
        inner = record["plan"]["resolved"] if title == "run.json" else record.get("shard", {})
        assert set(inner) <= set(first(found[title])), title
    for title, path in [("complete.json", "complete.json"), ("directions/NAME.json", "directions/sentiment.json")]:
        assert set(first(found[title])) == set(json.loads((folder / path).read_text())), title


def test_every_key_of_real_sums_and_vectors_is_told_of(folder: Path) -> None:
    found = sections("run_folder")
    (attempt,) = (folder / "shards").iterdir()
    for title, path in [
        ("directions/NAME.safetensors", folder / "directions/sentiment.safetensors"),
        ("states.safetensors", attempt / "states.safetensors"),
    ]:
        with safe_open(path, "np") as file:
            kinds = {key.rpartition("/")[2].removeprefix("ordinary.").removeprefix("special.") for key in file.keys()}  # noqa: SIM118
        pairs = {"keys", "ends", "waiting", "rows"}  # "those that wait for their partner"
        assert {kind for kind in kinds - pairs if f"`{kind}`" not in found[title]} == set(), title


# ---- Python --------------------------------------------------------------------------------------------------------


def members(kind: type) -> set[str]:
    """Public methods and properties that a class itself has, and what it annotates."""
    own = {name for name, value in vars(kind).items() if inspect.isfunction(value) or isinstance(value, property)}
    own |= {name for name, value in vars(kind).items() if type(value).__name__ == "cached_property"}
    return {name for name in own | set(vars(kind).get("__annotations__", ())) if not name.startswith("_")}


def test_every_public_name_has_a_heading_and_what_it_has_stands_below() -> None:
    found = sections("python")
    titles = [title.removeprefix("harvest.") for title in found if title.startswith("harvest.")]
    assert titles == [name for name in harvest.__all__ if name != "__version__"]
    for name in titles:
        value, text = getattr(harvest, name), found[f"harvest.{name}"]
        if inspect.isclass(value):
            lacking = {one for one in members(value) if f"`{one}`" not in text and f"\n{one}(" not in text}
            inside = python.INSIDE.get(harvest._HOME[name].removeprefix("harvest.").replace(":", "."), ())
            assert lacking - {"kind", "columns", *inside} == set(), name
        else:
            signature = text.partition("```python")[2].partition("```")[0]
            assert set(inspect.signature(value).parameters) <= set(re.findall(r"\w+", signature)), name


@pytest.mark.parametrize("path", python.RETURNED)
def test_what_is_returned_shows_what_it_has(path: str) -> None:
    module, _, name = path.rpartition(".")
    kind = getattr(__import__(f"harvest.{module}", fromlist=[name]), name)
    text = sections("python")[name]
    inside = set(python.INSIDE.get(path, ()))
    lacking = {one for one in members(kind) - inside if f"`{one}`" not in text and f"\n{one}(" not in text}
    assert lacking == set()


def test_the_attributes_of_runs_that_the_readme_uses_are_told_of() -> None:
    found = sections("python")
    for kind, heading in ((Run, "harvest.Run"), (Runs, "Runs")):
        below = found[heading] + found["RowSet"]
        for name in ("names", "complete", "documents", "statistics", "features", "batches", "find", "context"):
            assert f"`{name}`" in below or f"\n{name}(" in below, (kind, name)


def test_every_signature_is_python_and_every_docstring_keeps_its_code() -> None:
    page = reference.PAGES["python"]()
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        ast.parse(f"def {block.strip().replace('harvest.', '')}: ...")
    prose = re.sub(r"```.*?```|`[^`\n]+`", "", page, flags=re.DOTALL)
    assert re.findall(r"[{}<]", prose) == []


def test_the_pages_can_be_written_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["reference.py", str(tmp_path / "pages")])
    reference.main()
    assert {path.stem for path in (tmp_path / "pages").iterdir()} == set(reference.PAGES)
