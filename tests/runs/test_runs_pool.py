"""Pooled rows in whole runs: against float64 numpy over hooks on single documents, with and without the token rows."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
import zarr
from oracle import TOLERANCE_TINY, alone
from plainrun import array, read_plain
from runcase import Died, Failing, bury, install, job, run
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest import plan as planning
from harvest.checking.verify import verify_run
from harvest.errors import RequestError

TEXTS = ["abc", "", "a much longer text than the others", "d", "ee ee ee", "", "xyz" * 9, "k"]
STORED = [text for text in TEXTS if text]
POOLS = ["mean", "last", "max"]
SMALL: dict[str, Any] = {"store": {"shard_documents": 3}, "tokens": {"batch": 48}}


def pooled(path: Path, pool: str, name: str) -> np.ndarray:
    """Every pooled row of a local run, read plainly."""
    attempts = [record["attempt"] for record in read_plain(path).records.values()]
    return np.concatenate([array(path / "shards" / attempt / "pooled" / pool / name) for attempt in attempts])


def oracle(model: Any, positions: slice | list[int], texts: list[str] = STORED) -> dict[str, np.ndarray]:
    out: dict[str, list[np.ndarray]] = {pool: [] for pool in POOLS}
    for text in texts:
        rows = alone(model, byte_tokenizer()(text)["input_ids"], ["residual.2"])["residual.2"].double().numpy()
        values = rows[positions]
        out["mean"].append(values.mean(axis=0))
        out["last"].append(values[-1])
        out["max"].append(values.max(axis=0))
    return {pool: np.array(found) for pool, found in out.items()}


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool((np.linalg.norm(found - expected, axis=1) < TOLERANCE_TINY * np.linalg.norm(expected, axis=1)).all())


@pytest.mark.parametrize("store", [True, False])
def test_pooled_rows_are_what_hooks_on_single_documents_give(tmp_path: Path, store: bool) -> None:
    model = tiny_llama(vocab=300)
    plain = run(tmp_path / "run", list(TEXTS), model=model, capture={"pool": POOLS, "store": store}, **SMALL)
    assert len(plain.records) == 3
    assert bool(plain.rows) == store
    for pool, expected in oracle(model, slice(None)).items():
        found = pooled(tmp_path / "run", pool, "residual.2")
        assert found.dtype == np.float32
        assert close(found, expected)
    assert not verify_run(tmp_path / "run").findings
    group = zarr.open_group(tmp_path / "run" / "shards" / plain.records["f00000-s000000"]["attempt"], mode="r")
    assert group["pooled/mean/residual.2"].shape == (2, 16)


def test_what_is_excluded_takes_no_part_in_the_mean_and_positions_are_pooled_as_stored(tmp_path: Path) -> None:
    model = tiny_llama(vocab=300)
    run(tmp_path / "a", STORED, model=model, capture={"pool": POOLS, "exclude": ["bos"]})
    assert close(pooled(tmp_path / "a", "mean", "residual.2"), oracle(model, slice(1, None))["mean"])
    run(tmp_path / "b", STORED, model=model, capture={"pool": POOLS, "positions": [1, -1], "store": False})
    assert close(pooled(tmp_path / "b", "mean", "residual.2"), oracle(model, [1, -1])["mean"])
    spans = [{"t": text, "s": {"name": "x", "start": 0, "end": 1}} for text in STORED]
    run(
        tmp_path / "c",
        spans,
        model=model,
        data={"text": "t", "spans": "s"},
        capture={"pool": ["mean"], "positions": {"span": ["x"]}, "store": False},
    )
    assert close(pooled(tmp_path / "c", "mean", "residual.2"), oracle(model, [1])["mean"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_documents_over_several_windows_and_sort_windows_are_pooled_across_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(planning, "SORT_WINDOW_BYTES", 5 * 16 * 4)  # five rows of one name
    texts = ["abcdefgh" * 8, "x", "yz" * 20]
    tables: dict[str, Any] = {"tokens": {"context": 8}, "store": {"dtype": dtype}}
    plain = run(tmp_path / "run", texts, capture={"pool": POOLS, "layers": [2]}, **tables)
    rows = plain.rows["residual.2"]
    values = (rows.astype("<u4") << 16).view("<f4") if dtype == "bfloat16" else rows
    for pool in POOLS:
        found = pooled(tmp_path / "run", pool, "residual.2")
        for document in range(3):
            own = values[plain.tokens["document"] == document].astype(np.float64)
            total = np.zeros(16)
            for row in own:
                total = total + row
            expected = {"mean": total / len(own), "last": own[-1], "max": own.max(axis=0)}[pool]
            assert found[document].tobytes() == expected.astype(np.float32).tobytes()


def test_a_run_that_only_pools_keeps_the_bits_of_one_that_stores_rows_too(tmp_path: Path) -> None:
    for name, capture in [("rows", {"pool": POOLS}), ("pools", {"pool": POOLS, "store": False})]:
        run(tmp_path / name, list(TEXTS), capture=capture, **SMALL)
    for pool in POOLS:
        a, b = (pooled(tmp_path / name, pool, "residual.1") for name in ("rows", "pools"))
        assert a.tobytes() == b.tobytes()
    only = {"capture": {"pool": ["max"], "store": False}, "statistics": {"moments": False}}
    run(tmp_path / "alone", list(TEXTS), **only, **SMALL)
    assert harvest.open(tmp_path / "alone").features("residual.1", "max").tobytes() == a.tobytes()


def test_only_empty_documents_leave_pools_of_no_rows(tmp_path: Path) -> None:
    run(tmp_path / "run", ["", ""], capture={"pool": POOLS})
    assert pooled(tmp_path / "run", "mean", "residual.0").shape == (0, 16)
    assert harvest.open(tmp_path / "run").features("residual.0").shape == (0, 16)
    assert not verify_run(tmp_path / "run").findings


@pytest.mark.parametrize("at", range(6, 60, 5))
def test_a_life_that_dies_while_it_pools_is_mended_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Every second time without token rows."""
    tables: dict[str, Any] = {"capture": {"pool": ["mean", "max"], "layers": [1], "store": at % 2 == 0}, **SMALL}
    clean = run(tmp_path / "clean", list(TEXTS), **tables)
    with monkeypatch.context() as patch:
        install(patch, lambda files: Failing(files, at))
        with contextlib.suppress(Died):
            run(tmp_path / "killed", list(TEXTS), **tables)
        bury(tmp_path / "killed")
    mended = run(tmp_path / "killed", list(TEXTS), **tables)
    assert any("pooled/mean/residual.1/c.0.0" in path for path in clean.objects)
    assert (clean.documents, clean.objects, clean.statistics) == (mended.documents, mended.objects, mended.statistics)


