"""Cases of other tools' users, as whole runs: what is on disk is read plainly and compared with one document alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import zarr
from commandcase import jsonl
from faults import Faults, FaultyFiles
from oracle import TOLERANCE_TINY, alone
from plainrun import attempts_without_record, files_below, first_difference, read_plain, snapshot
from runcase import Died, Failing, bury, errors_alone, install, job, run, stacked
from tiny import byte_tokenizer, tiny_gpt2, tiny_llama

import harvest
from harvest.checking.verify import verify_run
from harvest.errors import HarvestError, RequestError, WorkError
from harvest.runtime.status import status_of

IDS = [[5, 9, 17], [23, 31, 40, 50, 60, 7, 8], [11], [12, 13, 14, 15], [9, 8, 7, 6, 5]]


def ids(*documents: list[int]) -> list[dict[str, list[int]]]:
    return [{"input_ids": document} for document in documents]


def run_ids(path: Path, documents: list[list[int]], **tables: Any) -> Any:
    """A run over token ids with the plain 64-token model and no tokenizer."""
    model = tables.pop("model", None) or tiny_llama()
    tables["data"] = {"ids": "input_ids", **tables.get("data", {})}
    return run(path, ids(*documents), model=model, tokenizer=None, **tables)


def by_position(documents: list[list[int]]) -> list[tuple[int, int]]:
    return [(document, position) for document, text in enumerate(documents) for position in range(len(text))]


# ---- capture ---------------------------------------------------------------------------------------------------------


def hooks_of(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_two_runs_in_a_process_are_equal_and_leave_no_hook(tmp_path: Path) -> None:  # E12
    model = tiny_llama()
    first, second = (run_ids(tmp_path / name, IDS, model=model) for name in "ab")
    assert first_difference(first, second) is None
    assert hooks_of(model) == 0
    low = run_ids(tmp_path / "low", IDS, model=model, capture={"layers": [0]})
    high = run_ids(tmp_path / "high", IDS, model=model, capture={"layers": [1, 2]})
    assert (list(low.rows), list(high.rows)) == (["residual.0"], ["residual.1", "residual.2"])
    assert hooks_of(model) == 0


def test_a_run_that_fails_leaves_no_hook_either(tmp_path: Path) -> None:  # E12
    model = tiny_llama()
    with pytest.raises(HarvestError):
        run_ids(tmp_path / "run", [[1, 2], [99]], model=model)
    assert hooks_of(model) == 0


def test_a_model_in_training_mode_is_captured_without_dropout_and_given_back_in_it(tmp_path: Path) -> None:  # E13
    model = tiny_gpt2(resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5).train()
    model.transformer.h[1].eval()
    modes = [module.training for module in model.modules()]
    first, second = (run_ids(tmp_path / name, IDS, model=model) for name in "ab")
    assert first_difference(first, second) is None
    assert [module.training for module in model.modules()] == modes
    assert errors_alone(first, model, dict(enumerate(IDS))) < TOLERANCE_TINY


@pytest.mark.parametrize("batch", [35, 120, 2048])
def test_repeated_texts_and_shared_beginnings_never_meet(batch: int, tmp_path: Path) -> None:  # E14
    a = [int(i) for i in np.random.default_rng(0).integers(2, 64, 30)]
    documents = [a, a, [*a, 3, 4, 5, 6, 7], a[:10], [50, 51, 52]]
    model = tiny_llama()
    for name in "ab":
        plain = run_ids(tmp_path / name, documents, model=model, tokens={"batch": batch})
        assert plain.keys == by_position(documents)
        assert errors_alone(plain, model, dict(enumerate(documents))) < TOLERANCE_TINY


def test_the_twin_of_a_document_has_its_rows(tmp_path: Path) -> None:  # E14
    plain = run_ids(tmp_path / "run", [[5, 6, 7, 8], [9, 9, 9, 9], [5, 6, 7, 8]])
    assert np.array_equal(plain.of(0, "residual.2"), plain.of(2, "residual.2"))


class Meddler:
    """Changes a block's output for chosen documents, as a broken backend would; sits on the model as a hook."""

    def __init__(self, model: Any, layer: int, change: Any) -> None:
        self.change, self.ids = change, torch.zeros(0)
        model.model.register_forward_pre_hook(self._see, with_kwargs=True)
        model.model.layers[layer].register_forward_hook(self._change)

    def _see(self, _m: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self.ids = kwargs["input_ids"]

    def _change(self, _m: Any, _args: Any, output: Any) -> Any:
        return self.change(output.clone(), self.ids)


def test_rows_of_zeros_are_counted_by_name_and_verify_names_the_document(tmp_path: Path) -> None:  # E15
    model = tiny_llama()

    def zeros(hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        hidden[(input_ids == 11).any(dim=1)] = 0
        return hidden

    Meddler(model, 2, zeros)
    plain = run_ids(tmp_path / "run", [[5, 6], [7, 8, 9], [11, 12, 13, 14], [15]], model=model)
    (record,) = plain.records.values()
    assert record["zero_rows"] == {"residual.2": 4}
    assert json.loads((tmp_path / "run/complete.json").read_text())["zero_rows"] == {"residual.2": 4}
    found = [f for f in verify_run(tmp_path / "run").findings if "zero" in f.what and "residual.2" in f.object]
    assert len(found) == 1
    assert "2" in found[0].what.split(":")[-1]


def test_a_layer_beyond_the_last_is_refused_with_the_range_and_the_last_is_there(tmp_path: Path) -> None:  # E16
    with pytest.raises(RequestError, match=r"capture\.layers.*3.*0 to 2"):
        run_ids(tmp_path / "run", IDS, capture={"layers": [3]})
    assert not (tmp_path / "run").exists()
    top = run_ids(tmp_path / "top", IDS, capture={"layers": [2]})
    end = run_ids(tmp_path / "end", IDS, capture={"layers": [-1]})
    assert list(top.rows) == list(end.rows) == ["residual.2"]
    assert np.array_equal(top.rows["residual.2"], end.rows["residual.2"])


# ---- padding and batching ----------------------------------------------------------------------------------------


def test_a_row_per_token_and_none_per_place_of_padding(tmp_path: Path) -> None:  # E18
    documents = [[7], list(range(20, 33))]
    plain = run_ids(tmp_path / "run", documents)
    assert len(plain.rows["residual.0"]) == 14
    assert plain.keys == by_position(documents)
    assert plain.tokens["token"].tolist() == [7, *range(20, 33)]


def test_nan_where_nothing_is_kept_reaches_no_row_and_no_sum(tmp_path: Path) -> None:  # E20
    documents = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16]]
    clean_model, model = tiny_llama(), tiny_llama()

    poisoned: list[int] = []

    def poison(hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        poisoned.append(int((input_ids == 0).sum()))
        hidden[input_ids == 0] = torch.nan  # no document holds the id that batches are padded with
        return hidden

    Meddler(model, 2, poison)
    plain = run_ids(tmp_path / "run", documents, model=model)
    assert poisoned[-1] == 6  # the self-check ran before
    assert errors_alone(plain, clean_model, dict(enumerate(documents))) < TOLERANCE_TINY
    assert [record["non_finite"] for record in plain.records.values()] == [{}]
    mean = harvest.open(tmp_path / "run").statistics()["residual.2"].mean
    np.testing.assert_allclose(mean, stacked(plain, "residual.2").mean(axis=0), rtol=1e-12)


def test_ids_and_their_text_are_the_same_rows(tmp_path: Path) -> None:  # E21, E28
    texts, model = ["abcdef", "ghi jklmn"], tiny_llama(vocab=300)
    encoded = [byte_tokenizer()(text, add_special_tokens=False)["input_ids"] for text in texts]
    file = jsonl(tmp_path / "ids.jsonl", ids(*encoded))
    never = {"bos": "never"}
    runs = [
        run(tmp_path / "text", list(texts), model=model, tokens=never),
        run(tmp_path / "ids", ids(*encoded), model=model, data={"ids": "input_ids"}),
        run(tmp_path / "file", file, model=model, data={"ids": "input_ids"}),
        run(tmp_path / "none", file, model=model, tokenizer=None, data={"ids": "input_ids"}),
        run(tmp_path / "stream", iter(texts), model=model, tokens=never),
    ]
    for other in runs:
        assert [other.ids(i) for i in range(2)] == encoded
        assert other.rows["residual.2"].tobytes() == runs[0].rows["residual.2"].tobytes()
    assert errors_alone(runs[0], model, dict(enumerate(encoded))) < TOLERANCE_TINY
    one = run(tmp_path / "one", texts[:1], model=model, tokens=never)
    assert one.ids(0) == encoded[0]


def test_flat_lists_of_ids_are_documents_of_their_own(tmp_path: Path) -> None:  # E23
    model = tiny_llama()
    plain = run_ids(tmp_path / "run", [[7], [9], [11, 13]], model=model)
    assert plain.keys == [(0, 0), (1, 0), (2, 0), (2, 1)]
    assert errors_alone(plain, model, {0: [7], 1: [9], 2: [11, 13]}) < TOLERANCE_TINY


# ---- tokens ----------------------------------------------------------------------------------------------------------

BOS_FIRST = "<bos>{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize("bos", ["auto", "always", "window"])
def test_a_template_that_begins_with_bos_gets_no_second_one(bos: str, tmp_path: Path) -> None:  # E26
    tokenizer = byte_tokenizer(chat_template=BOS_FIRST)
    chat = [{"messages": [{"role": "user", "content": "hi"}]}]
    plain = run(tmp_path / "chat", chat, tokenizer=tokenizer, data={"messages": "messages"}, tokens={"bos": bos})
    hi = byte_tokenizer()("hi", add_special_tokens=False)["input_ids"]
    assert plain.ids(0) == [0, *hi]
    assert run(tmp_path / "text", ["hi"], tokenizer=tokenizer, tokens={"bos": bos}).ids(0) == [0, *hi]


def test_another_tokenizer_may_not_go_on_with_a_run(tmp_path: Path) -> None:  # E27
    with_bos = run(tmp_path / "with", ["ab", "cd"])
    without = run(tmp_path / "without", ["ab", "cd"], tokenizer=byte_tokenizer(bos=False))
    assert (with_bos.ids(0)[0], without.ids(0)[0]) == (0, 66)
    before = snapshot(tmp_path / "with")
    with pytest.raises(RequestError, match="content of the tokenizer"):
        run(tmp_path / "with", ["ab", "cd"], tokenizer=byte_tokenizer(bos=False))
    assert snapshot(tmp_path / "with") == before


LONG = [list(range(2, 7)), list(range(10, 18)), list(range(20, 33))]  # 5, 8 and 13 ids


def test_long_rows_of_ids_are_cut_into_windows_without_a_bos_of_ours(tmp_path: Path) -> None:  # E29
    plain = run_ids(tmp_path / "run", LONG, tokens={"context": 8})
    assert plain.tokens["token"].tolist() == [i for row in LONG for i in row]
    assert plain.tokens["chunk"].tolist() == [0] * 5 + [0] * 8 + [0] * 8 + [1] * 5


def test_truncation_accounts_for_every_token(tmp_path: Path) -> None:  # E29
    plain = run_ids(tmp_path / "run", LONG, tokens={"context": 8, "long": "truncate"})
    (record,) = plain.records.values()
    assert (record["rows"], record["tokens"], record["dropped_tokens"]) == (21, 21, 5)
    assert [row["tokens"] for row in plain.documents] == [5, 8, 13]
    assert [row["reason"] for row in plain.documents] == [None, None, "truncated"]


def test_a_long_row_fails_the_run_by_name_or_is_listed(tmp_path: Path) -> None:  # E29
    tokens = {"context": 8, "long": "fail"}
    with pytest.raises(WorkError, match=r"document 2.*longer than 8 tokens"):
        run_ids(tmp_path / "fail", LONG, tokens=tokens)
    plain = run_ids(tmp_path / "skip", LONG, tokens=tokens, data={"on_bad": "skip"})
    assert plain.keys == by_position(LONG[:2])
    assert plain.documents[2]["reason"] == "longer than 8 tokens"


def test_bos_is_excluded_wherever_it_stands(tmp_path: Path) -> None:  # E30
    documents = [[0, 5, 6, 0, 7], [8, 0, 0, 9], [0]]
    plain = run_ids(tmp_path / "run", documents, capture={"exclude": ["bos"]})
    assert plain.keys == [key for key in by_position(documents) if documents[key[0]][key[1]] != 0]
    assert 0 not in plain.tokens["token"]
    assert [row["tokens"] for row in plain.documents] == [5, 4, 1]
    model = tiny_llama()
    expected = alone(model, documents[0], ["residual.2"])["residual.2"][[1, 2, 4]].numpy()
    np.testing.assert_allclose(plain.of(0, "residual.2"), expected, rtol=1e-4, atol=1e-4)


def test_no_token_is_lost_where_windows_begin_with_a_bos(tmp_path: Path) -> None:  # E31
    text = "abcdefghijklmnopqrst"
    plain = run(tmp_path / "run", [text], tokens={"context": 8, "bos": "window"})
    inside = byte_tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert plain.tokens["token"].tolist() == [0, *inside]
    assert plain.tokens["position"].tolist() == list(range(21))
    assert np.bincount(plain.tokens["chunk"]).tolist() == [8, 7, 6]
    model = tiny_llama(vocab=300)
    second = alone(model, [0, *inside[7:14]], ["residual.2"])["residual.2"][1:]
    stored = torch.from_numpy(plain.rows["residual.2"][8:15])
    assert float(((stored - second).norm(dim=1) / second.norm(dim=1)).max()) < TOLERANCE_TINY


@pytest.mark.parametrize(("choice", "middle"), [("literal", [30, 71, 81, 85, 32]), ("parse", [1])])
def test_text_that_spells_a_special_token(choice: str, middle: list[int], tmp_path: Path) -> None:  # E32
    plain = run(tmp_path / "run", ["a<eos>b"], tokens={"special_in_text": choice, "bos": "never"})
    spelled = byte_tokenizer()("<>", add_special_tokens=False)["input_ids"]
    middle = middle if choice == "parse" else [spelled[0], 70, 80, 84, spelled[1]]  # "e", "o", "s" from "a" = 66
    assert plain.ids(0) == [66, *middle, 67]
    assert json.loads((tmp_path / "run/run.json").read_text())["job"]["tokens"]["special_in_text"] == choice


def test_a_tokenizer_without_padding_and_a_model_without_tokenizer(tmp_path: Path) -> None:  # E33
    model = tiny_llama(vocab=300)
    plain = run(tmp_path / "text", ["a", "abc"], model=model)
    assert errors_alone(plain, model, {0: [0, 66], 1: [0, 66, 67, 68]}) < TOLERANCE_TINY
    model.save_pretrained(tmp_path / "model")
    file = jsonl(tmp_path / "ids.jsonl", ids([66], [66, 67, 68]))
    settings = {"model": {"name": str(tmp_path / "model")}, "data": {"path": str(file), "ids": "input_ids"}}
    harvest.run(job(tmp_path / "ids", **settings))
    assert errors_alone(read_plain(tmp_path / "ids"), model, {0: [66], 1: [66, 67, 68]}) < TOLERANCE_TINY


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama])
def test_documents_beyond_the_position_table_are_windowed_at_its_end(build: Any, tmp_path: Path) -> None:  # E34
    dice = np.random.default_rng(1)
    documents = [[int(i) for i in dice.integers(2, 64, n)] for n in (3, 65, 200, 7)]
    model = build()
    plain = run_ids(tmp_path / "run", documents, model=model)
    assert plain.keys == by_position(documents)
    assert [int(plain.tokens["chunk"][plain.tokens["document"] == i].max()) for i in range(4)] == [0, 1, 3, 0]
    assert errors_alone(plain, model, {0: documents[0], 3: documents[3]}) < TOLERANCE_TINY
    first = alone(model, documents[2][:64], ["residual.2"])["residual.2"].numpy()
    np.testing.assert_allclose(plain.of(2, "residual.2")[:64], first, rtol=1e-4, atol=1e-4)


