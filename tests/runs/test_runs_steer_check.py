"""The check that adding a direction moves the answers its way: against a plain hook on the block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commandcase import jsonl
from runcase import run
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.checking.repair import repair_run
from harvest.checking.verify import verify_run
from harvest.errors import RequestError
from harvest.reduce.sample import held_out

RANDOM = np.random.default_rng(8)
ROWS = [
    {"text": "".join(RANDOM.choice(list("abcdef"), size=RANDOM.integers(3, 40))) + "xy"[i % 2], "label": str(i % 2)}
    for i in range(40)
]
ANSWERS = {"1": "p", "0": "q"}
DIRECTION: dict[str, Any] = {"name": "s", "column": "label", "positive": ["1"], "negative": ["0"], "check": 6}


def made(folder: Path, rows: list[dict[str, Any]] = ROWS, model: Any = None, **more: Any) -> dict[str, Any]:
    """The card."""
    tables = {
        "capture": {"layers": [1]},
        "answers": ANSWERS,
        "directions": [{**DIRECTION, **more.pop("direction", {})}],
    }
    source = jsonl(folder.parent / f"{folder.name}.jsonl", rows)
    run(folder, source, model=tiny_llama(vocab=300) if model is None else model, **{**tables, **more})
    card: dict[str, Any] = json.loads((folder / "directions/s.json").read_text())
    return card


def token(text: str) -> int:
    found: int = byte_tokenizer()(text, add_special_tokens=False)["input_ids"][0]
    return found


def by_hand(model: Any, ids: list[list[int]], block: int, vector: np.ndarray | None) -> np.ndarray:
    """[documents, 2] logits of both answers at the last token, the vector added to every token's block output."""
    added = None if vector is None else torch.from_numpy(vector).float()
    handle = model.model.layers[block].register_forward_hook(lambda m, a, out: out if added is None else out + added)
    with torch.no_grad():
        logits = [model(torch.tensor([one])).logits[0, -1, [token("p"), token("q")]].double().numpy() for one in ids]
    handle.remove()
    return np.stack(logits)


@pytest.mark.parametrize("batch", [1, 256])
@pytest.mark.parametrize("holdout", [0.3, 0])
def test_the_logits_are_those_of_a_plain_hook_at_each_documents_last_token(
    tmp_path: Path, batch: int, holdout: float
) -> None:
    model = tiny_llama(vocab=300)
    tables = {"direction": {"holdout": holdout}, "tokens": {"batch": batch}, "store": {"shard_documents": 4}}
    card = made(tmp_path / "run", model=model, **tables)
    out = held_out(np.arange(40), None, holdout) if holdout else np.ones(40, bool)
    chosen = [byte_tokenizer()(ROWS[i]["text"])["input_ids"] for i in np.flatnonzero(out)[:6]]
    direction = harvest.open(tmp_path / "run").directions()["s"]["residual.1"]
    before, after = by_hand(model, chosen, 1, None), by_hand(model, chosen, 1, direction.raw)
    check = card["check"]["mean_difference"]
    assert (check["at"], check["scale"], check["documents"], check["reason"]) == ("residual.1", 1.0, 6, None)
    for number, letter in enumerate("AB"):
        assert check[letter]["before"] == pytest.approx(before[:, number].mean(), abs=1e-5)
        assert check[letter]["after"] == pytest.approx(after[:, number].mean(), abs=1e-5)
    gained = after.mean(axis=0) - before.mean(axis=0)
    assert check["right_way"] == (gained[0] > gained[1])


