"""Answers: logit differences at the end of each document, the weights and examples that they decide, in whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commandcase import jsonl
from plainrun import PlainRun, first_difference, read_plain
from runcase import Died, Failing, bury, install, run
from tiny import CHAT_TEMPLATE, byte_tokenizer, tiny_gpt2, tiny_llama

import harvest
from harvest.checking.repair import repair_run
from harvest.checking.verify import verify_run
from harvest.errors import RequestError, WorkError

AT = "residual.1"
ONE_NAME = {"layers": [1]}
RANDOM = np.random.default_rng(5)
ANSWERS = {"1": "yes", "0": "no"}
TOKENS = {label: byte_tokenizer()(text, add_special_tokens=False)["input_ids"][0] for label, text in ANSWERS.items()}


def texts(count: int, longest: int = 20) -> list[dict[str, Any]]:
    rows = []
    for number in range(count):
        body = "".join(RANDOM.choice(list("abcdef"), size=RANDOM.integers(1, longest)))
        rows.append({"text": body + "xy"[number % 2], "label": str(number % 2), "pid": number // 2})
    return rows


def asked(**more: Any) -> dict[str, Any]:
    return {"name": "s", "column": "label", "positive": ["1"], "negative": ["0"], "holdout": 0, **more}


def made(folder: Path, rows: list[dict[str, Any]], *directions: dict[str, Any], **tables: Any) -> tuple[PlainRun, Any]:
    source = jsonl(folder.parent / f"{folder.name}.jsonl", rows)
    tables = {"capture": ONE_NAME, "answers": ANSWERS, **tables}
    plain = run(folder, source, directions=list(directions), **tables)
    return plain, harvest.open(folder)


def logits_alone(model: Any, ids: list[int]) -> np.ndarray:
    """float64 [vocabulary]: what would follow this document alone, by the whole model."""
    with torch.no_grad():
        found: np.ndarray = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double().numpy()
    return found


def differences(rows: list[dict[str, Any]], model: Any = None, tokens: dict[str, int] = TOKENS) -> np.ndarray:
    model = tiny_llama(vocab=300) if model is None else model
    found = []
    for row in rows:
        logits = logits_alone(model, byte_tokenizer()(row["text"])["input_ids"])
        others = max(logits[token] for label, token in tokens.items() if token != tokens[row["label"]])
        found.append(logits[tokens[row["label"]]] - others)
    return np.array(found)


def ends(plain: PlainRun) -> np.ndarray:
    last = np.flatnonzero(np.diff(plain.tokens["document"], append=-1))
    return plain.rows[AT][last].astype(np.float64)


def near(found: Any, expected: np.ndarray) -> None:
    """The weights come from float32 logits of another batch."""
    assert found.status == "ok", found
    assert np.abs(found.raw - expected).max() <= 1e-4 * np.abs(expected).max()


def groups(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.array([0 if row["label"] == "1" else 1 for row in rows])


@pytest.mark.parametrize("family", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("batching", ["sorted", "packed"])
def test_the_documents_table_has_the_logit_difference_of_each_document_alone(
    tmp_path: Path, family: Any, batching: str
) -> None:
    model, rows = family(vocab=300), texts(20)
    plain, opened = made(
        tmp_path / "run", rows, asked(), model=model, tokens={"batching": batching}, store={"shard_documents": 8}
    )
    found = opened.documents()["logit_diff"].to_numpy()
    expected = differences(rows, model)
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    assert {np.sign(one) for one in expected} == {-1.0, 1.0}
    assert not verify_run(tmp_path / "run").findings
    without = run(tmp_path / "plain", jsonl(tmp_path / "b.jsonl", rows), model=model, capture=ONE_NAME)
    assert "logit_diff" not in without.documents[0]
    if batching == "sorted":  # the rows are those of a run that asks nothing
        assert np.abs(plain.rows[AT] - without.rows[AT]).max() <= 1e-5 * np.abs(without.rows[AT]).max()


def test_weights_are_the_sizes_of_the_differences(tmp_path: Path) -> None:
    rows = texts(30)
    plain, opened = made(tmp_path / "run", rows, asked(weight="logit_diff"), store={"shard_documents": 7})
    weight, last, group = np.abs(differences(rows)), ends(plain), groups(rows)
    a, b = (np.average(last[group == g], axis=0, weights=weight[group == g]) for g in (0, 1))
    found = opened.directions()["s"][AT]
    near(found, a - b)
    assert found.counts.weights == pytest.approx((weight[group == 0].sum(), weight[group == 1].sum()), rel=1e-4)
    exact = np.abs(opened.documents()["logit_diff"].to_numpy())
    a, b = (np.average(last[group == g], axis=0, weights=exact[group == g]) for g in (0, 1))
    assert np.abs(found.raw - (a - b)).max() <= 1e-10 * np.abs(a - b).max()


@pytest.mark.parametrize("modes", [["mean_difference", "whitened"], ["logistic", "pca", "single_group"]], ids=str)
def test_examples_that_the_model_gets_wrong_are_left_out_and_counted(tmp_path: Path, modes: list[str]) -> None:
    rows = texts(60)
    plain, opened = made(tmp_path / "run", rows, asked(correct_only=True, modes=modes), store={"shard_documents": 16})
    right, last, group = differences(rows) > 0, ends(plain), groups(rows)
    kept = [int((right & (group == g)).sum()) for g in (0, 1)]
    wrong = [int((~right & (group == g)).sum()) for g in (0, 1)]
    assert min(*kept, *wrong) > 2
    for mode in modes:
        found = opened.directions(mode)["s"][AT]
        assert found.status == "ok"
        assert (list(found.counts.rows), list(found.counts.wrong)) == (kept, wrong)
        assert found.counts.excluded == (0, 0)
    if "mean_difference" in modes:
        expected = last[right & (group == 0)].mean(0) - last[right & (group == 1)].mean(0)
        found = opened.directions()["s"][AT]
        assert np.abs(found.raw - expected).max() <= 1e-10 * np.abs(expected).max()
        again = harvest.concept_direction(last[right].astype(np.float32), group[right], mode="whitened")
        assert np.abs(opened.directions("whitened")["s"][AT].vector - again.vector).max() <= 1e-8
    card = json.loads((tmp_path / "run/directions/s.json").read_text())
    assert card["directions"][0]["counts"]["wrong"] == wrong
    assert card["answers"] == {label: {"text": text, "token": TOKENS[label]} for label, text in ANSWERS.items()}


def test_held_out_examples_must_be_right_too(tmp_path: Path) -> None:
    rows = [{**row, "part": "test" if number % 3 == 0 else "train"} for number, row in enumerate(texts(60))]
    _, opened = made(tmp_path / "run", rows, asked(correct_only=True, holdout="column:part"))
    right, group, out = differences(rows) > 0, groups(rows), np.arange(60) % 3 == 0
    judged = opened.directions()["s"][AT].evaluation.examples
    assert judged == tuple(int((right & out & (group == g)).sum()) for g in (0, 1))


@pytest.mark.parametrize("shard_documents", [4096, 5])
def test_a_pair_with_a_wrong_member_is_left_out_whole(tmp_path: Path, shard_documents: int) -> None:
    rows = texts(40)
    rows = [rows[i] for i in np.random.default_rng(1).permutation(40)]
    direction = asked(
        correct_only=True, pair="column:pid", modes=["paired_rejection", "mean_difference", "pca"], weight="logit_diff"
    )
    plain, opened = made(tmp_path / "run", rows, direction, store={"shard_documents": shard_documents})
    last, group, pid = ends(plain), groups(rows), np.array([row["pid"] for row in rows])
    difference = opened.documents()["logit_diff"].to_numpy()
    a, b = (np.array([np.flatnonzero((group == g) & (pid == p))[0] for p in range(20)]) for g in (0, 1))
    both = (difference[a] > 0) & (difference[b] > 0)
    assert 1 < both.sum() < 19
    a, b = a[both], b[both]
    weight = (np.abs(difference[a]) + np.abs(difference[b])) / 2
    left = [last[i] - (last[i] @ last[j]) / (last[j] @ last[j]) * last[j] for i, j in zip(a, b)]
    found = opened.directions()["s"][AT]
    expected = np.average(left, axis=0, weights=weight)
    assert np.abs(found.raw - expected).max() <= 1e-10 * np.abs(expected).max()
    assert (found.counts.pairs, found.counts.dropped_pairs) == (int(both.sum()), 20 - int(both.sum()))
    for mode in ("mean_difference", "pca"):
        assert opened.directions(mode)["s"][AT].counts.rows == (len(a), len(a))
        assert opened.directions(mode)["s"][AT].status == "ok"


@pytest.mark.parametrize("read", ["first", "mean", "all", [0, -1]], ids=str)
def test_the_answer_is_asked_at_the_end_wherever_the_state_is_read(
    tmp_path: Path, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long documents of several windows, whose states come in long before their answers."""
    monkeypatch.setattr("harvest.plan.SORT_WINDOW_BYTES", 16 * 4 * 10)
    rows = texts(16, longest=60)
    tables: dict[str, Any] = {"tokens": {"context": 7, "bos": "never"}, "model": tiny_llama(vocab=300)}
    direction = asked(read=read, weight="logit_diff", correct_only=True, modes=["mean_difference", "whitened"])
    plain, opened = made(tmp_path / "run", rows, direction, **tables)
    difference = opened.documents()["logit_diff"].to_numpy()
    for number, row in enumerate(rows):  # the last window alone
        ids = byte_tokenizer()(row["text"], add_special_tokens=False)["input_ids"]
        window = ids[(len(ids) - 1) // 7 * 7 :]
        logits = logits_alone(tables["model"], window)
        expected = logits[TOKENS[row["label"]]] - logits[TOKENS[str(1 - int(row["label"]))]]
        assert difference[number] == pytest.approx(expected, abs=1e-4 * np.abs(logits).max())
    group, right = groups(rows), difference > 0
    labels = [""] if not isinstance(read, list) else [f"@{one}" for one in read]
    for label, one in zip(labels, read if isinstance(read, list) else [read]):
        means = []
        for g in (0, 1):
            states, weights = [], []
            for document in np.flatnonzero(right & (group == g)):
                of_one = plain.of(int(document), AT).astype(np.float64)
                picked = {"first": of_one[:1], "mean": of_one.mean(0)[None], "all": of_one}.get(str(one))
                picked = of_one[[one]] if picked is None else picked
                states.append(picked)
                weights += [abs(difference[document])] * len(picked)
            means.append(np.average(np.concatenate(states), axis=0, weights=weights))
        found = opened.directions()["s"][f"{AT}{label}"]
        assert np.abs(found.raw - (means[0] - means[1])).max() <= 1e-9 * np.abs(means[0] - means[1]).max()
        assert opened.directions("whitened")["s"][f"{AT}{label}"].counts.rows == found.counts.rows


def test_positions_that_are_not_stored_can_be_asked_at(tmp_path: Path) -> None:
    rows = texts(14)
    every, _ = made(tmp_path / "all", rows, asked(read="first", weight="logit_diff"))
    capture = {"layers": [1], "positions": "first"}
    some, _ = made(tmp_path / "some", rows, asked(read="first", weight="logit_diff"), capture=capture)
    assert len(some.keys) == 14
    one, other = ([row["logit_diff"] for row in plain.documents] for plain in (every, some))
    assert np.abs(np.array(one) - np.array(other)).max() <= 1e-4 * np.abs(one).max()
    bare = {"layers": [1], "store": False}
    _, kept = made(tmp_path / "bare", rows, asked(weight="logit_diff", correct_only=True), capture=bare)
    assert kept.directions()["s"][AT].status == "ok"
    assert kept.documents()["logit_diff"].to_pylist() == one


def test_of_several_answers_the_best_other_one_counts(tmp_path: Path) -> None:
    answers = {"0": "no", "1": "yes", "2": "maybe", "3": "no"}
    rows = [{**row, "label": str(number % 4)} for number, row in enumerate(texts(24))]
    direction = asked(positive=["1", "2"], negative=["0", "3"], correct_only=True)
    _, opened = made(tmp_path / "run", rows, direction, answers=answers)
    tokens = {v: byte_tokenizer()(t, add_special_tokens=False)["input_ids"][0] for v, t in answers.items()}
    expected = differences(rows, tokens=tokens)
    found = opened.documents()["logit_diff"].to_numpy()
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    assert sum(opened.directions()["s"][AT].counts.rows) == int((expected > 0).sum())


def test_a_contrast_has_an_answer_for_each_of_its_texts(tmp_path: Path) -> None:
    source = [{"good": row["text"], "bad": row["text"][::-1] + "z"} for row in texts(20)]
    source[3]["bad"] = ""
    direction = {"name": "s", "holdout": 0, "correct_only": True, "modes": ["mean_difference"]}
    answers = {"good": "yes", "bad": "no"}
    _, opened = made(tmp_path / "run", source, direction, answers=answers, data={"contrast": ["good", "bad"]})
    model = tiny_llama(vocab=300)
    listed = opened.documents().to_pylist()
    both = []
    for document, row in enumerate(source):
        found = [one["logit_diff"] for one in listed if one["document"] == document]
        if document == 3:
            assert found == [None, None]
            continue
        signs = []
        for one, column, right, wrong in zip(
            found, ("good", "bad"), (TOKENS["1"], TOKENS["0"]), (TOKENS["0"], TOKENS["1"])
        ):
            logits = logits_alone(model, byte_tokenizer()(row[column])["input_ids"])
            assert one == pytest.approx(logits[right] - logits[wrong], abs=1e-4 * np.abs(logits).max())
            signs.append(one > 0)
        both.append(all(signs))
    counts = opened.directions()["s"][AT].counts
    assert counts.rows == (sum(both), sum(both))
    assert counts.dropped_pairs == 20 - sum(both)


def test_chats_are_asked_behind_their_generation_prompt(tmp_path: Path) -> None:
    model, tokenizer = tiny_llama(vocab=300), byte_tokenizer(chat_template=CHAT_TEMPLATE)
    rows = [{"m": [{"role": "user", "content": "abc"[: 1 + i % 3] * 2}], "label": str(i % 2)} for i in range(8)]
    source = jsonl(tmp_path / "a.jsonl", rows)
    tables: dict[str, Any] = {"data": {"messages": "m"}, "capture": ONE_NAME, "answers": ANSWERS}
    plain = run(
        tmp_path / "run", source, model=model, tokenizer=tokenizer, directions=[asked(weight="logit_diff")], **tables
    )
    for row, listed in zip(rows, plain.documents):
        text = tokenizer.apply_chat_template(row["m"], tokenize=False, add_generation_prompt=True)
        logits = logits_alone(model, tokenizer(text, add_special_tokens=False)["input_ids"])
        expected = logits[TOKENS[row["label"]]] - logits[TOKENS[str(1 - int(row["label"]))]]
        assert listed["logit_diff"] == pytest.approx(expected, abs=1e-4 * np.abs(logits).max())


# ---- the same bits, and what a crash leaves --------------------------------------------------------------------------


def test_a_run_that_died_at_any_write_comes_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, model = texts(24), tiny_llama(vocab=300)
    source = jsonl(tmp_path / "a.jsonl", rows)
    direction = asked(
        modes=["mean_difference", "paired_rejection", "whitened"],
        pair="column:pid",
        holdout=0.3,
        weight="logit_diff",
        correct_only=True,
    )
    tables: dict[str, Any] = {
        "capture": ONE_NAME,
        "store": {"shard_documents": 8},
        "directions": [direction],
        "answers": ANSWERS,
    }
    clean = run(tmp_path / "clean", source, model=model, **tables)
    directions = {p.name: p.read_bytes() for p in (tmp_path / "clean/directions").iterdir()}
    with monkeypatch.context() as patched:
        stores = install(patched, Failing)
        run(tmp_path / "counted", source, model=model, **tables)
    operations = len(stores[0].log)
    for at in range(3, operations, max(1, operations // 4)):
        with monkeypatch.context() as patched:
            install(patched, lambda inner, at=at: Failing(inner, at))
            with pytest.raises(Died):
                run(tmp_path / f"at-{at}", source, model=model, **tables)
        bury(tmp_path / f"at-{at}")
        assert first_difference(clean, run(tmp_path / f"at-{at}", source, model=model, **tables)) is None
        assert {p.name: p.read_bytes() for p in (tmp_path / f"at-{at}/directions").iterdir()} == directions


def test_damage_is_mended_with_the_same_differences(tmp_path: Path) -> None:
    rows, model = texts(12), tiny_llama(vocab=300)
    source = jsonl(tmp_path / "a.jsonl", rows)
    tables: dict[str, Any] = {"capture": ONE_NAME, "store": {"shard_documents": 4}, "answers": ANSWERS}
    clean = run(tmp_path / "run", source, model=model, directions=[asked(weight="logit_diff")], **tables)
    attempt = tmp_path / "run/shards" / clean.records["f00000-s000001"]["attempt"]
    (attempt / "documents.parquet").write_bytes(b"no table")
    assert verify_run(tmp_path / "run").damaged
    repair_run(tmp_path / "run", model=model, tokenizer=byte_tokenizer())
    assert first_difference(clean, read_plain(tmp_path / "run")) is None


def test_the_directions_that_need_answers_say_whose_they_are(tmp_path: Path) -> None:
    rows = texts(16)
    others = {"name": "o", "column": "pid", "positive": ["0", "1"], "negative": "rest", "holdout": 0}
    _, opened = made(tmp_path / "run", rows, others, asked(weight="logit_diff"))
    expected = differences(rows)
    assert np.abs(opened.documents()["logit_diff"].to_numpy() - expected).max() <= 1e-4 * np.abs(expected).max()
    assert opened.directions()["o"][AT].counts.weights == (4.0, 12.0)


def test_other_answers_are_another_job(tmp_path: Path) -> None:
    rows, model = texts(6), tiny_llama(vocab=300)
    made(tmp_path / "run", rows, asked(), model=model)
    with pytest.raises(RequestError, match=r"answers\.1"):
        made(tmp_path / "run", rows, asked(), model=model, answers={**ANSWERS, "1": "of course"})


def test_a_logit_that_is_no_number_leaves_its_document_out(tmp_path: Path) -> None:
    rows, model = texts(16), tiny_llama(vocab=300)
    rows[5]["text"] += "\x01"
    strange = byte_tokenizer()("\x01", add_special_tokens=False)["input_ids"][0]
    with torch.no_grad():
        model.model.embed_tokens.weight[strange] = torch.inf
    direction = asked(read="first", weight="logit_diff", correct_only=True)
    capture = {"layers": [1], "positions": "first"}
    _, opened = made(tmp_path / "run", rows, direction, model=model, capture=capture)
    found, counts = opened.documents()["logit_diff"].to_pylist(), opened.directions()["s"][AT].counts
    assert np.isnan(found[5])
    assert np.isfinite([one for number, one in enumerate(found) if number != 5]).all()
    assert counts.excluded == (1, 0)
    assert sum(counts.rows) + sum(counts.wrong) == 15
    summary = opened.summary()
    assert (summary["non_finite"]["logit_diff"], summary["non_finite_documents"]) == (1, 1)
    reasons = opened.documents()["reason"].to_pylist()
    assert [i for i, reason in enumerate(reasons) if reason == "non-finite values"] == [5]
    assert not verify_run(tmp_path / "run").damaged


def test_a_head_that_gives_no_numbers_is_counted_and_listed_though_every_row_is_finite(tmp_path: Path) -> None:
    model = tiny_llama(vocab=300)
    answer = byte_tokenizer()("y", add_special_tokens=False)["input_ids"][0]
    with torch.no_grad():
        model.lm_head.weight[answer] = torch.nan
    _, opened = made(tmp_path / "run", texts(8), asked(weight="logit_diff"), model=model)
    summary = opened.summary()
    assert (summary["non_finite"], summary["non_finite_documents"]) == ({"logit_diff": 8}, 8)
    assert set(opened.documents()["reason"].to_pylist()) == {"non-finite values"}
    assert not verify_run(tmp_path / "run").damaged


def test_a_logit_that_the_padding_spoils_is_computed_without_it(tmp_path: Path) -> None:
    """Attention weighs the padding with zero, and zero times NaN is NaN; the rows themselves are from before."""
    rows, model = texts(12), tiny_llama(vocab=300)
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = torch.nan  # the padding's; no document holds it
    tables: dict[str, Any] = {"capture": {"sites": ["embedding"]}, "tokens": {"bos": "never"}}
    plain, opened = made(tmp_path / "run", rows, asked(weight="logit_diff"), model=model, **tables)
    for row, found in zip(rows, plain.documents):
        logits = logits_alone(model, byte_tokenizer()(row["text"], add_special_tokens=False)["input_ids"])
        expected = logits[TOKENS[row["label"]]] - logits[TOKENS[str(1 - int(row["label"]))]]
        assert found["logit_diff"] == pytest.approx(expected, abs=1e-4 * np.abs(logits).max())
    assert sum(opened.directions()["s"]["embedding"].counts.rows) == 12


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"directions": [asked(weight="logit_diff")], "answers": {}}, ["weight = 'logit_diff'", "[answers]"]),
        ({"directions": [asked(correct_only=True)], "answers": {}}, ["correct_only", "[answers]"]),
        ({"directions": []}, ["answers", "directions are none"]),
        ({"directions": [asked(), asked(name="t", column="pid")]}, ["answers", "one column", "label, pid"]),
        (
            {"directions": [asked(correct_only=True), asked(name="t", column="pid", weight="logit_diff")]},
            ["answers", "one column", "label, pid"],
        ),
        ({"directions": [asked(correct_only=True)], "answers": {"1": "yes", "2": "no"}}, ["answers", "none for '0'"]),
        ({"directions": [asked()], "answers": {"1": "yes", "0": "yes"}}, ["answers", "at least two"]),
        ({"directions": [asked()], "answers": {"1": "yes", "0": ""}}, ["answers.0", "go on with"]),
        ({"directions": [asked()], "answers": {"1": "yes", "0": "you"}}, ["answers.0 = 'you'", "'y'", "'yes'"]),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    tmp_path: Path, tables: dict[str, Any], words: list[str]
) -> None:
    source = jsonl(tmp_path / "a.jsonl", texts(8))
    with pytest.raises(RequestError) as caught:
        run(tmp_path / "run", source, **{"answers": ANSWERS, **tables})
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_head_or_a_job_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    rows = texts(8)
    headless = tiny_llama(vocab=300).model
    with pytest.raises(RequestError, match="answers: LlamaModel has no head"):
        made(tmp_path / "run", rows, asked(weight="logit_diff"), model=headless)
    ids = [{"ids": [1, 2, 3], "label": row["label"]} for row in rows]
    with pytest.raises(RequestError, match="answers: need a fast tokenizer"):
        run(
            tmp_path / "run",
            jsonl(tmp_path / "a.jsonl", ids),
            tokenizer=None,
            data={"ids": "ids"},
            directions=[asked(weight="logit_diff")],
            answers=ANSWERS,
        )
    assert not (tmp_path / "run").exists()


def test_a_value_of_the_rest_without_an_answer_is_named_or_by_policy_counted_only(tmp_path: Path) -> None:
    rows = texts(12)
    rows[4]["label"] = "7"
    direction = asked(negative="rest", weight="logit_diff")
    with pytest.raises(WorkError, match=r"document 4.*label = '7' has no answer"):
        made(tmp_path / "run", rows, direction)
    _, opened = made(tmp_path / "skip", rows, direction, data={"on_bad": "skip"})
    found = opened.documents()["logit_diff"].to_pylist()
    assert [number for number, one in enumerate(found) if one is None] == [4]
    assert opened.directions()["s"][AT].counts.unknown == 1


def test_the_command_says_how_many_were_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from harvest.__main__ import _status

    rows = texts(40)
    made(tmp_path / "run", rows, asked(correct_only=True))
    right, group = differences(rows) > 0, groups(rows)
    wrong = [int((~right & (group == g)).sum()) for g in (0, 1)]
    assert _status(["directions", str(tmp_path / "run")]) == 0
    assert f"left out for a wrong answer: A {wrong[0]}, B {wrong[1]}" in capsys.readouterr().out