def test_every_window_is_itself_alone(tmp_path: Path) -> None:  # E35
    document, model = [int(i) for i in np.random.default_rng(2).integers(2, 64, 12)], tiny_llama()
    plain = run_ids(tmp_path / "run", [document], model=model, tokens={"context": 4})
    assert plain.tokens["position"].tolist() == list(range(12))
    assert plain.tokens["chunk"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for chunk in range(3):
        window = alone(model, document[4 * chunk : 4 * chunk + 4], ["residual.2"])["residual.2"]
        stored = torch.from_numpy(plain.rows["residual.2"][4 * chunk : 4 * chunk + 4])
        assert float(((stored - window).norm(dim=1) / window.norm(dim=1)).max()) < TOLERANCE_TINY


@pytest.mark.parametrize("way", ["list", "file"])
def test_broken_unicode_spoils_its_own_document_alone(way: str, tmp_path: Path) -> None:  # E36
    texts, model = ["ok", "a\ud800b", "fine"], tiny_llama(vocab=300)
    data = texts if way == "list" else jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    with pytest.raises(WorkError, match=r"document 1 .*broken unicode"):
        run(tmp_path / "fail", data, model=model)
    plain = run(tmp_path / "skip", data, model=model, data={"on_bad": "skip"})
    assert [(row["document"], row["status"], row["reason"]) for row in plain.documents] == [
        (0, "stored", None),
        (1, "skipped", "broken unicode"),
        (2, "stored", None),
    ]
    good = {i: byte_tokenizer()(texts[i])["input_ids"] for i in (0, 2)}
    assert errors_alone(plain, model, good) < TOLERANCE_TINY
    assert json.loads((tmp_path / "skip/complete.json").read_text())["skipped"] == {"broken unicode": 1}


# ---- numbers -----------------------------------------------------------------------------------------------------


def test_float16_that_overflows_is_counted_by_name_and_kept_out_of_the_sums(tmp_path: Path) -> None:  # E37
    def build() -> Any:
        model = tiny_llama()
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight[3] *= 3e5
        return model

    full = run_ids(tmp_path / "full", IDS, model=build())
    assert [record["non_finite"] for record in full.records.values()] == [{}]
    assert np.abs(stacked(full, "residual.0")).max() > 65504
    half = run_ids(tmp_path / "half", IDS, model=build().half())
    counts = {n: int((~np.isfinite(rows.astype(np.float32))).sum()) for n, rows in half.rows.items()}
    (record,) = half.records.values()
    assert counts["residual.0"] > 0
    assert record["non_finite"] == {name: count for name, count in counts.items() if count}
    assert json.loads((tmp_path / "half/complete.json").read_text())["non_finite"] == record["non_finite"]


def test_one_nan_costs_one_row_of_every_statistic(tmp_path: Path) -> None:  # E39
    documents, model = [[2 + i % 60, 3 + i % 50, 4, 5] for i in range(24)] + [[61, 62, 63, 61]], tiny_llama()

    def poison(hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        hidden[:, :, 2][input_ids == 63] = torch.nan
        return hidden

    Meddler(model, 2, poison)
    plain = run_ids(tmp_path / "run", documents, model=model, store={"shard_documents": 13})
    assert [record["non_finite"] for record in plain.records.values()] == [{}, {"residual.2": 1}]
    rows = stacked(plain, "residual.2")
    finite = rows[np.isfinite(rows).all(axis=1)]
    assert (len(rows), len(finite)) == (100, 99)
    found = harvest.open(tmp_path / "run").statistics()["residual.2"]
    assert (found.count, found.non_finite_rows, found.non_finite) == (99, 1, 1)
    np.testing.assert_allclose(found.mean, finite.mean(axis=0), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(found.variance, finite.var(axis=0), rtol=1e-11)


# ---- store -----------------------------------------------------------------------------------------------------------


def test_growing_where_the_last_chunk_is_not_full_adds_whole_rows(tmp_path: Path) -> None:  # E44
    documents = [[2 + i] for i in range(20)]
    file = jsonl(tmp_path / "ids.jsonl", ids(*documents))
    tables: dict[str, Any] = {"model": tiny_llama(), "tokenizer": None, "store": {"shard_documents": 8}}
    run(tmp_path / "run", file, data={"ids": "input_ids", "limit": 10}, **tables)
    grown = run(tmp_path / "run", file, data={"ids": "input_ids", "limit": 20}, **tables)
    assert grown.keys == by_position(documents)
    assert errors_alone(grown, tables["model"], dict(enumerate(documents))) < TOLERANCE_TINY
    assert len(np.unique(grown.rows["residual.0"], axis=0)) == 20


def test_one_token_of_each_long_document_costs_one_row_of_disk(tmp_path: Path) -> None:  # E46
    documents = [[2 + (i + j) % 62 for j in range(60)] for i in range(64)]
    plain = run_ids(tmp_path / "run", documents, capture={"layers": [0], "positions": "last"})
    assert plain.keys == [(i, 59) for i in range(64)]
    (record,) = plain.records.values()
    assert record["objects"]["residual.0/c.0.0"]["bytes"] <= 64 * 16 * 4 + 64


def test_a_full_disk_ends_the_run_by_name_and_room_finishes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # E47
    documents = [[2 + i % 60] * (1 + i % 9) for i in range(40)]
    tables: dict[str, Any] = {"store": {"shard_documents": 5}}
    clean = run_ids(tmp_path / "clean", documents, **tables)
    with monkeypatch.context() as patch:
        made = install(patch, lambda files: FaultyFiles(files, Faults(full_after=60_000)))
        with pytest.raises(WorkError, match=rf"disk full: {tmp_path}/run/.* more bytes are needed"):
            run_ids(tmp_path / "run", documents, **tables)
        assert made[0].faults.calls["open_write"] < 200, "it ended, it did not try for ever"
    half = read_plain(tmp_path / "run")
    assert 0 < len(half.records) < len(clean.records)
    assert not half.complete
    rows = len(half.rows["residual.0"])
    assert half.rows["residual.0"].tobytes() == clean.rows["residual.0"][:rows].tobytes()
    assert not verify_run(tmp_path / "run").damaged
    assert first_difference(clean, run_ids(tmp_path / "run", documents, **tables)) is None
    assert attempts_without_record(tmp_path / "run") == []


def test_overwriting_removes_the_earlier_run_once_and_nothing_else(tmp_path: Path) -> None:  # E48
    run_ids(tmp_path / "run", IDS * 3, store={"shard_documents": 2})
    (tmp_path / "run/notes.txt").write_text("mine")
    plain = run_ids(tmp_path / "run", IDS[:2], run={"overwrite": True})
    assert plain.keys == by_position(IDS[:2])
    assert (tmp_path / "run/notes.txt").read_text() == "mine"
    assert attempts_without_record(tmp_path / "run") == []
    clean = run_ids(tmp_path / "clean", IDS[:2])
    assert first_difference(clean, plain) is None


def test_other_layers_into_the_same_folder_are_refused_and_the_arrays_stay(tmp_path: Path) -> None:  # E49
    run_ids(tmp_path / "run", IDS, capture={"layers": [0, 1]})
    before = snapshot(tmp_path / "run")
    with pytest.raises(RequestError, match=r"capture\.layers: \[0, 1\] -> \[2\]"):
        run_ids(tmp_path / "run", IDS, capture={"layers": [2]})
    assert snapshot(tmp_path / "run") == before


# ---- resuming --------------------------------------------------------------------------------------------------------

SIX = [[2 + i, 3 + i, 4 + i][: 1 + i % 3] for i in range(6)]
ONE_EACH = {"store": {"shard_documents": 1}}


@pytest.mark.parametrize("operation", ["create ledger/f00000-s000002.json", "close shards/f00000-s000003"])
def test_a_crash_between_data_and_record_repeats_no_row(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # E52, E56: the attempt is whole, or begun, and its record is not there
    clean = run_ids(tmp_path / "clean", SIX, **ONE_EACH)

    class Dying(Failing):
        def operation(self, what: str) -> bool:
            super().operation(what)
            return what.startswith(operation)

    with monkeypatch.context() as patch:
        install(patch, Dying)
        with pytest.raises(Died):
            run_ids(tmp_path / "run", SIX, **ONE_EACH)
    bury(tmp_path / "run")
    left = attempts_without_record(tmp_path / "run")
    assert left, "what had been written is there and does not count"
    assert len(read_plain(tmp_path / "run").records) >= 2
    assert first_difference(clean, run_ids(tmp_path / "run", SIX, **ONE_EACH)) is None
    assert attempts_without_record(tmp_path / "run") == []


class Flaky:
    """Makes the model raise in the forwards that hold a token, so many times."""

    def __init__(self, model: Any, token: int, times: float) -> None:
        self.token, self.left, self.raised = token, times, 0
        model.model.register_forward_pre_hook(self._maybe, with_kwargs=True)

    def _maybe(self, _m: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        if self.left > 0 and bool((kwargs["input_ids"] == self.token).any()):
            self.left -= 1
            self.raised += 1
            raise RuntimeError("the card fell off the bus")


@pytest.mark.parametrize("times", [1, 2])
def test_a_capture_that_fails_now_and_then_is_tried_again_in_the_same_run(times: int, tmp_path: Path) -> None:  # E53
    documents = [*SIX[:4], [50, 51], SIX[5]]
    clean = run_ids(tmp_path / "clean", documents, **ONE_EACH)
    model = tiny_llama()
    flaky = Flaky(model, 50, times)
    plain = run_ids(tmp_path / "run", documents, model=model, **ONE_EACH)
    assert flaky.raised == times
    assert first_difference(clean, plain) is None
    assert attempts_without_record(tmp_path / "run") == []


def test_documents_of_none_and_of_many_windows_resume_by_row_not_by_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # E54
    documents = [[], [5, 6, 7], list(range(10, 21)), [], list(range(30, 37)), [8]]
    tables: dict[str, Any] = {**ONE_EACH, "tokens": {"context": 4}}
    clean = run_ids(tmp_path / "clean", documents, **tables)
    assert [row["status"] for row in clean.documents] == ["skipped", "stored", "stored", "skipped", "stored", "stored"]
    assert clean.keys == by_position(documents)
    for key in range(6):
        path = tmp_path / f"run-{key}"

        class Dying(Failing):
            def operation(self, what: str, key: int = key) -> bool:
                super().operation(what)
                return what == f"create ledger/f00000-s00000{key}.json"

        with monkeypatch.context() as patch:
            install(patch, Dying)
            with pytest.raises(Died):
                run_ids(path, documents, **tables)
        bury(path)
        assert first_difference(clean, run_ids(path, documents, **tables)) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("weights", "content of the model"),
        ("tokenizer", "content of the tokenizer"),
        ("data", "data file texts.jsonl"),
        ({"capture": {"layers": [0]}}, "capture.layers"),
        ({"capture": {"positions": "last"}}, "capture.positions"),
        ({"model": {"dtype": "bfloat16"}}, "model.dtype"),
        ({"store": {"dtype": "float16"}}, "store.dtype"),
        ({"tokens": {"context": 8}}, "tokens.context"),
        ({"tokens": {"bos": "never"}}, "tokens.bos"),
        ({"data": {"sample": 0.5}}, "data.sample"),
        ({"data": {"limit": 2}}, "data.limit"),
        ({"run": {"threads": 2}}, "resolved.threads"),
    ],
    ids=str,
)
def test_a_run_goes_on_only_with_what_it_began_with(change: Any, named: str, tmp_path: Path) -> None:  # E57
    tiny_llama(vocab=300).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    file = jsonl(tmp_path / "texts.jsonl", [{"text": f"text {i}"} for i in range(6)])

    def settings(changes: dict[str, Any]) -> dict[str, Any]:
        tables: dict[str, dict[str, Any]] = {
            "model": {"name": str(tmp_path / "model")},
            "data": {"path": str(file), "limit": 4},
            "store": {"shard_documents": 2},
        }
        for table, values in changes.items():
            tables[table] = {**tables.get(table, {}), **values}
        return job(tmp_path / "run", **tables)

    harvest.run(settings({}))
    before = snapshot(tmp_path / "run")
    if change == "weights":
        tiny_llama(vocab=300, seed=1).save_pretrained(tmp_path / "model")
    elif change == "tokenizer":
        byte_tokenizer(bos=False).save_pretrained(tmp_path / "model")
    elif change == "data":
        jsonl(file, [{"text": f"TEXT {i}"} for i in range(6)])
    with pytest.raises(RequestError) as raised:
        harvest.run(settings(change if isinstance(change, dict) else {}))
    assert f"the run began with other settings: {named}: " in str(raised.value)
    assert "\n" not in str(raised.value)
    assert snapshot(tmp_path / "run") == before


def test_a_document_that_always_fails_ends_the_run_by_name_and_the_others_are_kept(tmp_path: Path) -> None:  # E58
    documents = [[2 + i, 3 + i] for i in range(5)] + [[60, 61]] + [[20 + i] for i in range(4)]
    model = tiny_llama()
    flaky = Flaky(model, 60, float("inf"))
    with pytest.raises(WorkError, match=r"shard f00000-s000005: RuntimeError: the card fell off.* after 2 attempts"):
        run_ids(tmp_path / "run", documents, model=model, run={"attempts": 2}, **ONE_EACH)
    assert flaky.raised == 2
    plain = read_plain(tmp_path / "run")
    assert [row["document"] for row in plain.documents] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert not plain.complete
    status = status_of(str(tmp_path / "run"))
    assert (status["committed"], status["missing"], status["state"]) == (9, 1, "unfinished")
    assert list(status["failed"]) == ["f00000-s000005"]
    flaky.left = 0
    clean = run_ids(tmp_path / "clean", documents, **ONE_EACH)
    resumed = run_ids(tmp_path / "run", documents, model=model, run={"attempts": 2}, **ONE_EACH)
    assert first_difference(clean, resumed) is None


# ---- data ------------------------------------------------------------------------------------------------------------


def test_text_lies_in_the_column_that_the_job_names(tmp_path: Path) -> None:  # E66
    content = jsonl(tmp_path / "content.jsonl", [{"content": "ab", "url": "http://x"}])
    with pytest.raises(RequestError, match=r"'text'.*content.*url"):
        run(tmp_path / "run", content)
    assert not (tmp_path / "run").exists()
    assert run(tmp_path / "named", content, data={"text": "content"}).ids(0) == [0, 66, 67]
    assert run(tmp_path / "other", content, data={"text": "url"}).ids(0) == byte_tokenizer()("http://x")["input_ids"]
    nested = jsonl(tmp_path / "nested.jsonl", [{"data": {"body": "ab"}}])
    assert run(tmp_path / "nested", nested, data={"text": "data.body"}).ids(0) == [0, 66, 67]
    chat = jsonl(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "ab"}]}])
    tokenizer = byte_tokenizer(chat_template=BOS_FIRST)
    assert run(tmp_path / "chat", chat, tokenizer=tokenizer, data={"messages": "messages"}).ids(0) == [0, 66, 67]


