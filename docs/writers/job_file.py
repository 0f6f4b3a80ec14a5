"""The page of the job file: every setting, with what a wrong value is told is allowed."""

from __future__ import annotations

import re
import tomllib
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from harvest.config import Job, load_job
from harvest.errors import RequestError
from harvest.settings.base import shown
from writers.markdown import code, prose, table

HEAD = """TOML. Every setting has a default except `model.name`, `data.path` and `run.path`; an unknown one is an error.
Relative paths are relative to the working directory. `--set model.dtype=float32` overrides a setting for one command.
`schemas/job.schema.json` says the same to editors.
"""
WRONG = (-1.5, "")
"""No setting allows the first; some text is refused only when it is read."""
VALUE = re.compile(r"\{[^}]*\}|'[^' ]*'")
"""What a message writes as the job file does."""
LEAST: dict[str, Any] = {
    "model": {"name": "m"},
    "data": {"path": "d"},
    "run": {"path": "r"},
    "directions": [{"name": "d", "column": "c", "positive": ["1"], "negative": ["0"]}],
}
EXAMPLES = {
    "model": """
[model]
name = "Qwen/Qwen2.5-7B-Instruct"
dtype = "bfloat16"
adapter = "adapters/tuned"              # PEFT, over the checkpoint
device_map = "auto"                     # one replica over several GPUs
options = {max_memory = {0 = "40GiB", 1 = "40GiB"}}
""",
    "data": """
[data]
path = "chats/*.jsonl.gz"
messages = "conversation.turns"         # dotted for nested fields
keep = ["label", "@file"]
sample = 0.1
on_bad = "skip"
""",
    "run": """
[run]
path = "s3://bucket/runs/reviews"
storage = {endpoint_url = "https://minio.example:9000"}
workers = 8
resources = {spot = 1}
""",
    "chat": """
[chat]
generation_prompt = false
system = "You are terse."
kwargs = {enable_thinking = false}
""",
    "tokens": """
[tokens]
context = 1024
long = "truncate"
bos = "always"
batching = "packed"
""",
    "capture": """
[capture]
sites = ["residual", "attn_heads.12", "module:model.layers.{layer}.mlp.gate_proj"]
layers = [0, 12, -1]
positions = {span = ["answer"]}
pool = ["mean", "last"]
exclude = ["bos", 198]
""",
    "store": """
[store]
dtype = "int8"
compression = "zstd"
shard_documents = 4096
""",
    "statistics": """
[statistics]
moments = false
""",
    "directions": """
[[directions]]
name = "truth"
column = "answer"
positive = ["yes"]
negative = ["no"]                       # or "rest" for all others
read = ["last", -3, {span = "answer", pool = "mean"}]
modes = ["mean_difference", "paired_rejection"]
pair = "column:question"
holdout = "column:split"
""",
    "answers": """
[[directions]]
name = "truth"
column = "answer"
positive = ["yes"]
negative = ["no"]
weight = "logit_diff"
correct_only = true

[answers]
yes = " Yes"
no = " No"
""",
}
"""Table -> a part of a job that uses it."""


def page() -> str:
    """Every table and setting of the models that validate a job."""
    parts = [f"# Job file\n\n{HEAD}"]
    for name, field in Job.model_fields.items():
        kind = _table_of(field.annotation)
        head = f"[[{name}]]" if name == "directions" else f"[{name}]"
        parts += [f"## `{head}`\n\n{prose((kind and kind.__doc__) or field.description)}\n"]
        if kind is not None:
            rows = [_row(name, setting, about) for setting, about in kind.model_fields.items()]
            parts.append(table(["setting", "default", "allowed", "meaning"], rows))
        else:
            parts.append(f"Keys and values are text.\n\nDefault: {_default(field)}\n")
        parts.append(f"```toml\n{EXAMPLES[name].strip()}\n```\n")
    return "\n".join(parts)


def allowed(name: str, setting: str) -> str:
    """What a setting may be, in the words of the message about a wrong value."""
    job = {key: value for key, value in LEAST.items() if key != "directions" or name == "directions"}
    one = job["directions"][0] if name == "directions" else job.get(name, {})
    told = ""
    for wrong in WRONG:
        changed = {**one, setting: wrong}
        try:
            load_job({**job, name: [changed] if name == "directions" else changed})
        except RequestError as error:
            told = str(error).partition("allowed ")[2] or told
    assert told, f"{name}.{setting} = {WRONG[0]} is not told what is allowed"
    return told.removeprefix("are ").removeprefix("is ")


def example(name: str) -> dict[str, Any]:
    """The job that a table's example is a part of."""
    return {**{key: LEAST[key] for key in ("model", "data", "run")}, **tomllib.loads(EXAMPLES[name])}


def _table_of(kind: Any) -> type[BaseModel] | None:
    return next((one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _row(name: str, setting: str, field: Any) -> tuple[str, ...]:
    told = prose(VALUE.sub(r"`\g<0>`", allowed(name, setting)))
    return (code(setting), _default(field), told, prose(field.description))


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return "none" if field.default is None else code(shown(field.default))
