"""What a checkpoint's files tell before transformers is imported: the truth or nothing, and the same words as later."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from families import CONFIGS, LAYERS, tiny_config, tiny_family

from harvest.errors import RequestError
from harvest.model.gguffile import LIMITED
from harvest.model.load import context_limit, load_config
from harvest.model.sites import SITES, resolve_names, sites_of
from harvest.model.told import NOTHING, told_by
from harvest.settings.model import ModelSettings

EXACT = {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "gpt2", "gptj", "bert", "cohere", "olmo2"}
"""Families whose sites must be told: the commonest, and some that lack sites."""


@pytest.mark.parametrize("family", CONFIGS)
def test_layers_positions_and_sites_are_told_as_the_model_has_them_or_not_at_all(family: str, tmp_path: Path) -> None:
    """A wrong word would refuse layers, sites or lengths that there are."""
    tiny_config(family).save_pretrained(tmp_path)
    told = told_by(str(tmp_path), "main")
    assert told.layers in (LAYERS, None)
    assert told.positions in (context_limit(load_config(ModelSettings(name=str(tmp_path)))), None)
    if told.sites is not None:
        assert list(told.sites) == list(SITES)
        assert [site for site, why in told.sites.items() if why is None] == list(sites_of(str(tmp_path))["sites"])
    assert told.sites is not None or family not in EXACT


@pytest.mark.parametrize("family", sorted(EXACT))
@pytest.mark.parametrize("asked", ["residul", "router", "blocks.1.hook_mlp_in", "embedding.0", "final_norm.1"])
def test_a_site_is_refused_early_in_the_words_of_the_model_itself(family: str, asked: str, tmp_path: Path) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    with pytest.raises(RequestError) as early:
        told_by(str(tmp_path), "main").refuse([asked], "all")
    with pytest.raises(RequestError) as late:
        resolve_names(tiny_family(family), [asked], "all")
    assert str(early.value) == str(late.value)
    assert str(early.value).startswith(f"capture.sites = {asked!r}: ")


def test_a_misspelt_site_is_told_the_nearest(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    told = told_by(str(tmp_path), "main")
    with pytest.raises(RequestError, match=r"'residul': did you mean residual\? no such site; this model has res"):
        told.refuse(["residul"], "all")
    with pytest.raises(RequestError, match=r"'embedding\.0': embedding has no layers, so no such site; this model"):
        told.refuse(["embedding.0"], "all")
    with pytest.raises(RequestError, match=r"capture\.sites = 'attn\.3': the model has 3 layers; allowed are 0 to 2"):
        told.refuse(["residual", "attn.3"], "all")
    with pytest.raises(RequestError, match=r"capture\.layers = \[-4\]: the model has 3 layers"):
        told.refuse(["residual"], [-4])
    told.refuse(["residual", "attn.2", "blocks.0.hook_resid_post", "module:lm_head", "module_input:x.{layer}"], [-3, 2])


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[]",
        '{"num_hidden_layers": 3, "n_layer": 4}',
        '{"num_hidden_layers": "3"}',
        '{"num_hidden_layers": 0}',
        '{"num_hidden_layers": 3, "auto_map": {}, "model_type": "llama"}',
        '{"num_hidden_layers": 3, "text_config": {"num_hidden_layers": 5}, "model_type": "llama"}',
    ],
)
def test_a_config_file_that_does_not_say_it_plainly_says_nothing(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    told = told_by(str(tmp_path), "main")
    assert (told.layers, told.positions, told.sites) == (None, None, None)
    told.refuse(["nonsense"], [99])


def header(path: Path, kind: str, **counts: int) -> str:
    writer = gguf.GGUFWriter(path, kind)
    for key, count in counts.items():
        writer.add_uint32(f"{kind}.{key}", count)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(path)


def test_a_gguf_header_tells_layers_positions_and_sites(tmp_path: Path) -> None:
    told = told_by(header(tmp_path / "a.gguf", "llama", block_count=3, context_length=64), "main")
    assert (told.layers, told.positions, told.kind) == (3, 64, "llama")
    with pytest.raises(RequestError, match="the model has 3 layers"):
        told.refuse(["residual"], [3])
    with pytest.raises(RequestError, match="'llama' has none: it has no such part; this model has residual, "):
        told.refuse(["router"], "all")


def test_a_gguf_of_another_kind_or_torn_tells_nothing(tmp_path: Path) -> None:
    assert told_by(header(tmp_path / "a.gguf", "t5", block_count=3), "main") == NOTHING
    assert told_by(header(tmp_path / "b.gguf", "llama"), "main") == NOTHING
    torn = Path(header(tmp_path / "c.gguf", "llama", block_count=3))
    torn.write_bytes(torn.read_bytes()[:40])
    assert told_by(str(torn), "main") == NOTHING
    torn.write_bytes(b"no model")
    assert told_by(str(torn), "main") == NOTHING


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("capture.sites=['residul']", "no such site"),
        ("capture.layers=[9]", "3 layers"),
        ("tokens.context=65", "1 to 64"),
    ],
)
def test_what_a_model_cannot_have_is_refused_before_transformers_is_imported(
    setting: str, told: str, tmp_path: Path
) -> None:
    tiny_config("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text(json.dumps({"ids": [1, 2]}) + "\n")
    settings = [f"model.name={tmp_path}/model", f"data.path={tmp_path}/a.jsonl", "data.ids=ids", setting]
    code = f"""
import sys
from harvest.runtime.coordinate import plan_run
from harvest.errors import RequestError
try:
    plan_run({{"run": {{"path": "{tmp_path}/run"}}}}, {settings!r})
except RequestError as error:
    print(error)
assert "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


def test_a_damaged_header_tells_nothing_whatever_is_damaged(tmp_path: Path) -> None:
    """Not a traceback: loading tells in its own words what is wrong with the file."""
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_array("tokenizer.ggml.tokens", ["one", "two"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    whole = path.read_bytes()
    at = whole.index(b"one")
    for number, damaged in enumerate((at - 8, at - 16)):  # the length of a string, the count of strings
        broken = bytearray(whole)
        broken[damaged : damaged + 8] = (2**40).to_bytes(8, "little")
        (tmp_path / f"{number}.gguf").write_bytes(broken)
        assert told_by(str(tmp_path / f"{number}.gguf"), "main") == NOTHING


def test_only_a_length_that_transformers_takes_for_the_longest_window_is_told_of_a_gguf(tmp_path: Path) -> None:
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    for kind in LIMITED:
        assert GGUF_CONFIG_MAPPING[kind]["context_length"] == "max_position_embeddings"
    for kind in ("bloom", "gpt2"):
        told = told_by(header(tmp_path / f"{kind}.gguf", kind, block_count=3, context_length=64), "main")
        assert (told.layers, told.positions) == (3, None)
