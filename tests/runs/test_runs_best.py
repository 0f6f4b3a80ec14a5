"""`run.best`: what the card chose by folds of the training examples, with what it is worth on the held-out ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runcase import job
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.errors import RequestError

MODES = ["mean_difference", "whitened", "pca"]


def asked(**more: Any) -> dict[str, Any]:
    told = {"name": "tone", "column": "label", "positive": ["1"], "negative": ["0"], "holdout": 0.4, "modes": MODES}
    return {**told, **more}


def harvested(path: Path, directions: list[dict[str, Any]], count: int = 90, **tables: Any) -> harvest.Run:
    random = np.random.default_rng(5)
    texts = ["".join(random.choice(list("abcdef"), size=int(random.integers(1, 20)))) for _ in range(count)]
    rows = [{"text": text + "xy"[at % 2], "label": str(at % 2)} for at, text in enumerate(texts)]
    told = job(path, directions=directions, **tables)
    harvest.run(told, model=tiny_llama(vocab=300), tokenizer=byte_tokenizer(), data=rows)
    return harvest.open(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> harvest.Run:
    return harvested(tmp_path_factory.mktemp("best") / "run", [asked(), asked(name="other", modes=["single_group"])])


def card(run: harvest.Run, name: str) -> Any:
    return json.loads((Path(run.path) / f"directions/{name}.json").read_text())


def test_it_is_the_mode_and_name_of_the_card_with_the_highest_auroc_in_folds(run: harvest.Run) -> None:
    told = card(run, "tone")
    scores = {(one["mode"], one["at"]): one["cross_validated_auroc"] for one in told["directions"]}
    mode, at = max(told["best"].items(), key=lambda pair: scores[pair])
    best = run.best("tone")
    assert (best.mode, best.at, best.in_folds) == (mode, at, scores[mode, at])
    assert best.in_folds == max(scores.values())
    assert best.shuffled == told["control"][mode]["auroc"]
    entry = next(one for one in told["directions"] if (one["mode"], one["at"]) == (mode, at))
    figure = entry["evaluation"]["auroc"]
    assert (best.auroc.value, best.auroc.low, best.auroc.high) == (figure["value"], figure["low"], figure["high"])
    assert best.direction.vector is not None
    assert np.array_equal(best.direction.vector, run.directions(mode)["tone"][at].vector)


@pytest.mark.parametrize("mode", MODES)
def test_of_a_mode_it_is_that_modes_own(run: harvest.Run, mode: str) -> None:
    best = run.best("tone", mode)
    assert (best.mode, best.at) == (mode, card(run, "tone")["best"][mode])
    low, high = best.auroc.low, best.auroc.high
    assert f"{mode} at {best.at}, held-out AUROC {best.auroc.value:.2f} [{low:.2f}, {high:.2f}]" in repr(best)


def test_without_a_name_it_is_the_only_direction_and_of_several_none(run: harvest.Run, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"best: this run has the directions tone, other; name one"):
        run.best()
    with pytest.raises(RequestError, match=r"no 'tune' here; there are tone, other; did you mean tone\?"):
        run.best("tune")
    with pytest.raises(RequestError, match="mode = 'leace': direction 'tone' has mean_difference, whitened, pca"):
        run.best("tone", "leace")
    alone = harvested(tmp_path / "alone", [asked()])
    assert repr(alone.best()) == repr(alone.best("tone"))
    with pytest.raises(RequestError, match="best: each run has its own directions"):
        harvest.open([run, harvested(tmp_path / "second", [asked()])]).best("tone")


def test_where_there_is_nothing_to_choose_by_that_is_said(tmp_path: Path) -> None:
    few = harvested(tmp_path / "few", [asked()], count=6)
    sums = harvested(tmp_path / "sums", [asked(modes=["mean_difference"])], capture={"store": False})
    none = harvested(tmp_path / "none", [])
    for run in (few, sums):
        with pytest.raises(
            RequestError, match=r"best\(tone\): there was nothing to choose by .*directions\(\) has all"
        ):
            run.best()
    with pytest.raises(RequestError, match=r"best\(tone, pca\): there was nothing to choose by"):
        few.best(mode="pca")
    with pytest.raises(RequestError, match="best: this run has the directions none; name one"):
        none.best()
