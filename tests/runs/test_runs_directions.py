"""Directions computed by whole runs, against plain numpy in float64 on the rows that the run stored."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandcase import jsonl
from plainrun import PlainRun, first_difference, read_plain, snapshot
from runcase import Died, Failing, bury, install, job, run, stacked
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.checking.verify import verify_run
from harvest.errors import RequestError, WorkError
from harvest.reduce.direction import Direction
from harvest.reduce.sample import held_out

AT = "residual.1"
ONE_NAME = {"layers": [1]}
RANDOM = np.random.default_rng(0)


def texts(count: int, longest: int = 20) -> list[dict[str, Any]]:
    """Records of some letters whose label shows in the last ones."""
    rows = []
    for number in range(count):
        body = "".join(RANDOM.choice(list("abcdef"), size=RANDOM.integers(1, longest)))
        rows.append({"text": body + "xy"[number % 2], "label": str(number % 2), "w": number % 4, "pid": number // 2})
    return rows


def asked(**more: Any) -> dict[str, Any]:
    return {"name": "s", "column": "label", "positive": ["1"], "negative": ["0"], "holdout": 0, **more}


def made(folder: Path, rows: list[dict[str, Any]], direction: dict[str, Any], **tables: Any) -> tuple[PlainRun, Any]:
    source = jsonl(folder.parent / f"{folder.name}.jsonl", rows)
    tables = {"capture": ONE_NAME, **tables}
    plain = run(folder, source, directions=[direction], **tables)
    return plain, harvest.open(folder)


def groups(rows: list[dict[str, Any]]) -> np.ndarray:
    """0 for A, 1 for B."""
    return np.array([0 if row["label"] == "1" else 1 for row in rows])


def ends(plain: PlainRun) -> np.ndarray:
    """Row numbers of each document's last stored token."""
    return np.flatnonzero(np.diff(plain.tokens["document"], append=-1))


def close(direction: Direction, expected: np.ndarray) -> None:
    assert direction.status == "ok", direction
    assert direction.raw is not None
    assert direction.vector is not None
    assert np.abs(direction.raw - expected).max() <= 1e-10 * np.abs(expected).max()
    assert np.abs(direction.vector - expected / np.linalg.norm(expected)).max() <= 1e-10