def test_a_direction_towards_an_answers_own_row_moves_the_right_way_and_the_other_way_round_the_wrong_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A documents' last tokens push the head's row of p: what they have more of than B's is p's logit."""
    from harvest.__main__ import _status

    model = tiny_llama(layers=2, vocab=300)
    with torch.no_grad():
        for end, answer in (("y", "p"), ("x", "q")):
            model.model.embed_tokens.weight[token(end)] = 8 * model.lm_head.weight[token(answer)]
    for name, answers, right in (("right", ANSWERS, True), ("wrong", {"1": "q", "0": "p"}, False)):
        capture = {"layers": [1]}
        card = made(tmp_path / name, model=model, answers=answers, capture=capture, direction={"holdout": 0})
        assert card["check"]["mean_difference"]["right_way"] is right
        assert _status(["directions", str(tmp_path / name)]) == 0
        assert f"the {name} way" in capsys.readouterr().out


def test_contrast_pairs_and_every_mode_have_a_check_and_none_asked_for_is_none(tmp_path: Path) -> None:
    rows = [{"good": f"it is {i} fine", "bad": f"it is {i} awful"} for i in range(16)]
    source = jsonl(tmp_path / "c.jsonl", rows)
    modes = ["mean_difference", "single_group", "whitened"]
    tables = {
        "data": {"contrast": ["good", "bad"]},
        "capture": {"layers": [1]},
        "answers": {"good": "p", "bad": "q"},
        "directions": [
            {"name": "s", "modes": modes, "holdout": 0, "check": 5},
            {"name": "t", "modes": ["single_group"]},
        ],
    }
    run(tmp_path / "run", source, **tables)
    cards = [json.loads((tmp_path / f"run/directions/{name}.json").read_text()) for name in "st"]
    assert list(cards[0]["check"]) == modes
    assert {check["documents"] for check in cards[0]["check"].values()} == {5}
    model, found = tiny_llama(vocab=300), cards[0]["check"]["mean_difference"]
    texts = [rows[i][column] for i in range(5) for column in ("good", "bad")]  # whole pairs
    before = by_hand(model, [byte_tokenizer()(text)["input_ids"] for text in texts], 1, None)
    assert [found[letter]["before"] for letter in "AB"] == pytest.approx(before.mean(axis=0).tolist(), abs=1e-5)
    assert cards[1]["check"] is None


def test_an_undefined_direction_says_so_and_limits_hold(tmp_path: Path) -> None:
    same = [{**row, "text": "abc"} for row in ROWS]
    check = made(tmp_path / "same", same)["check"]["mean_difference"]
    assert check["reason"] in ("no best name", "the direction is undefined")
    limited = made(tmp_path / "few", data={"limit": 4}, direction={"holdout": 0, "check": 99})["check"][
        "mean_difference"
    ]
    assert limited["documents"] == 4


def test_a_run_that_died_before_its_end_and_a_repair_check_again(tmp_path: Path) -> None:
    model = tiny_llama(vocab=300)
    card = made(tmp_path / "run", model=model)
    (tmp_path / "run/complete.json").unlink()
    (tmp_path / "run/directions/s.json").unlink()
    assert made(tmp_path / "run", model=model) == card
    path = tmp_path / "run/directions/s.json"
    path.write_text(path.read_text().replace("true", "false"))
    assert verify_run(tmp_path / "run").damaged
    repair_run(tmp_path / "run", model=model, tokenizer=byte_tokenizer())
    assert json.loads(path.read_text()) == card
    assert not verify_run(tmp_path / "run").findings


def test_what_cannot_be_checked_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"check = 6 needs \[answers\]"):
        made(tmp_path / "run", answers={})
    settings = {"answers": ANSWERS, "directions": [DIRECTION], "run": {"path": str(tmp_path / "run")}}
    with pytest.raises(RequestError, match="check = 6: reads documents again, which a stream does not allow"):
        harvest.run(settings, model=tiny_llama(vocab=300), tokenizer=byte_tokenizer(), data=iter(ROWS))
    tiny_llama(vocab=300).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(
        RequestError, match="check = 6: runs the model where the run ends; allowed with several workers"
    ):
        harvest.run(
            {
                "model": {"name": str(tmp_path / "model")},
                "data": {"path": str(jsonl(tmp_path / "a.jsonl", ROWS))},
                "answers": ANSWERS,
                "directions": [DIRECTION],
                "run": {"path": str(tmp_path / "run"), "workers": 2},
            }
        )
    assert not (tmp_path / "run").exists()