# ---- damage ------------------------------------------------------------------------------------------------------


def test_damage_to_a_pooled_array_is_found_and_never_read_as_numbers(tmp_path: Path) -> None:
    run(tmp_path / "run", list(STORED), capture={"pool": ["mean"], "layers": [0]})
    (folder,) = (tmp_path / "run").glob("shards/*/pooled/mean/residual.0")
    whole = (folder / "c.0.0").read_bytes()
    for broken in (whole[:-1], bytes([whole[0] ^ 1]) + whole[1:], None):
        if broken is None:
            (folder / "c.0.0").unlink()
        else:
            (folder / "c.0.0").write_bytes(broken)
        found = [finding for finding in verify_run(tmp_path / "run").findings if finding.damage]
        assert [finding.object.rpartition("pooled/")[2] for finding in found] == ["mean/residual.0/c.0.0"]
    with pytest.raises(harvest.errors.DamageError, match=r"c\.0\.0: missing"):
        harvest.open(tmp_path / "run").features("residual.0")


def test_a_pooled_array_of_another_number_of_documents_is_found_even_where_the_ledger_agrees(tmp_path: Path) -> None:
    import google_crc32c

    run(tmp_path / "run", list(STORED), capture={"pool": ["mean"], "layers": [0]})
    run(tmp_path / "other", list(STORED[:3]), capture={"pool": ["mean"], "layers": [0]})
    (folder,), (other,) = ((tmp_path / n).glob("shards/*/pooled/mean/residual.0") for n in ("run", "other"))
    (ledger,) = (tmp_path / "run" / "ledger").iterdir()
    record = json.loads(ledger.read_text())
    for file in ("c.0.0", "zarr.json"):
        data = (other / file).read_bytes()
        (folder / file).write_bytes(data)
        crc = f"{google_crc32c.value(data):08x}"
        record["objects"][f"pooled/mean/residual.0/{file}"] = {"bytes": len(data), "crc32c": crc}
    record.pop("crc32c")
    body = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    ledger.write_text(
        json.dumps(record | {"crc32c": f"{google_crc32c.value(body):08x}"}, indent=1, sort_keys=True) + "\n"
    )
    found = [str(finding) for finding in verify_run(tmp_path / "run").findings if finding.damage]
    assert "float32 [3, 16], the ledger says float32 [6, 16]" in found[0]
    assert found[1:] == [finding for finding in found if "complete.json: bytes" in finding], "the totals differ too"


