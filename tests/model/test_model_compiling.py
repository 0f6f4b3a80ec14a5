"""Compiled blocks: the rows of the model as it is, within rounding, and what cannot be compiled refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import TOLERANCE_TINY, alone
from plainrun import read_plain
from tiny import tiny_gpt2, tiny_llama

import harvest
from harvest.config import load_job
from harvest.errors import RequestError
from harvest.model.compiling import compile_blocks, refuse_compiling
from harvest.model.sites import resolve_names
from harvest.plan import make_plan
from harvest.settings.model import ModelSettings

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="torch compiles for a CPU with g++")
LENGTHS = (3, 9, 1, 17, 30, 5)


def documents() -> dict[int, list[int]]:
    rng = np.random.default_rng(5)
    return {i: rng.integers(0, 60, length).tolist() for i, length in enumerate(LENGTHS)}


def job(folder: Path, **model: Any) -> dict[str, Any]:
    return {
        "model": {"name": str(folder / "model"), "compile": True, **model},
        "data": {"path": "windows", "ids": "ids"},
        "capture": {"sites": ["residual"]},
        "run": {"path": str(folder / "run"), "threads": 1},
    }


@needs_compiler
def test_a_compiled_run_stores_the_rows_of_plain_hooks_on_each_document_alone(tmp_path: Path) -> None:
    model = tiny_llama(vocab=64)
    model.save_pretrained(tmp_path / "model")
    torch._dynamo.reset()
    harvest.run(job(tmp_path), data=[{"ids": ids} for ids in documents().values()])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # it was compiled indeed
    plain = read_plain(tmp_path / "run")
    names = [f"residual.{layer}" for layer in range(model.config.num_hidden_layers)]
    for document, ids in documents().items():
        expected = alone(model, ids, names)
        for name in names:
            stored, right = torch.from_numpy(plain.of(document, name)), expected[name]
            assert float(((stored - right).norm(dim=1) / right.norm(dim=1)).max()) < TOLERANCE_TINY


@needs_compiler
def test_the_shapes_that_came_before_leave_no_trace_in_the_bits() -> None:
    """A shard's bits must not tell what its worker did before: kernels are made for all sizes, whichever came first."""
    batches = [torch.randint(0, 64, shape) for shape in ((4, 7), (2, 33), (1, 12), (3, 16))]
    found = []
    for order in (batches, batches[::-1]):
        torch._dynamo.reset()
        model = tiny_llama(vocab=64).eval()
        compile_blocks(model)
        with torch.no_grad():
            states = [model.model(input_ids=ids, use_cache=False).last_hidden_state for ids in order]
        found.append(states if order is batches else states[::-1])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"capture": {"sites": ["attn"]}}, "attn.0 lies inside of a block"),
        ({"capture": {"sites": ["module:model.layers.1.mlp.act_fn"]}}, "lies inside of a block"),
        ({"capture": {"sites": ["residual_mid"]}}, "residual_mid.0 lies inside of a block"),
        ({"model": {"device_map": "auto"}}, "not together with model.device_map = 'auto'"),
    ],
)
def test_what_lies_inside_of_a_compiled_block_is_refused_before_weights_are_read(
    tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    tiny_llama(vocab=64).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    given = job(tmp_path, **changed.pop("model", {}))
    with pytest.raises(RequestError, match=r"model\.compile = true: ") as error:
        make_plan(load_job({**given, **changed}), data=[{"ids": [1, 2]}])
    assert words in str(error.value)


def test_a_block_that_layers_share_is_compiled_once_and_closed_at_all_of_its_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_llama(vocab=64)
    model.model.layers = torch.nn.ModuleList([model.model.layers[0]] * 3)
    settings = ModelSettings(name="m", compile=True)
    for asked, layers in (("attn", [2]), ("module:model.layers.1.mlp", "all")):
        with pytest.raises(RequestError, match="lies inside of a block"):
            refuse_compiling(settings, model, resolve_names(model, [asked], layers))
    refuse_compiling(settings, model, resolve_names(model, ["residual", "residual_pre"], "all"))
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    compile_blocks(model)
    assert len(compiled) == 2  # a trial, and the block


def test_sites_at_the_borders_of_blocks_can_be_had(tmp_path: Path) -> None:
    for model in (tiny_llama(vocab=64), tiny_gpt2()):
        model.save_pretrained(tmp_path / "model")
        sites = ["residual", "residual_pre", "embedding", "final_norm"]
        given = {**job(tmp_path), "capture": {"sites": sites}}
        plan = make_plan(load_job(given), data=[{"ids": [1, 2]}])
        assert len(plan.names) == len(resolve_names(model, sites, "all"))


def test_without_a_compiler_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> Any:
        def broken(*_: Any) -> None:
            raise InvalidCxxCompiler("No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')")

        return broken

    class InvalidCxxCompiler(RuntimeError):  # noqa: N818
        """As torch calls it."""

    monkeypatch.setattr(torch, "compile", none)
    with pytest.raises(
        RequestError, match=r"model\.compile = true: torch cannot compile here .* install a C\+\+"
    ) as error:
        compile_blocks(tiny_llama(vocab=64))
    assert "\n" not in str(error.value)


def test_a_model_object_is_taken_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"model\.compile = True: a model object is given"):
        make_plan(load_job(job(tmp_path)), model=tiny_llama(vocab=64), data=[{"ids": [1, 2]}])