def test_null_text_is_skipped_and_moves_no_other_document(tmp_path: Path) -> None:  # E67
    file, model = jsonl(tmp_path / "t.jsonl", [{"text": "ab"}, {"text": None}, {"text": "cd"}]), tiny_llama(vocab=300)
    plain = run(tmp_path / "run", file, model=model, data={"on_bad": "skip"})
    assert errors_alone(plain, model, {0: [0, 66, 67], 2: [0, 68, 69]}) < TOLERANCE_TINY
    (record,) = plain.records.values()
    assert (record["documents"], record["skipped"]) == (3, {"null": 1})
    with pytest.raises(WorkError, match=r"document 1 \(.*t\.jsonl.*\): null"):
        run(tmp_path / "fail", file, model=model)


@pytest.mark.parametrize("shard_documents", [1, 8])
def test_a_very_long_line_leaves_its_neighbours_right(shard_documents: int, tmp_path: Path) -> None:  # E68
    texts, model = ["ab", "x" * 400_000, "cd"], tiny_llama(vocab=300)
    file = jsonl(tmp_path / "t.jsonl", [{"text": text} for text in texts])
    store, tokens = {"shard_documents": shard_documents}, {"context": 16, "long": "truncate"}
    plain = run(tmp_path / "run", file, model=model, store=store, tokens=tokens)
    assert errors_alone(plain, model, {0: [0, 66, 67], 1: [0, *[89] * 15], 2: [0, 68, 69]}) < TOLERANCE_TINY
    assert [row["tokens"] for row in plain.documents] == [3, 400_001, 3]


