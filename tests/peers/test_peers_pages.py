"""The scripts that the site shows for other trainers, run as they stand there by the interpreters that have them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from pages import SITE, blocks
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.export.export import Request, export_run

pytestmark = pytest.mark.skipif("HARVEST_PEERS" not in os.environ, reason="make test-peers has the environments")
WIDTH = 16
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SCRIPTS = {"train_saelens.py": "saelens", "train_dictionary_learning.py": "dictionary_learning"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's run by a tiny model, and the export that the page makes of it."""
    folder = tmp_path_factory.mktemp("pages")
    tiny_llama(layers=17, vocab=300).save_pretrained(folder / MODEL)
    byte_tokenizer().save_pretrained(folder / MODEL)
    texts = [{"text": f"text number {number * number} of many"} for number in range(60)]
    job = {
        "model": {"name": str(folder / MODEL)},
        "capture": {"layers": [15]},
        "store": {"dtype": "bfloat16"},
        "run": {"path": str(folder / "runs/demo"), "threads": 1},
    }
    harvest.run(job, data=texts)
    out = str(folder / "exports/saelens")
    export_run(Request(format="saelens", run=job["run"]["path"], out=out, naming="hf", shuffle=0))  # type: ignore[index]
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_script_of_the_page_trains(script: str, demo: Path) -> None:
    (block,) = [one for one in blocks(SITE / "howto/export.md", "python") if one.title == script]
    text = block.text.replace("width, steps = 576, 1000", f"width, steps = {WIDTH}, 200")
    (demo / script).write_text(re.sub(r"steps = (.*), 1000$", r"steps = \1, 200", text, flags=re.MULTILINE))
    peer = SCRIPTS[script]
    python = f"{os.environ['HARVEST_PEERS']}/{peer}/bin/python"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONPATH": str(SITE.parents[1])}
    done = subprocess.run([python, script], cwd=demo, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert list((demo / "saes" / peer).rglob("*.*"))
