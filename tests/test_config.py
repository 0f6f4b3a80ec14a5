"""The job file: everything has a default, nothing unknown passes, and each mistake is one line that helps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from harvest.config import Job, load_job, resolve_package
from harvest.errors import RequestError

LEAST = {"model": {"name": "m"}, "data": {"path": "d"}, "run": {"path": "r"}}


def job(*overrides: str) -> Job:
    return load_job(LEAST, overrides)


@pytest.mark.parametrize("missing", ["model.name", "data.path", "run.path"])
def test_every_setting_but_three_has_a_default(missing: str) -> None:
    table, key = missing.split(".")
    settings = {name: dict(values) for name, values in LEAST.items()}
    assert load_job(settings).capture.sites == ("residual",)
    del settings[table][key]
    with pytest.raises(RequestError, match=rf"^{missing}: missing; it has no default$"):
        load_job(settings)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("tokens.context=0", "tokens.context = 0: allowed are 'auto' or a whole number of at least 1"),
        ("tokens.context=many", "tokens.context = 'many': allowed are 'auto' or a whole number of at least 1"),
        ("tokens.batch=-1", "tokens.batch = -1: allowed are 'auto' or a whole number of at least 1"),
        (
            "store.dtype=float64",
            "store.dtype = 'float64': allowed are 'auto', 'float32', 'float16', 'bfloat16' and 'int8'",
        ),
        (
            "capture.layers=99",
            "capture.layers = 99: allowed are 'all' or a list of whole numbers, negative from the end",
        ),
        (
            "capture.layers=[]",
            "capture.layers = []: allowed are 'all' or a list of whole numbers, negative from the end",
        ),
        (
            "capture.layers=[true]",
            "capture.layers = [true]: allowed are 'all' or a list of whole numbers, negative from the end",
        ),
        (
            "capture.sites=residual",
            "capture.sites = 'residual': allowed is a list of texts, at least one, such as ['residual']",
        ),
        ("capture.sites=[3]", "capture.sites.0 = 3: allowed is text"),
        ("capture.pool=mean", "capture.pool = 'mean': allowed is a list of 'mean', 'last' and 'max', at least one"),
        ("capture.pool=['median']", "capture.pool.0 = 'median': allowed are 'mean', 'last' and 'max'"),
        ("capture.exclude=[0.5]", "capture.exclude = [0.5]: allowed is a list of 'bos', 'special' and token ids"),
        ("run.workers=0", "run.workers = 0: allowed are 'auto' or a whole number of at least 1"),
        ("data.limit=0", "data.limit = 0: allowed is a whole number of at least 1"),
        ("data.sample=1.5", "data.sample = 1.5: allowed is a number above 0 and at most 1"),
        ("data.sample=half", "data.sample = 'half': allowed is a number above 0 and at most 1"),
        ("data.contrast=['a']", "data.contrast = ['a']: allowed is a list of two texts"),
        ("data.files=3", "data.files = 3: allowed are text, a list of texts and a table"),
        ("model=3", "model = 3: allowed is a table of name, revision, dtype"),
        ("chat.generation_prompt=maybe", "chat.generation_prompt = 'maybe': allowed are true, false and 'auto'"),
        ("chat.kwargs=3", "chat.kwargs = 3: allowed is a table"),
        ("run.resources={a='x'}", "run.resources.a = 'x': allowed is a number"),
        ("answers={a=1}", "answers.a = 1: allowed is text"),
        ("run.path=", "run.path = '': allowed is text, not empty"),
        ("directions=3", "directions = 3: allowed is a list of tables"),
        ("directions=[3]", "directions.0 = 3: allowed is a table"),
        ("directions=[{}]", "directions.0.name: missing; it has no default"),
        (
            "directions=[{name='a b'}]",
            "directions.0.name = 'a b': allowed is text of letters, digits, '_', '.' and '-'",
        ),
        ("data.on_bad=ignore", "data.on_bad = 'ignore': allowed are 'fail' and 'skip'"),
        ("run.overwrite=1", "run.overwrite = 1: allowed are true and false"),
        ("data.lim=5", "data.lim: unknown setting; did you mean limit? known here: path, name, files"),
        ("data.context=5", "data.context: unknown setting; did you mean tokens.context? known here: path, name"),
        ("layers=[1]", "layers: unknown setting; did you mean capture.layers? known here: model, data"),
        ("data.path.x=3", "--set data.path.x=3: data.path is no table, so nothing is inside it"),
        ("modle.name=x", "[modle]: unknown table; did you mean [model]? known here: model, data, run"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_is_allowed(override: str, line: str) -> None:
    with pytest.raises(RequestError) as caught:
        job(override)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("positions", ["middle", 3, [], ["a"], {"x": 1}, {}, {"every": 2, "sample": 0.5}])
def test_wrong_positions_are_told_the_right_ones(positions: Any) -> None:
    with pytest.raises(RequestError, match=r"capture\.positions.*'all', 'last', 'first', a list of whole numbers"):
        load_job({**LEAST, "capture": {"positions": positions}})


@pytest.mark.parametrize(
    ("positions", "line"),
    [
        ({"every": 0}, "every = 0: allowed is a whole number of at least 1 and below 2**31"),
        ({"every": 1.5}, "every = 1.5: allowed is a whole number"),
        ({"sample": 0}, "sample = 0: allowed is a number above 0 and at most 1"),
        ({"sample": 2}, "sample = 2: allowed is a number above 0 and at most 1"),
        ({"span": "answer"}, "span = 'answer': allowed is a list of names of spans, such as ['answer']"),
    ],
)
def test_positions_of_a_kind_are_told_what_is_wrong_with_their_number(positions: dict[str, Any], line: str) -> None:
    with pytest.raises(RequestError, match="^" + re.escape(f"capture.positions.{line}")):
        load_job({**LEAST, "capture": {"positions": positions}})


GROUPS: dict[str, Any] = {"name": "a", "column": "l", "positive": ["1"], "negative": ["0"]}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"read": {"span": "x", "pool": "min"}}, "read.pool = 'min': allowed are 'mean', 'last' and 'max'"),
        ({"read": {"span": ""}}, "read.span = '': allowed is the name of a span"),
        ({"read": {"at": 0, "on": 0}}, "read: {at = 0, on = 0}: at and on are one token; allowed are two"),
        ({"read": {"at": "x", "on": 0}}, "read.at = 'x': allowed are 'last', 'first' and whole numbers"),
        ({"read": {"spam": "x"}}, "read: {spam = 'x'}: allowed are 'last', 'first', 'mean', 'all'"),
        ({"positive": "1"}, "positive = '1': allowed is a list of values of the column, such as ['1']"),
        ({"negative": "others"}, "negative = 'others': allowed are 'rest' and a list of values of the column"),
        ({"positive": {"tokens": []}}, "positive.tokens = []: allowed is a list of texts of one token each"),
        ({"positive": {}}, "positive.tokens = none: allowed is a list of texts of one token each"),
        ({"positive": {"tokens": ["a"], "embedding": "in"}}, "positive.embedding = 'in': allowed are 'input' and"),
        ({"positive": {"token": ["a"]}}, "positive.token: unknown setting; a group of tokens has tokens and embedding"),
        ({"colum": "x"}, "colum: unknown setting; did you mean column? known here: name, column"),
        ({"modes": ["mean"]}, "modes.0 = 'mean': allowed are 'mean_difference', 'paired_rejection'"),
    ],
)
def test_a_wrong_setting_of_a_direction_is_named_down_to_its_part(given: dict[str, Any], line: str) -> None:
    with pytest.raises(RequestError, match="^" + re.escape(f"directions.0.{line}")) as caught:
        load_job({**LEAST, "directions": [{**GROUPS, **given}]})
    assert len(str(caught.value)) < 320


@pytest.mark.parametrize("positions", ["all", "last", "first", [0, -1], {"every": 4}, {"sample": 0.1}, {"span": ["a"]}])
def test_documented_positions_pass(positions: Any) -> None:
    found = load_job({**LEAST, "capture": {"positions": positions}}).capture.positions
    assert found == (tuple(positions) if isinstance(positions, list) else found)


def test_one_kind_of_input_is_read() -> None:
    assert (job().data.kind, job().data.columns) == ("text", ("text",))
    assert (job("data.ids=tokens").data.kind, job("data.ids=tokens").data.columns) == ("ids", ("tokens",))
    with pytest.raises(RequestError, match="data: give one of text, messages, ids and contrast, not text and messages"):
        job("data.text=a", "data.messages=b")


def test_overrides_parse_as_toml_else_as_text() -> None:
    settings = job(
        "data.limit=7", "data.text=some column", 'data.split="train[:5]"', "data.keep=['a', 'b']", "data.sample=1e-2"
    )
    assert settings.data.limit == 7
    assert settings.data.text == "some column"
    assert settings.data.split == "train[:5]"
    assert settings.data.keep == ("a", "b")
    assert settings.data.sample == 0.01


@pytest.mark.parametrize("override", ["data.limit", "=5", "data..x=1", ".=1"])
def test_an_override_without_key_or_value_is_refused(override: str) -> None:
    with pytest.raises(RequestError, match=r"allowed is key\.sub=value"):
        job(override)


@pytest.mark.parametrize("key", ["secret_key", "access_key_id", "token", "password", "AWS_SECRET"])
def test_secrets_are_refused_in_the_job_without_repeating_them(key: str) -> None:
    with pytest.raises(RequestError, match="secrets are read from the environment only") as caught:
        load_job({**LEAST, "run": {"path": "r", "storage": {key: "hunter2"}}})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("key", ["token", "use_auth_token", "client_secret", "password"])
def test_secrets_are_refused_among_the_model_options_without_repeating_them(key: str) -> None:
    with pytest.raises(RequestError, match="secrets are read from the environment only") as caught:
        load_job({**LEAST, "model": {"name": "m", "options": {key: "hunter2"}}})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("dtype", "dtype"),
        ("torch_dtype", "dtype"),
        ("config", "name"),
        ("revision", "revision"),
        ("trust_remote_code", "trust_remote_code"),
        ("device_map", "device_map"),
        ("quantization_config", "quantization"),
        ("load_in_8bit", "quantization"),
        ("adapter_kwargs", "adapter"),
    ],
)
def test_a_model_option_that_a_setting_decides_names_the_setting(key: str, setting: str) -> None:
    with pytest.raises(RequestError, match=rf"^model\.options\.{key}: decided by model\.{setting}; leave it out$"):
        load_job({**LEAST, "model": {"name": "m", "options": {key: "x"}}})


@pytest.mark.parametrize(
    "option",
    [
        "weights_only=false",
        "use_safetensors=false",
        "output_hidden_states=true",
        "use_cache=true",
        "ignore_mismatched_sizes=true",
        "tp_plan=auto",
    ],
)
def test_a_model_option_that_opens_pickles_or_changes_what_a_forward_gives_is_refused(option: str) -> None:
    with pytest.raises(RequestError, match=rf"^model\.options\.{option.partition('=')[0]}: not for a job"):
        job(f"model.options.{option}")


def test_a_replica_is_spread_by_one_setting_and_no_other() -> None:
    assert job("model.device_map=auto", 'model.options.max_memory={0="1GiB",cpu="2GiB"}').model.device_map == "auto"
    assert job('model.device_map={""="disk"}').model.device_map == {"": "disk"}
    for overrides, told in (
        (["model.device_map=everywhere"], r"^model\.device_map = 'everywhere': allowed are 'auto', "),
        (["model.device_map=3"], r"^model\.device_map = 3: "),
        (["model.device_map=auto", "model.device=cuda:1"], r"^model\.device = 'cuda:1': decided by model\.device_map"),
        (["model.options.max_memory={cpu=1}"], r"^model\.options\.max_memory: needs model\.device_map"),
    ):
        with pytest.raises(RequestError, match=told):
            job(*overrides)


@pytest.mark.parametrize(
    "override",
    [
        "store.memory_gb=inf",
        "store.memory_gb=nan",
        "data.sample=nan",
        "chat.kwargs.x=nan",
        "chat.kwargs.x=[{y = inf}]",
        "chat.kwargs.day=2024-01-01",
        "chat.kwargs.time=10:00:00",
        "model.options.x=-inf",
        "data.path=\udcff.jsonl",
    ],
)
def test_a_value_that_no_record_can_hold_is_refused_by_its_setting(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(RequestError, match=rf"^{re.escape(key)}[.\w]* = ") as caught:
        job(override)
    assert str(caught.value).isascii()
    assert "\n" not in str(caught.value)


HUGE = 10**30


@pytest.mark.parametrize(
    "settings",
    [
        {"data": {"path": "d", "limit": HUGE}},
        {"data": {"path": "d", "max_tokens": 2**63}},
        {"tokens": {"batch": HUGE}},
        {"tokens": {"context": HUGE}},
        {"store": {"shard_documents": 2**63}},
        {"store": {"memory_gb": HUGE}},
        {"run": {"path": "r", "threads": 2**31}},
        {"run": {"path": "r", "attempts": HUGE}},
        {"capture": {"positions": [0, HUGE]}},
        {"capture": {"positions": [-HUGE]}},
        {"capture": {"positions": {"every": HUGE}}},
    ],
)
def test_a_number_that_nothing_can_count_to_is_refused_by_its_setting(settings: dict[str, Any]) -> None:
    (table, values), *_ = settings.items()
    with pytest.raises(RequestError, match=rf"^{table}\.{list(values)[-1]}[.\w]* ?[=:]"):
        load_job({**LEAST, **settings})


@pytest.mark.parametrize("column", ["text", "messages", "ids"])
def test_a_column_has_a_name(column: str) -> None:
    with pytest.raises(RequestError, match=rf"^data\.{column} = ''"):
        job(f"data.{column}=")


def test_a_column_that_is_kept_twice_is_kept_once() -> None:
    assert job("data.keep=['a', 'b', 'a']").data.keep == ("a", "b")


def test_a_very_long_value_is_not_repeated_in_full() -> None:
    with pytest.raises(RequestError, match=r"^store\.dtype = 'x+\.\.\.: allowed are") as caught:
        job("store.dtype=" + "x" * 100_000)
    assert len(str(caught.value)) < 400


def test_a_job_nested_beyond_reason_is_refused(tmp_path: Path) -> None:
    nested = "[" * 100_000
    (tmp_path / "deep.toml").write_text(f"x = {nested}")
    with pytest.raises(RequestError, match=r"deep\.toml: not valid TOML: nested too deeply$"):
        load_job(tmp_path / "deep.toml")
    with pytest.raises(RequestError, match=r"^--set chat\.kwargs\.x: "):
        job(f"chat.kwargs.x={nested}")
    circle: dict[str, Any] = {}
    circle["chat"] = circle
    with pytest.raises(RequestError, match="a job holds text, numbers, lists and tables"):
        load_job(circle)


def test_a_job_file_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"job file .*none\.toml: no such file"):
        load_job(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(RequestError, match=r"bad\.toml: line 1, '\[model': not valid TOML"):
        load_job(tmp_path / "bad.toml")
    with pytest.raises(RequestError, match="job file"):
        load_job(tmp_path)


JOB = "[model]\nname = 'm'\n[data]\npath = 'd'\n[run]\npath = 'r'\n"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("[data]", "[dat]", "[dat]: unknown table; did you mean [data]? known here: model, data, run"),
        ("[run]", "[output]", "[output]: unknown table; known here: model, data, run"),
        (
            "'m'",
            "llama",
            "{file}: line 2, 'name = llama': not valid TOML: invalid value; text needs quotes: name = 'llama'",
        ),
        (
            "'m'",
            "org/m-7b # it",
            "{file}: line 2, 'name = org/m-7b # it': not valid TOML: invalid value; text needs quo",
        ),
        ("'d'", "3 files", "{file}: line 4, 'path = 3 files': not valid TOML"),
        ("'d'", "'d'\nlimit = 10,000", "{file}: line 5, 'limit = 10,000': not valid TOML"),
        ("'d'", "'d", '{file}: line 4, "path = \'d": not valid TOML: a quote is not closed'),
        ("'d'", "'d'\npath = 'e'", "{file}: line 5, \"path = 'e'\": not valid TOML: cannot overwrite a value"),
    ],
)
def test_a_fault_of_a_job_file_is_told_with_its_line_and_what_was_meant(
    tmp_path: Path, old: str, new: str, line: str
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace(old, new))
    with pytest.raises(RequestError) as caught:
        load_job(path)
    assert str(caught.value).startswith(line.format(file=f"job file {path}"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("True", "; truth values are small: limit = true"),
        ("1,000", "; numbers have no commas: limit = 1_000"),
        ("two words", "; text needs quotes: limit = 'two words'"),
        ("007", ""),
        ("1.", ""),
    ],
)
def test_a_value_without_quotes_is_told_how_to_write_it(tmp_path: Path, value: str, hint: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"{JOB}limit = {value}\n")
    with pytest.raises(RequestError) as caught:
        load_job(path)
    said = str(caught.value).rpartition("not valid TOML: ")[2]
    assert said.endswith(hint) if hint else ";" not in said


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.csv", b"text,label\ngood,1\n", "it is a data file, which a job file names as data.path"),
        ("a.parquet", b"PAR1\x15\xff\xfe", "it is a data file, which a job file names as data.path"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00", "it is a data file, which a job file names as data.path"),
        ("model.safetensors", b"\x80\xff", "it is a model's file"),
        ("train.py", b"import torch\n", "it is a program"),
        ("job.yaml", b"model:\n  name: m\n", "it is no TOML"),
    ],
)
def test_another_file_given_as_the_job_is_told_what_it_is(tmp_path: Path, name: str, content: bytes, what: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError) as caught:
        load_job(tmp_path / name)
    assert str(caught.value) == (
        f"job file {tmp_path / name}: {what}; allowed is a TOML file with [model], [data] and [run]"
    )


def test_a_job_file_by_another_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "job.txt").write_text(JOB)
    assert load_job(tmp_path / "job.txt").model.name == "m"


def test_a_job_survives_its_own_json() -> None:
    settings = load_job(
        {**LEAST, "capture": {"positions": {"every": 4}, "layers": [0, -1]}, "data": {"path": "d", "keep": ["x"]}}
    )
    assert load_job(settings.model_dump(mode="json")) == settings


def test_a_package_path_is_found_without_importing_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "explodes").mkdir()
    (tmp_path / "explodes/__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "explodes/data.csv").write_text("text\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_package("package:explodes/data.csv", "data.path") == str(tmp_path / "explodes/data.csv")
    assert resolve_package("plain/path", "data.path") == "plain/path"
    for wrong in ("package:explodes/other.csv", "package:no_such_package/x", "package:../x", "package:"):
        with pytest.raises(RequestError, match=r"^data\.path = 'package:"):
            resolve_package(wrong, "data.path")


def test_a_package_path_does_not_leave_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/__init__.py").touch()
    (tmp_path / "outside.csv").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RequestError, match="has no"):
        resolve_package("package:inner/../outside.csv", "data.path")
