"""Records and their cache: kept as they were, found by what they are, and refused from a file that was touched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harvest.errors import DamageError, HarvestError, RequestError, WorkError
from harvest.model.cache import ActivationCache, ActivationRecord

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def record(seq: int = 4, width: int = 3, **more: Any) -> ActivationRecord:
    told: dict[str, Any] = {"participant": "alice", "message_idx": 0, "layer": 1, "site": "residual"}
    told |= {"tensor": torch.arange(seq * width).reshape(seq, width).float(), "token_span": (0, seq), **more}
    return ActivationRecord(**told)


def same(a: ActivationRecord, b: ActivationRecord) -> bool:
    fields = ("participant", "message_idx", "layer", "site", "token_span", "phases")
    bits = [r.tensor.contiguous().view(torch.uint8).tolist() for r in (a, b)]
    return (
        all(getattr(a, f) == getattr(b, f) for f in fields) and bits[0] == bits[1] and a.tensor.dtype == b.tensor.dtype
    )


@st.composite
def records(draw: Any) -> ActivationRecord:
    seq, width = draw(st.integers(0, 5)), draw(st.integers(1, 4))
    spans = st.tuples(st.integers(0, seq), st.integers(0, seq)).map(lambda pair: tuple(sorted(pair)))
    dtype = draw(st.sampled_from(DTYPES))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    bits = torch.randint(0, 256, (seq, width * dtype.itemsize), dtype=torch.uint8, generator=seed)  # NaNs among them
    return ActivationRecord(
        draw(st.text(max_size=6)),
        draw(st.integers(-1, 3)),
        draw(st.none() | st.integers(0, 3)),
        draw(st.sampled_from(["residual", "attn", "module:lm_head"])),
        bits.view(dtype),
        draw(spans),
        draw(st.dictionaries(st.sampled_from(["prompt", "reasoning", "answer", "ä"]), spans)),
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(records(), max_size=5))
def test_what_is_loaded_is_what_was_saved_bit_by_bit(tmp_path_factory: Any, kept: list[ActivationRecord]) -> None:
    path = tmp_path_factory.mktemp("cache") / "a.safetensors"
    cache = ActivationCache()
    cache.add_batch(kept)
    cache.save(path)
    loaded = ActivationCache.load(path)
    assert len(loaded) == len(kept)
    assert all(same(a, b) for a, b in zip(loaded, kept))
    assert not any(r.tensor.is_inference() for r in loaded)


@settings(deadline=None)
@given(st.lists(records(), max_size=6), st.data())
def test_a_query_finds_just_the_records_that_fit_in_their_order(kept: list[ActivationRecord], data: Any) -> None:
    cache = ActivationCache()
    for one in kept:
        cache.add(one)
    some = data.draw(st.sampled_from(kept)) if kept else record()
    for keys in [(), ("participant",), ("message_idx", "site"), ("participant", "message_idx", "layer", "site")]:
        asked = {key: getattr(some, key) for key in keys if getattr(some, key) is not None}
        expected = [r for r in kept if all(getattr(r, key) == value for key, value in asked.items())]
        found = cache.query(**asked)
        assert len(found) == len(expected)
        assert all(same(a, b) for a, b in zip(found, expected))
    with_answer = [r for r in kept if r.phases.get("answer", (0, 0))[0] < r.phases.get("answer", (0, 0))[1]]
    assert len(cache.query(phase="answer")) == len(with_answer)


def test_rows_are_those_of_the_message_or_of_a_phase() -> None:
    one = record(token_span=(1, 4), phases={"prompt": (0, 1), "reasoning": (1, 3), "answer": (3, 4), "none": (2, 2)})
    assert torch.equal(one.rows(), one.tensor[1:4])
    assert torch.equal(one.rows("reasoning"), one.tensor[1:3])
    assert one.rows("none").shape == (0, 3)
    with pytest.raises(KeyError, match="no phase 'system'; the record has prompt, reasoning, answer, none"):
        one.rows("system")


def test_at_gives_the_one_tensor_and_says_how_many_there_are_otherwise() -> None:
    cache = ActivationCache()
    cache.add_batch([record(), record(layer=2, phases={"answer": (2, 4)}), record(layer=2, site="attn")])
    assert torch.equal(cache.at("alice", 0, 2), record().tensor)
    assert torch.equal(cache.at("alice", 0, 2, phase="answer"), record().tensor[2:4])
    assert len(list(cache)) == len(cache) == 3
    with pytest.raises(KeyError, match=r"expected is one record, 2 of 3 fit participant='alice'"):
        cache.at("alice", 0)
    with pytest.raises(KeyError, match="0 of 3 fit participant='bob'"):
        cache.at("bob", 0, 2)


def test_the_cache_holds_no_more_memory_than_it_shows() -> None:  # E46
    batch, cache = torch.randn(64, 200, 8), ActivationCache()
    cache.add(record(tensor=batch[3, 150:154], token_span=(0, 4)))
    (kept,) = cache
    assert kept.tensor.untyped_storage().nbytes() == 4 * 8 * 4
    batch.zero_()
    assert kept.tensor.abs().sum() > 0


def test_a_tensor_of_its_own_is_kept_and_not_copied() -> None:
    cache, one = ActivationCache(), record()
    cache.add(one)
    assert next(iter(cache)).tensor is one.tensor


def test_what_comes_out_of_inference_mode_can_be_trained_on() -> None:
    cache = ActivationCache()
    with torch.inference_mode():
        cache.add(record(tensor=torch.randn(4, 3)))
    probe = torch.nn.Linear(3, 1)
    probe(cache.at("alice", 0, 1)).sum().backward()
    assert probe.weight.grad is not None


def test_a_graph_is_not_kept_alive() -> None:
    cache = ActivationCache()
    cache.add(record(tensor=torch.randn(4, 3, requires_grad=True) * 2))
    assert not cache.at("alice", 0, 1).requires_grad


def test_a_batch_of_records_is_added_whole_or_not_at_all() -> None:
    cache = ActivationCache()
    with pytest.raises(RequestError, match="record: str given"):
        cache.add_batch([record(), "no record"])  # type: ignore[list-item]
    assert len(cache) == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"token_span": (0, 5)}, r"token_span = \(0, 5\): the sequence has 4 tokens"),
        ({"token_span": (3, 2)}, r"token_span = \(3, 2\)"),
        ({"token_span": (-1, 2)}, r"token_span = \(-1, 2\)"),
        ({"phases": {"answer": (2, 9)}}, r"phases\['answer'\] = \(2, 9\)"),
        ({"phases": {"answer": 3}}, r"phases\['answer'\] = 3: allowed is \(start, stop\)"),
        ({"tensor": torch.zeros(1, 4, 3)}, r"tensor: Tensor of shape \(1, 4, 3\)"),
        ({"tensor": torch.zeros(4, 3, dtype=torch.long)}, "allowed is .* of floats"),
        ({"tensor": [[1.0]]}, "tensor: list"),
        ({"participant": None}, "participant = None: allowed is str"),
        ({"message_idx": "1"}, "message_idx = '1': allowed is int"),
        ({"layer": -1}, "layer = -1: allowed is a true layer index"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        record(**wrong)


@pytest.mark.parametrize("offload", ["disk", "", "meta", "gpu", None, 0, True])
def test_a_place_that_cannot_be_honoured_is_refused(offload: Any) -> None:
    with pytest.raises(RequestError, match=r"offload = .*: allowed are 'cpu', 'none'"):
        ActivationCache(offload)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused_before_anything_is_added() -> None:
    with pytest.raises(RequestError, match="offload = 'cuda:0': this machine has no such device"):
        ActivationCache("cuda:0")


# ---- the file ----------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    cache = ActivationCache()
    cache.add_batch([record(phases={"answer": (1, 3)}), record(seq=1, tensor=torch.ones(1, 3).bfloat16())])
    cache.save(tmp_path / "cache.safetensors")
    return tmp_path / "cache.safetensors"


def test_the_file_is_plain_safetensors(saved: Path) -> None:
    tensors = safetensors.torch.load_file(saved)
    assert torch.equal(tensors["0"], record().tensor)
    assert tensors["1"].dtype == torch.bfloat16


def test_any_bit_that_flips_is_found(saved: Path) -> None:
    good = saved.read_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        saved.write_bytes(bad)
        with pytest.raises(HarvestError, match=r"cache\.safetensors"):
            ActivationCache.load(saved)


@pytest.mark.parametrize(("told", "instead"), [(b'"F32"', b'"I32"'), (b"[4,3]", b"[3,4]"), (b"[4,3]", b"[2,6]")])
def test_numbers_that_would_be_read_as_others_are_found(saved: Path, told: bytes, instead: bytes) -> None:
    good = saved.read_bytes()
    assert good.count(told) == 1
    saved.write_bytes(good.replace(told, instead))
    with pytest.raises(DamageError, match="damaged: tensor 0 does not match its checksum"):
        ActivationCache.load(saved)


def test_a_file_cut_short_or_prolonged_is_found(saved: Path) -> None:
    good = saved.read_bytes()
    for bad in [good[:length] for length in range(0, len(good), 7)] + [good + b"\0"]:
        saved.write_bytes(bad)
        with pytest.raises(DamageError, match=r"cache\.safetensors: damaged"):
            ActivationCache.load(saved)


def test_foreign_files_are_refused_by_name_and_never_overwritten(tmp_path: Path) -> None:
    weights, text, missing = tmp_path / "model.safetensors", tmp_path / "notes.txt", tmp_path / "none.safetensors"
    safetensors.torch.save_file({"0": torch.zeros(2, 2)}, weights)
    text.write_text("my notes")
    for path in (weights, text, tmp_path):
        before = path.read_bytes() if path.is_file() else None
        for call in (ActivationCache.load, ActivationCache().save):
            with pytest.raises(HarvestError, match=path.name):
                call(path)
        assert before is None or path.read_bytes() == before
    with pytest.raises(RequestError, match=r"none\.safetensors: no such file"):
        ActivationCache.load(missing)
    with pytest.raises(RequestError, match="there is no folder"):
        ActivationCache().save(missing / "deeper")
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "notes.txt"]


def test_a_later_version_is_refused(saved: Path) -> None:
    tensors = safetensors.torch.load_file(saved)
    safetensors.torch.save_file(tensors, saved, {"format": "harvest.ActivationCache", "version": "2"})
    with pytest.raises(RequestError, match="cache version 2; this program reads version 1"):
        ActivationCache.load(saved)


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_file: int) -> None:
        raise OSError(28, "No space left on device")

    before = saved.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WorkError, match=r"cache\.safetensors: cannot be written: .*No space left"):
        ActivationCache().save(saved)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]
    monkeypatch.undo()
    ActivationCache().save(saved)
    assert len(ActivationCache.load(saved)) == 0


def test_records_that_share_a_tensor_are_saved_like_others(tmp_path: Path) -> None:
    cache, tensor = ActivationCache(), torch.randn(4, 3)
    cache.add_batch([record(tensor=tensor), record(tensor=tensor, layer=2), record(seq=0), record(seq=0)])
    cache.save(str(tmp_path / "a"))
    assert [len(r.tensor) for r in ActivationCache.load(tmp_path / "a", offload="none")] == [4, 4, 0, 0]