@pytest.mark.parametrize("store", [{"shard_documents": 4096}, {"shard_documents": 7, "dtype": "bfloat16"}])
def test_the_mean_difference_is_numpys_on_the_rows_that_are_stored(tmp_path: Path, store: dict[str, Any]) -> None:
    rows = texts(40)
    plain, opened = made(tmp_path / "run", rows, asked(modes=["mean_difference", "single_group"]), store=store)
    stored = stacked(plain, AT)
    if "dtype" in store:
        stored = (plain.rows[AT].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    last, group = stored[ends(plain)], groups(rows)
    direction = opened.directions()["s"][AT]
    close(direction, last[group == 0].mean(0) - last[group == 1].mean(0))
    close(opened.directions("single_group")["s"][AT], last[group == 0].mean(0))
    assert direction.counts.rows == (20, 20)


@pytest.mark.parametrize(
    ("read", "state"),
    [
        ("first", lambda rows: rows[:1]),
        ("last", lambda rows: rows[-1:]),
        (-2, lambda rows: rows[-2:-1]),
        (1, lambda rows: rows[1:2]),
        ("mean", lambda rows: rows.mean(0, keepdims=True)),
        ("all", lambda rows: rows),
    ],
    ids=lambda value: "" if callable(value) else str(value),  # a function's address differs between processes
)
@pytest.mark.parametrize("positions", ["all", "last", {"every": 5}], ids=str)
def test_each_read_is_what_numpy_reads_whatever_is_stored(
    tmp_path: Path, read: Any, state: Callable[[np.ndarray], np.ndarray], positions: Any
) -> None:
    rows = texts(12)
    capture = {"layers": [1], "positions": positions}
    _, opened = made(tmp_path / "run", rows, asked(read=read), capture=capture, tokens={"context": 8, "bos": "never"})
    every = run(
        tmp_path / "all", jsonl(tmp_path / "a.jsonl", rows), capture=ONE_NAME, tokens={"context": 8, "bos": "never"}
    )
    states = [state(every.of(number, AT).astype(np.float64)) for number in range(len(rows))]
    a, b = (np.concatenate([s for s, g in zip(states, groups(rows)) if g == group]) for group in (0, 1))
    close(opened.directions()["s"][AT], a.mean(0) - b.mean(0))
    if positions != "all":
        plain = read_plain(tmp_path / "run")
        wanted = (
            every.tokens["position"] % 5 == 0
            if positions != "last"
            else np.isin(np.arange(len(every.keys)), ends(every))
        )
        assert plain.keys == [key for key, kept in zip(every.keys, wanted) if kept]
        assert plain.rows[AT].tobytes() == every.rows[AT][wanted].tobytes()
        assert not verify_run(tmp_path / "run").findings


def test_a_list_of_reads_gives_a_direction_at_each(tmp_path: Path) -> None:
    rows = texts(12)
    plain, opened = made(tmp_path / "run", rows, asked(read=[-1, -2, "mean"]))
    found = opened.directions()["s"]
    assert list(found) == [f"{AT}@-1", f"{AT}@-2", f"{AT}@mean"]
    last, group = ends(plain), groups(rows)
    for label, index in (("-1", last), ("-2", last - 1)):
        states = stacked(plain, AT)[index]
        close(found[f"{AT}@{label}"], states[group == 0].mean(0) - states[group == 1].mean(0))


def test_a_span_is_read_with_its_pool(tmp_path: Path) -> None:
    rows = texts(10)
    for row in rows:
        row["spans"] = [{"name": "head", "start": 0, "end": 2}]
    read = [{"span": "head"}, {"span": "head", "pool": "last"}]
    source = jsonl(tmp_path / "a.jsonl", rows)
    plain = run(tmp_path / "run", source, data={"spans": "spans"}, capture=ONE_NAME, directions=[asked(read=read)])
    found = harvest.open(tmp_path / "run").directions()["s"]
    inside = [plain.of(number, AT).astype(np.float64)[1:3] for number in range(10)]  # behind the BOS
    for at, states in (("mean", [s.mean(0) for s in inside]), ("last", [s[-1] for s in inside])):
        a, b = (np.stack([s for s, g in zip(states, groups(rows)) if g == group]) for group in (0, 1))
        close(found[f"{AT}@head.{at}"], a.mean(0) - b.mean(0))


def test_excluded_tokens_count_in_no_mean_but_can_be_read_by_place(tmp_path: Path) -> None:
    rows = texts(10)
    every = run(tmp_path / "all", jsonl(tmp_path / "a.jsonl", rows), capture=ONE_NAME)
    capture = {"layers": [1], "exclude": ["bos"]}
    _, opened = made(tmp_path / "run", rows, asked(read=["mean", "first"]), capture=capture)
    found, group = opened.directions()["s"], groups(rows)
    states = np.stack([every.of(number, AT).astype(np.float64)[1:].mean(0) for number in range(10)])
    close(found[f"{AT}@mean"], states[group == 0].mean(0) - states[group == 1].mean(0))
    assert not found[f"{AT}@first"].vector  # the same token in every document
    assert "no difference" in found[f"{AT}@first"].status


def test_weights_come_from_their_column(tmp_path: Path) -> None:
    rows = texts(24)
    plain, opened = made(tmp_path / "run", rows, asked(weight="column:w"))
    last, group, weight = stacked(plain, AT)[ends(plain)], groups(rows), np.array([row["w"] for row in rows])
    a, b = (np.average(last[group == g], axis=0, weights=weight[group == g]) for g in (0, 1))
    close(opened.directions()["s"][AT], a - b)


def test_booleans_and_numbers_compare_as_text_and_the_rest_is_everyone_else(tmp_path: Path) -> None:
    rows = [{**row, "label": number % 3 == 0, "n": number % 3} for number, row in enumerate(texts(18))]
    flags = np.array([row["label"] for row in rows])
    for name, direction in (
        ("flag", asked(positive=[True], negative=["false"])),
        ("rest", asked(negative="rest", positive=["true"])),
        ("number", asked(column="n", positive=[0], negative=["1", "2"])),
    ):
        plain, opened = made(tmp_path / name, rows, direction)
        last = stacked(plain, AT)[ends(plain)]
        close(opened.directions()["s"][AT], last[flags].mean(0) - last[~flags].mean(0))


def rejection(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Mean over pairs of what is left of a along b, written out."""
    left = [x - (x @ y) / (y @ y) * y for x, y in zip(a, b)]
    return np.asarray(np.mean(left, axis=0))


@pytest.mark.parametrize("shard_documents", [4096, 5])
def test_pairs_by_column_meet_across_shards(tmp_path: Path, shard_documents: int) -> None:
    rows = texts(20)
    order = np.random.default_rng(1).permutation(20)
    mixed = [rows[i] for i in order]
    direction = asked(modes=["paired_rejection", "mean_difference"], pair="column:pid")
    plain, opened = made(tmp_path / "run", mixed, direction, store={"shard_documents": shard_documents})
    last, group = stacked(plain, AT)[ends(plain)], groups(mixed)
    pid = np.array([row["pid"] for row in mixed])
    a, b = (np.stack([last[(group == g) & (pid == p)][0] for p in range(10)]) for g in (0, 1))
    found = opened.directions()["s"][AT]
    close(found, rejection(a, b))
    assert found.counts.pairs == 10


@pytest.mark.parametrize("shard_documents", [4096, 3])
def test_pairs_by_order_are_the_kth_of_each_group_wherever_they_lie(tmp_path: Path, shard_documents: int) -> None:
    rows = sorted(texts(16), key=lambda row: row["label"])  # all of B, then all of A
    direction = asked(modes=["paired_rejection"], pair="order")
    plain, opened = made(tmp_path / "run", rows, direction, store={"shard_documents": shard_documents})
    last = stacked(plain, AT)[ends(plain)]
    close(opened.directions()["s"][AT], rejection(last[8:], last[:8]))


def test_a_pair_whose_member_is_empty_goes_whole_and_no_other_is_crossed(tmp_path: Path) -> None:
    rows = texts(8)
    rows[2]["text"] = ""  # the B of pair 1
    plain, opened = made(tmp_path / "run", rows, asked(modes=["paired_rejection"], pair="order"))
    kept = [0, 1, 4, 5, 6, 7]
    last = {number: plain.of(number, AT)[-1].astype(np.float64) for number in kept}
    found = opened.directions()["s"][AT]
    close(found, rejection(np.stack([last[n] for n in (1, 5, 7)]), np.stack([last[n] for n in (0, 4, 6)])))
    assert (found.counts.pairs, found.counts.dropped_pairs) == (3, 1)


def test_held_out_documents_are_in_no_sum_and_judge_the_direction(tmp_path: Path) -> None:
    rows = texts(120)
    plain, opened = made(tmp_path / "run", rows, asked(holdout=0.3))
    last, group = stacked(plain, AT)[ends(plain)], groups(rows)
    out = held_out(np.arange(120), None, 0.3)
    found = opened.directions()["s"][AT]
    close(found, last[(group == 0) & ~out].mean(0) - last[(group == 1) & ~out].mean(0))
    along = last[out] @ found.vector
    a, b = along[group[out] == 0], along[group[out] == 1]
    expected = np.mean((a[:, None] > b) + (a[:, None] == b) / 2)
    assert found.auroc == pytest.approx(expected, abs=1e-12)
    assert found.evaluation.examples == (len(a), len(b))


@pytest.mark.parametrize("pairs", [{}, {"pair": "column:pid", "modes": ["paired_rejection", "pca"]}], ids=["", "pairs"])
def test_shards_without_any_example_change_nothing(tmp_path: Path, pairs: dict[str, Any]) -> None:
    """A sample leaves whole shards empty, as in the demo; the same documents in one shard give the same."""
    rows = texts(160)
    more = {"modes": ["mean_difference", "whitened"], "holdout": 0.3, **pairs}
    data = {"sample": 0.25, "on_bad": "skip"}
    many, found = made(tmp_path / "a", rows, asked(**more), data=data, store={"shard_documents": 2})
    one, expected = made(tmp_path / "b", rows, asked(**more), data=data, store={"shard_documents": 4096})
    assert any(record["documents"] == 0 for record in many.records.values())
    assert len(one.records) == 1
    for mode in more["modes"]:
        here, there = found.directions(mode)["s"][AT], expected.directions(mode)["s"][AT]
        assert (here.status, here.counts) == (there.status, there.counts)
        if there.vector is not None:
            assert np.abs(here.vector - there.vector).max() <= 1e-5  # float32 forwards in other batches
            assert here.auroc == pytest.approx(there.auroc, abs=0.02)


def test_a_column_can_say_what_is_held_out(tmp_path: Path) -> None:
    rows = [{**row, "split": "test" if number % 3 == 0 else "train"} for number, row in enumerate(texts(60))]
    plain, opened = made(tmp_path / "run", rows, asked(holdout="column:split"))
    last, group = stacked(plain, AT)[ends(plain)], groups(rows)
    train = np.array([row["split"] == "train" for row in rows])
    found = opened.directions()["s"][AT]
    close(found, last[(group == 0) & train].mean(0) - last[(group == 1) & train].mean(0))
    assert sum(found.evaluation.examples) == 20


def test_columns_that_directions_name_are_kept_with_the_documents(tmp_path: Path) -> None:
    _, opened = made(tmp_path / "run", texts(6), asked(weight="column:w"))
    assert opened.documents().column_names[-2:] == ["label", "w"]


# ---- the same bits, and what a crash leaves --------------------------------------------------------------------------


def test_a_run_that_died_at_any_write_comes_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, model = texts(30), tiny_llama(vocab=300)
    source = jsonl(tmp_path / "a.jsonl", rows)
    direction = asked(modes=["mean_difference", "paired_rejection", "whitened"], pair="column:pid", holdout=0.3)
    tables = {"capture": ONE_NAME, "store": {"shard_documents": 8}, "directions": [direction]}
    clean = run(tmp_path / "clean", source, model=model, **tables)
    files = {p.name: p.read_bytes() for p in (tmp_path / "clean" / "directions").iterdir()}
    assert sorted(files) == ["s.json", "s.safetensors"]
    with monkeypatch.context() as patched:
        stores = install(patched, Failing)
        run(tmp_path / "counted", source, model=model, **tables)
    operations = len(stores[0].log)
    for at in range(3, operations, max(1, operations // 5)):
        folder = tmp_path / f"at-{at}"
        with monkeypatch.context() as patched:
            install(patched, lambda inner, at=at: Failing(inner, at))
            with pytest.raises(Died):
                run(folder, source, model=model, **tables)
        bury(folder)
        again = run(folder, source, model=model, **tables)
        assert first_difference(clean, again) is None
        for name, blob in files.items():
            found = (folder / "directions" / name).read_bytes()
            assert found == blob, (at, name)


def test_a_finished_run_is_only_read_and_an_unfinished_one_computes_from_what_is_committed(tmp_path: Path) -> None:
    rows = texts(20)
    _, opened = made(tmp_path / "run", rows, asked(), store={"shard_documents": 5})
    before = snapshot(tmp_path / "run")
    whole = opened.directions()["s"][AT]
    made(tmp_path / "run", rows, asked(), store={"shard_documents": 5})
    assert snapshot(tmp_path / "run") == before
    (tmp_path / "run" / "complete.json").unlink()
    (tmp_path / "run" / "ledger" / "f00000-s000003.json").unlink()
    part = harvest.open(tmp_path / "run").directions()["s"][AT]
    assert sum(whole.counts.rows) == 20
    assert sum(part.counts.rows) == 15


def test_what_is_read_back_is_what_was_computed(tmp_path: Path) -> None:
    from harvest.concepts.directions import compute

    _, opened = made(tmp_path / "run", texts(80), asked(modes=["mean_difference", "leace", "pca"], holdout=0.3))
    (computed,) = compute(opened.files, opened.record, opened.shards)
    for mode, found in computed.found.items():
        read = opened.directions(mode)["s"][AT]
        fresh = found[AT]
        for field in ("vector", "raw"):
            assert getattr(read, field).tobytes() == getattr(fresh, field).tobytes()
        assert json.dumps(read.card()) == json.dumps(fresh.card())
        assert read.counts == fresh.counts
        assert dataclasses.asdict(read.evaluation) == dataclasses.asdict(fresh.evaluation)
    assert opened.directions("leace")["s"][AT].eraser is not None


def test_damaged_directions_are_found_and_repair_writes_them_again(tmp_path: Path) -> None:
    from harvest.checking.repair import repair_run

    rows, model = texts(12), tiny_llama(vocab=300)
    source = jsonl(tmp_path / "a.jsonl", rows)
    run(tmp_path / "run", source, model=model, capture=ONE_NAME, directions=[asked()])
    path = tmp_path / "run" / "directions" / "s.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    (finding,) = verify_run(tmp_path / "run").findings
    assert finding.damage
    assert finding.object == "directions/s.safetensors"
    repair_run(tmp_path / "run", model=model, tokenizer=byte_tokenizer())
    assert path.read_bytes() == good
    path.unlink()
    assert [f.object for f in verify_run(tmp_path / "run").findings] == ["directions/s.safetensors"]


def test_a_run_without_rows_keeps_documents_and_states_and_gives_the_same_direction(tmp_path: Path) -> None:
    rows = texts(40)
    _, full = made(tmp_path / "full", rows, asked(holdout=0.3))
    capture = {"layers": [1], "store": False}
    _, bare = made(tmp_path / "bare", rows, asked(holdout=0.3), capture=capture)
    names = {p.name for p in (tmp_path / "bare" / "shards").rglob("*") if p.is_file()}
    assert names == {"documents.parquet", "states.safetensors", "zarr.json"}
    one, other = full.directions()["s"][AT], bare.directions()["s"][AT]
    assert one.raw.tobytes() == other.raw.tobytes()
    assert other.auroc is None
    assert "capture.store" in other.evaluation.reason


# ---- what is refused, and what is only counted -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("direction", "words"),
    [
        (asked(positive=["7"]), ["'s'", "group A is empty", "B 6"]),
        (asked(negative=["7"]), ["group B is empty", "A 6"]),
        (asked(column="lable"), ["lable", "directions", "label"]),
        (asked(weight="column:no"), ["directions.0.weight = 'column:no'", "no such column"]),
        (asked(modes=["paired_rejection"]), ["pair"]),
        (asked(weight="logit_diff"), ["logit_diff", "[answers]"]),
        (asked(read={"span": "nowhere"}), ["nowhere"]),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    tmp_path: Path, direction: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        made(tmp_path / "run", texts(12), direction)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_group_of_empty_texts_is_empty_and_one_beyond_the_limit_is_a_status(tmp_path: Path) -> None:
    from harvest import show

    rows = texts(12)
    for row in rows[::2]:
        row["text"] = ""
    with pytest.raises(RequestError, match="group B is empty"):
        made(tmp_path / "run", rows, asked())
    ordered = sorted(texts(12), key=lambda row: row["label"])
    _, opened = made(tmp_path / "run", ordered, asked(), data={"limit": 6})
    assert "group A is empty" in opened.directions()["s"][AT].status
    assert opened.directions()["s"][AT].vector is None
    assert any("direction 's'" in line and "group A is empty" in line for line in show.warnings(opened))


def test_unequal_groups_are_no_pairs_by_order(tmp_path: Path) -> None:
    rows = texts(7)
    direction = asked(modes=["paired_rejection"], pair="order")
    with pytest.raises(RequestError, match="3 documents of A and 4 of B"):
        made(tmp_path / "run", rows, direction)
    _, opened = made(tmp_path / "run", rows, direction, data={"on_bad": "skip"})
    found = opened.directions()["s"][AT]
    assert found.counts.pairs == 3
    assert found.counts.unmatched == (0, 1)
    assert found.status == "ok"


@pytest.mark.parametrize(
    ("change", "more", "words"),
    [
        ({"label": "2"}, {}, ["label = '2' is in no group"]),
        ({"label": None}, {}, ["label is empty"]),
        ({"w": -1}, {"weight": "column:w"}, ["w = -1 is no weight"]),
        ({"w": "x"}, {"weight": "column:w"}, ["w = 'x' is no weight"]),
        ({"pid": None}, {"pair": "column:pid"}, ["pid is empty"]),
        ({"text": "ab"}, {"read": -4}, ["position -4 of 3 tokens"]),
    ],
    ids=str,
)
def test_a_document_in_doubt_is_named_or_by_policy_counted_only(
    tmp_path: Path, change: dict[str, Any], more: dict[str, Any], words: list[str]
) -> None:
    rows = [{**row, "text": row["text"] + "abc"} for row in texts(12)]
    rows[5] |= change
    with pytest.raises(WorkError) as caught:
        made(tmp_path / "run", rows, asked(**more))
    assert all(word in str(caught.value) for word in [*words, "document 5", "'s'"]), caught.value
    plain, opened = made(tmp_path / "skip", rows, asked(**more), data={"on_bad": "skip"})
    found = opened.directions()["s"][AT]
    assert found.counts.unknown + sum(found.counts.excluded) == 1
    assert sum(found.counts.rows) == 11
    assert len({document for document, _ in plain.keys}) == 12


def test_a_pair_with_two_members_of_one_group_is_said(tmp_path: Path) -> None:
    rows = texts(8)
    rows[3]["pid"] = 0
    direction = asked(modes=["paired_rejection"], pair="column:pid")
    with pytest.raises(WorkError, match="pair '0': two examples of group A"):
        made(tmp_path / "one", rows, direction)
    _, opened = made(tmp_path / "two", rows, direction, store={"shard_documents": 2})
    assert opened.directions()["s"][AT].status.startswith("pair '0': two examples")


def test_what_is_not_there_is_refused_with_what_is(tmp_path: Path) -> None:
    _, opened = made(tmp_path / "run", texts(6), asked())
    for call in (
        lambda: opened.directions()["x"],
        lambda: opened.directions()["s"]["mlp.1"],
        lambda: opened.directions("pca"),
    ):
        with pytest.raises(RequestError, match=r"no 'x'|no 'mlp\.1'|'pca'"):
            call()


def test_another_direction_is_another_job(tmp_path: Path) -> None:
    model = tiny_llama(vocab=300)
    source = jsonl(tmp_path / "a.jsonl", texts(6))
    run(tmp_path / "run", source, model=model, capture=ONE_NAME, directions=[asked()])
    with pytest.raises(RequestError, match="directions"):
        run(tmp_path / "run", source, model=model, capture=ONE_NAME, directions=[asked(read="first")])


def test_rows_with_no_numbers_are_left_out_and_counted(tmp_path: Path) -> None:
    import torch

    model, rows = tiny_llama(vocab=300), texts(12)
    rows[3]["text"] += "\x01"  # one token that no other document has
    with torch.no_grad():
        model.model.embed_tokens.weight[byte_tokenizer()("\x01", add_special_tokens=False)["input_ids"][0]] = torch.nan
    source = jsonl(tmp_path / "a.jsonl", rows)
    capture = {"layers": [1], "positions": "first"}
    plain = run(tmp_path / "run", source, model=model, capture=capture, directions=[asked()])
    found = harvest.open(tmp_path / "run").directions()["s"][AT]
    assert found.status == "ok"
    assert found.counts.excluded == (1, 0)
    assert sum(found.counts.rows) == 11
    assert np.isfinite(plain.rows[AT]).all(axis=1).tolist() == [number != 3 for number in range(12)]


def test_the_command_says_how_many_examples_are_in_no_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from harvest.__main__ import _status

    rows = [{**row, "label": "2"} if at in (3, 8, 40) else row for at, row in enumerate(texts(80))]
    made(tmp_path / "run", rows, asked(), data={"on_bad": "skip"})
    assert _status(["directions", str(tmp_path / "run")]) == 0
    assert "in no group, and so in no direction: 3 examples" in capsys.readouterr().out


def test_the_command_prints_a_table_with_what_a_direction_is_worth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from harvest.__main__ import _status

    modes = ["mean_difference", "whitened"]
    made(tmp_path / "run", texts(80), asked(modes=modes, holdout=0.3))
    assert _status(["directions", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "s: label 1 against 0" in printed
    best = next(line for line in printed.splitlines() if "best of whitened: residual.1" in line)
    assert (
        f"(held-out AUROC {harvest.open(tmp_path / 'run').directions('whitened')['s'][AT].evaluation.auroc}; " in best
    )
    assert _status(["directions", str(tmp_path / "run"), "--json"]) == 0
    (card,) = json.loads(capsys.readouterr().out)
    assert [entry["mode"] for entry in card["directions"]] == modes
    entry = card["directions"][0]
    assert entry["layer"] == {"block_output": 1, "block_input": 2, "hidden_states": 2}
    assert entry["from"] == "exact"
    assert entry["evaluation"]["auroc"]["low"] <= entry["evaluation"]["auroc"]["value"]
    assert card["best"]["whitened"] == AT
    control = card["control"]["whitened"]
    assert abs(control["auroc"] - 0.5) < max(4 * control["standard_error"], 0.15)
    assert control["reason"] is None
    made(tmp_path / "few", texts(80), asked(modes=modes, examples=10))
    _status(["directions", str(tmp_path / "few"), "--json"])
    (card,) = json.loads(capsys.readouterr().out)
    assert [entry["from"].split(" of ")[0] for entry in card["directions"]] == ["exact", "from 20"]


def test_a_mode_that_shuffled_labels_do_not_turn_round_has_no_control_and_says_why(tmp_path: Path) -> None:
    from harvest import show

    modes = ["single_group", "paired_rejection"]
    _, opened = made(tmp_path / "run", texts(120), asked(modes=modes, pair="column:pid", holdout=0.3))
    (result,) = opened.direction_results
    for mode in modes:
        control = result.card["control"][mode]
        assert (control["at"], control["auroc"], control["standard_error"]) == (AT, None, None)
        assert "do not turn this mode round" in control["reason"]
    assert "with shuffled labels" not in show.directions(opened).text


def test_a_run_without_directions_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from harvest.__main__ import _status

    run(tmp_path / "run", jsonl(tmp_path / "a.jsonl", texts(4)), capture=ONE_NAME)
    assert _status(["directions", str(tmp_path / "run")]) == 2
    assert "no [[directions]]" in capsys.readouterr().err


def test_a_chat_is_read_at_its_own_end_whatever_stands_beside_it(tmp_path: Path) -> None:
    from oracle import alone
    from tiny import CHAT_TEMPLATE

    model, tokenizer = tiny_llama(vocab=300), byte_tokenizer(chat_template=CHAT_TEMPLATE)
    asks = ["a", "bcd", "efghijk", "xy", "zzzzz", "q"]
    rows = [{"m": [{"role": "user", "content": ask}], "label": str(i % 2)} for i, ask in enumerate(asks)]
    direction = asked(read=[-1, -4])
    source = jsonl(tmp_path / "a.jsonl", rows)
    tables = {"data": {"messages": "m", "path": str(source)}, "capture": {"layers": [1], "positions": "last"}}
    asked_for = job(tmp_path / "run", directions=[direction], **tables)
    found = harvest.run(asked_for, model=model, tokenizer=tokenizer).directions()["s"]
    states = []
    for row in rows:
        text = tokenizer.apply_chat_template(row["m"], tokenize=False, add_generation_prompt=True)
        states.append(alone(model, tokenizer(text, add_special_tokens=False)["input_ids"], [AT])[AT].double().numpy())
    for place in (-1, -4):
        a, b = (np.stack([s[place] for s, g in zip(states, groups(rows)) if g == group]) for group in (0, 1))
        raw = found[f"{AT}@{place}"].raw
        assert np.abs(raw - (a.mean(0) - b.mean(0))).max() <= 1e-4 * np.abs(raw).max()


def test_examples_are_in_the_plans_figures(tmp_path: Path) -> None:
    from harvest.config import load_job
    from harvest.plan import make_plan

    model, source = tiny_llama(vocab=300), jsonl(tmp_path / "a.jsonl", texts(20))

    def planned(**tables: Any) -> Any:
        settings = {"model": {"name": "m"}, "data": {"path": str(source)}, "run": {"path": str(tmp_path / "r")}}
        return make_plan(load_job({**settings, **tables}), model=model, tokenizer=byte_tokenizer()).estimate

    plain, read = planned(), planned(directions=[asked(read=["last", "mean", "all"])])
    assert plain.shards == 1
    assert read.store_bytes - plain.store_bytes == 20 * 2 * 3 * 16 * 4 + read.state_bytes - plain.state_bytes
    assert read.memory_bytes > plain.memory_bytes


@pytest.mark.parametrize("moments", [True, False])
def test_the_bytes_of_sums_stand_in_the_plan_and_are_those_on_disk(tmp_path: Path, moments: bool) -> None:
    from harvest import show
    from harvest.config import load_job
    from harvest.plan import make_plan

    model, source = tiny_llama(vocab=300), jsonl(tmp_path / "a.jsonl", texts(20))
    tables = {
        "directions": [asked(read=["last", "mean", "all"]), asked(name="t", read=-1)],
        "statistics": {"moments": moments},
        "store": {"shard_documents": 5},
    }
    run(tmp_path / "run", source, model=model, **tables)
    settings = {"model": {"name": "m"}, "data": {"path": str(source)}, "run": {"path": str(tmp_path / "r")}, **tables}
    plan = make_plan(load_job(settings), model=model, tokenizer=byte_tokenizer())
    sizes = [path.stat().st_size for path in (tmp_path / "run").rglob("states.safetensors")]
    assert len(sizes) == 4
    assert max(abs(size - plan.estimate.state_bytes) for size in sizes) <= 0.25 * plan.estimate.state_bytes
    bare = make_plan(load_job({**settings, "directions": []}), model=model, tokenizer=byte_tokenizer()).estimate
    examples = 20 * 3 * 3 * 16 * 4
    assert plan.estimate.store_bytes - bare.store_bytes == examples + 4 * (plan.estimate.state_bytes - bare.state_bytes)
    shown = show.plan(plan)
    assert shown.data["state_bytes"] == plan.estimate.state_bytes
    assert "a shard" in next(line for line in shown.text.splitlines() if line.startswith("sums "))


def test_a_run_of_sums_alone_keeps_at_most_a_hundredth_of_its_rows_bytes(tmp_path: Path) -> None:
    model = tiny_llama(layers=2, vocab=300, hidden_size=64)
    rows = [{"text": "abcdef"[i % 6] * 61 + "xy"[i % 2], "label": str(i % 2)} for i in range(640)]
    source = jsonl(tmp_path / "a.jsonl", rows)
    modes = ["mean_difference", "single_group"]
    capture = {"layers": [0, 1], "store": False}
    run(tmp_path / "run", source, model=model, capture=capture, directions=[asked(modes=modes, holdout=0.2)])
    opened = harvest.open(tmp_path / "run")
    assert opened.directions()["s"][AT].status == "ok"
    stored = sum(path.stat().st_size for path in (tmp_path / "run" / "shards").rglob("*") if path.is_file())
    would = opened.statistics()[AT].count * 2 * 64 * 4
    assert opened.statistics()[AT].count == 640 * 63
    assert stored <= would / 100, (stored, would)
