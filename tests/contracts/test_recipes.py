"""CONTRIBUTING's recipes are true: each example goes into one file of a copy of the package, and is then used."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n# (harvest/\S+\.py)(?:: (\w+))?\n(.*?)```", TEXT, flags=re.DOTALL)
"""(file, name of the table that it is a line of, or none; code)."""

USE = {
    "harvest/model/architectures.py": """
import torch
from oracle import alone
from tiny import amplify, byte_tokenizer
from transformers import PersimmonConfig, PersimmonForCausalLM

sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
model = amplify(PersimmonForCausalLM(PersimmonConfig(vocab_size=300, max_position_embeddings=64, **sizes)))
sites = ["residual", "residual_mid", "attn", "mlp", "attn_heads", "mlp_neurons", "final_norm"]
job = {"capture": {"sites": sites}, "run": {"path": "run", "threads": 1}}
run = harvest.run(job, model=model, tokenizer=byte_tokenizer(), data=["abc", "defgh"])
hooks = {
    "residual_mid": ("post_attention_layernorm", 0), "attn": ("self_attn", 1), "mlp": ("mlp", 1),
    "attn_heads": ("self_attn.dense", 0), "mlp_neurons": ("mlp.dense_4h_to_h", 0),
}
got = {}
for layer, block in enumerate(model.model.layers):
    for site, (path, side) in hooks.items():
        def keep(module, given, output, at=f"{site}.{layer}", side=side):
            value = (given, output)[side]
            got[at] = (value[0] if isinstance(value, tuple) else value)[0]
        block.get_submodule(path).register_forward_hook(keep)
model.model.final_layernorm.register_forward_hook(lambda module, given, output: got.update({"final_norm": output[0]}))
with torch.no_grad():
    hidden = model(input_ids=torch.tensor([run.tokens(documents=[1])["token"].to_pylist()]), output_hidden_states=True)
got["residual.0"] = hidden.hidden_states[1][0]
rows = slice(len(run) - len(got["residual.0"]), len(run))
for name, expected in got.items():
    assert (run[name][rows] - expected).norm() <= 5e-5 * expected.norm(), name
assert set(run.names) - set(got) == {"residual.1"}
""",
    "harvest/model/points.py": """
import torch
from tiny import byte_tokenizer, tiny_llama

model = tiny_llama(layers=2, vocab=300, hidden_size=16, head_dim=12)
job = {"capture": {"sites": ["attn_queries"]}, "run": {"path": "run", "threads": 1}}
run = harvest.run(job, model=model, tokenizer=byte_tokenizer(), data=["abc"])
assert run.names == ["attn_queries.0", "attn_queries.1"]
got = []
model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda module, given, output: got.append(output[0]))
with torch.no_grad():
    model(input_ids=torch.tensor([run.tokens()["token"].to_pylist()]))
assert run["attn_queries.1"].shape == (len(run), 24)
assert (run["attn_queries.1"][:] - got[0]).norm() <= 5e-5 * got[0].norm()
""",
    "harvest/reduce/largest.py": """
import numpy as np
from tiny import byte_tokenizer, tiny_llama

job = {
    "capture": {"sites": ["residual"]},
    "statistics": {"also": ["largest"]},
    "store": {"shard_documents": 2},
    "run": {"path": "run", "threads": 1},
}
run = harvest.run(job, model=tiny_llama(vocab=300), tokenizer=byte_tokenizer(), data=["abc", "d", "ef", "ghij"])
assert len(run.shards) == 2
for name, largest in run.reduced("largest").items():
    assert np.array_equal(largest, run[name].numpy(dtype="float32").astype(np.float64).max(axis=0)), name
assert list(run.reduced("largest")) == run.names
assert run.statistics()["residual.0"].count == len(run)
""",
    "harvest/export/formats/lines.py": """
import numpy as np
from tiny import byte_tokenizer, tiny_llama
from harvest.__main__ import _status

run = harvest.run(
    {"run": {"path": "run", "threads": 1}}, model=tiny_llama(vocab=300), tokenizer=byte_tokenizer(), data=["abc", "d"]
)
assert _status(["export", "lines", "run", "out", "--name", "residual.1", "--rows", "position > 0"]) == 0
kept = np.flatnonzero(run.tokens()["position"].to_numpy() > 0)
assert np.array_equal(np.loadtxt("out/residual.1.txt", ndmin=2).astype(np.float32), run["residual.1"][kept].numpy())
assert "numpy.loadtxt" in open("out/README.md").read()
""",
}
"""What each example makes possible."""
DRIVER = """
import json, os, pathlib, traceback
import harvest
top = pathlib.Path.cwd()
assert pathlib.Path(harvest.__file__).is_relative_to(top)
failures = {}
for number, (file, code) in enumerate(json.loads((top / "uses.json").read_text()).items()):
    (top / str(number)).mkdir()
    os.chdir(top / str(number))
    try:
        exec(compile(code, file, "exec"), {"harvest": harvest})
        failures[file] = ""
    except BaseException:
        failures[file] = traceback.format_exc()
(top / "failures.json").write_text(json.dumps(failures))
"""


def test_there_is_an_example_for_each_recipe_and_a_use_of_each_example() -> None:
    assert {file for file, _, _ in EXAMPLES} == set(USE)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Example -> what went wrong when it was used, in one process that sees a copy of the package with all of them."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "harvest", copy / "harvest", ignore=shutil.ignore_patterns("__pycache__"))
    for file, table, code in EXAMPLES:
        path = copy / file
        assert path.exists() == bool(table), file
        if table:
            before, opening, after = re.split(rf"(?m)(^{table}\b.*\{{\n)", path.read_text(), maxsplit=1)
            path.write_text(before + opening + code + after)
        else:
            path.write_text(code)
    (copy / "uses.json").write_text(json.dumps(USE))
    seen = os.pathsep.join([str(copy), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": seen},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads((copy / "failures.json").read_text())
    return found


@pytest.mark.parametrize("file", USE)
def test_the_example_in_one_file_is_all_that_it_takes(file: str, failures: dict[str, str]) -> None:
    assert failures[file] == ""


def test_every_path_that_the_text_names_exists() -> None:
    named = set(re.findall(r"(?:harvest|tests|jobs|schemas)/[\w./-]*\w(?:\.\w+)?", TEXT)) - set(USE)
    assert not [path for path in sorted(named) if not (ROOT / path).exists()]