# ---- features ----------------------------------------------------------------------------------------------------


def labelled(texts: list[str]) -> list[dict[str, Any]]:
    return [{"text": text, "label": i % 2, "id": f"d{i}"} for i, text in enumerate(texts)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_features_are_the_same_bits_whether_they_were_kept_or_are_pooled_now(tmp_path: Path, dtype: str) -> None:
    tables = {**SMALL, "store": {**SMALL["store"], "dtype": dtype}}
    run(tmp_path / "kept", labelled(TEXTS), capture={"pool": POOLS}, data={"keep": ["label", "id"]}, **tables)
    run(tmp_path / "rows", labelled(TEXTS), data={"keep": ["label", "id"]}, **tables)
    for pool in POOLS:
        kept, now = (harvest.open(tmp_path / name).features("residual.2", pool) for name in ("kept", "rows"))
        assert kept.dtype == now.dtype == np.float32
        assert kept.tobytes() == now.tobytes()
        assert kept.tobytes() == pooled(tmp_path / "kept", pool, "residual.2").tobytes()


def test_labels_come_row_by_row_with_the_features_and_fit_a_classifier(tmp_path: Path) -> None:
    from sklearn.linear_model import LogisticRegression

    model = tiny_llama(vocab=300)
    data = {"keep": ["label", "id"]}
    run(tmp_path / "run", labelled(TEXTS), model=model, capture={"pool": ["mean"], "store": False}, data=data, **SMALL)
    features, labels = harvest.open(tmp_path / "run").features("residual.2", "mean", labels=["label", "id", "document"])
    assert close(features, oracle(model, slice(None))["mean"])
    kept = [row for row in labelled(TEXTS) if row["text"]]
    assert labels.column_names == ["label", "id", "document"]
    assert labels["id"].to_pylist() == [row["id"] for row in kept]
    assert labels["document"].to_pylist() == [i for i, text in enumerate(TEXTS) if text]
    fitted = LogisticRegression(C=1e6).fit(features, labels["label"])
    assert fitted.predict(features).tolist() == [row["label"] for row in kept]


def test_features_that_cannot_be_had_are_refused_by_name(tmp_path: Path) -> None:
    run(tmp_path / "run", ["ab"], capture={"pool": ["mean"], "store": False})
    opened = harvest.open(tmp_path / "run")
    for call, words in [
        (lambda: opened.features("residual.9"), "residual.9.*this run has"),
        (lambda: opened.features("residual.0", "median"), "median.*allowed are mean, last, max"),
        (lambda: opened.features("residual.0", "max"), "stores no rows.*it keeps mean"),
        (lambda: opened.features("residual.0", "mean", labels=["y"]), r"'y' is not in documents\(\).*data\.keep"),
    ]:
        with pytest.raises(RequestError, match=words):
            call()
    with pytest.raises(RequestError, match=r"capture\.pool"):
        run(tmp_path / "bad", ["ab"], capture={"pool": ["median"]})
    with pytest.raises(RequestError, match=r"capture\.store = false"):
        run(tmp_path / "none", ["ab"], capture={"store": False}, statistics={"moments": False})


def test_the_plan_counts_the_bytes_of_pooled_rows(tmp_path: Path) -> None:
    model, tokenizer = tiny_llama(vocab=300), byte_tokenizer()

    def stored(**capture: Any) -> int:
        asked = harvest.config.load_job(job(tmp_path, model={"name": "m"}, data={"path": "d"}, capture=capture))
        made = planning.make_plan(asked, model=model, tokenizer=tokenizer, data=["ab", "cd"])
        assert made.estimate.store_bytes is not None
        assert made.estimate.shards == 1
        return made.estimate.store_bytes - made.estimate.state_bytes

    assert stored(pool=["mean", "max"], layers=[0], store=False) == 2 * 2 * 16 * 4
    assert stored(pool=["mean"], layers=[0]) - stored(layers=[0]) == 2 * 16 * 4


# ---- cases of other tools' users ---------------------------------------------------------------------------------


def test_e20_numbers_that_are_none_in_the_padding_reach_no_row_and_no_pool(tmp_path: Path) -> None:
    model, documents = tiny_llama(vocab=64), [[5, 9, 17], [23, 31, 40, 50, 60, 7, 8, 11, 12]]
    expected = [alone(model, ids, ["residual.2"])["residual.2"].double().numpy() for ids in documents]
    seen: list[torch.Tensor] = []

    def spoil(_module: Any, _args: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        hidden[seen[-1] == 0] = float("nan")  # the padding's id, which no document holds
        return output

    model.model.register_forward_pre_hook(lambda _m, _a, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    model.model.layers[2].register_forward_hook(spoil)
    rows = [{"ids": ids} for ids in documents]
    plain = run(tmp_path / "run", rows, model=model, tokenizer=None, data={"ids": "ids"}, capture={"pool": POOLS})
    assert any((ids == 0).any() and len(ids) == 2 for ids in seen)  # one batch, padded
    for document, values in enumerate(expected):
        assert close(plain.of(document, "residual.2").astype(np.float64), values)
    means = np.array([values.mean(axis=0) for values in expected])
    assert close(pooled(tmp_path / "run", "mean", "residual.2"), means)
    assert not any(record["non_finite"] for record in plain.records.values())


def test_e74_a_position_is_counted_from_each_prompts_own_end_and_one_too_short_is_named(tmp_path: Path) -> None:
    model = tiny_llama(vocab=300)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}<eos>A:"
    tokenizer = byte_tokenizer(chat_template=template)
    prompts = ["", "ab", "abcde", "abcdefghi"]
    chats = [{"m": prompt} for prompt in prompts[1:]]
    plain = run(
        tmp_path / "run",
        chats,
        model=model,
        tokenizer=tokenizer,
        data={"messages": "m"},
        capture={"positions": [-1, -4]},
        tokens={"batch": 64},
    )
    for document, prompt in enumerate(prompts[1:]):
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) == len(prompt) + 3
        at = plain.tokens["position"][plain.tokens["document"] == document].tolist()
        assert at == [len(ids) - 4, len(ids) - 1]
        expected = alone(model, ids, ["residual.2"])["residual.2"][at].double().numpy()
        assert close(plain.of(document, "residual.2").astype(np.float64), expected)
    short = run(
        tmp_path / "short",
        chats,
        tokenizer=tokenizer,
        data={"messages": "m"},
        capture={"positions": [-1, -6]},
    )
    assert [(row["document"], row["reason"]) for row in short.documents if row["status"] == "skipped"] == [
        (0, "too short for position -6")
    ]


def test_e76_the_mean_over_tokens_and_the_mean_over_documents_are_two_figures_each_under_its_name(
    tmp_path: Path,
) -> None:
    model = tiny_llama(vocab=64, layers=1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed_tokens" in name:
                weight[5], weight[6] = 0.0, 10.0
            elif "proj" in name:
                weight.zero_()  # attention and MLP add nothing: a residual is its token's embedding
    documents = [{"ids": [5]}, {"ids": [6] * 9}]
    run(tmp_path / "run", documents, model=model, tokenizer=None, data={"ids": "ids"}, capture={"pool": ["mean"]})
    opened = harvest.open(tmp_path / "run")
    assert opened.statistics()["residual.0"].mean.tolist() == [9.0] * 16
    assert opened.features("residual.0", "mean").mean(axis=0).tolist() == [5.0] * 16
    assert pc.sum(opened.documents().column("rows")).as_py() == 10