def test_an_empty_file_among_others_is_no_obstacle(tmp_path: Path) -> None:  # E69 (a)
    for name, texts in {"a": ["ab"], "b": [], "c": ["cd"]}.items():
        jsonl(tmp_path / f"{name}.jsonl", [{"text": text} for text in texts])
    plain = run(tmp_path / "run", tmp_path / "*.jsonl")
    assert [row["document"] for row in plain.documents] == [0, 2 * 2**40]
    assert plain.complete


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_no_document_at_all_is_refused_and_nothing_is_written(content: str, tmp_path: Path) -> None:  # E69 (b)
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(RequestError, match=r"^data\.path = '.*t\.jsonl': no row in t\.jsonl; "):
        run(tmp_path / "run", tmp_path / "t.jsonl")
    assert not (tmp_path / "run").exists()


def test_nothing_to_harvest_is_a_clean_end_with_no_rows(tmp_path: Path) -> None:  # E69 (b)
    (tmp_path / "t.jsonl").write_text('{"text": ""}\n{"text": ""}\n')
    plain = run(tmp_path / "run", tmp_path / "t.jsonl")
    assert plain.complete
    assert sum(len(rows) for rows in plain.rows.values()) == 0
    assert [row["reason"] for row in plain.documents] == ["empty"] * 2
    opened = harvest.open(tmp_path / "run")
    assert (len(opened), opened.tokens().num_rows, opened["residual.0"].shape) == (0, 0, (0, 16))
    assert not verify_run(tmp_path / "run").damaged
    before = snapshot(tmp_path / "run")
    run(tmp_path / "run", tmp_path / "t.jsonl")
    assert snapshot(tmp_path / "run") == before


def test_a_torn_last_line_is_named_and_the_rows_before_it_are_kept(tmp_path: Path) -> None:  # E69 (c)
    (tmp_path / "t.jsonl").write_text('{"text": "ab"}\n{"text": "cd"}\n{"text": "e')
    with pytest.raises(WorkError, match=r"t\.jsonl.*(line 3|row 2)"):
        run(tmp_path / "fail", tmp_path / "t.jsonl", store={"shard_documents": 1})
    assert [row["document"] for row in read_plain(tmp_path / "fail").documents] == [0, 1]
    plain = run(tmp_path / "skip", tmp_path / "t.jsonl", data={"on_bad": "skip"})
    assert [row["status"] for row in plain.documents] == ["stored", "stored", "skipped"]


def test_blank_lines_and_a_byte_order_mark_are_read_as_usual(tmp_path: Path) -> None:  # E69 (d), (e)
    (tmp_path / "t.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "ab"}\n\n{"text": "cd"}\n\n')
    plain = run(tmp_path / "run", tmp_path / "t.jsonl")
    stored = [row["document"] for row in plain.documents if row["status"] == "stored"]
    assert [plain.ids(document) for document in stored] == [[0, 66, 67], [0, 68, 69]]


# ---- what is left behind -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_each_row_leads_back_to_its_text_with_plain_zarr(dtype: str, tmp_path: Path) -> None:  # E80
    texts = ["Grüße, 世界", "", "plain", "emoji 🙂"]
    run(tmp_path / "run", list(texts), store={"dtype": dtype}, tokens={"context": 8})
    (attempt,) = (tmp_path / "run/shards").iterdir()
    tokens = pq.read_table(attempt / "tokens.parquet").to_pydict()
    rows = zarr.open_group(str(attempt), mode="r")["residual.1"]
    assert (rows.shape, str(rows.dtype)) == ((len(tokens["token"]), 16), dtype)
    assert np.abs(rows[:].astype(np.float64)).sum(axis=1).min() > 0
    for document, text in enumerate(texts):
        found = [t for t, d in zip(tokens["token"], tokens["document"]) if d == document]
        assert byte_tokenizer().decode(found, skip_special_tokens=True) == text


def test_reading_a_folder_that_is_no_run_is_refused_and_leaves_it(tmp_path: Path) -> None:  # E83
    (tmp_path / "notes.txt").write_text("mine")
    before = snapshot(tmp_path)
    for read in (harvest.open, verify_run, lambda path: status_of(str(path))):
        with pytest.raises(RequestError, match="not a run"):
            read(tmp_path)
    assert snapshot(tmp_path) == before
    assert files_below(tmp_path) == ["notes.txt"]


def test_bare_lists_of_token_ids_are_documents(tmp_path: Path) -> None:
    named = run_ids(tmp_path / "named", SIX)
    bare = run(tmp_path / "bare", SIX, model=tiny_llama(), tokenizer=None, data={"ids": "ids"})
    assert first_difference(named, bare) is None
    with pytest.raises(RequestError, match=r"data\.ids = 'ids'"):
        run(tmp_path / "refused", SIX, model=tiny_llama())
    assert not (tmp_path / "refused").exists()
