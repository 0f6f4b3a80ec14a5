"""`model.options` that a model does not take are refused before anything is loaded; what is told is what it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from families import tiny_config, tiny_family
from transformers import AutoModel

from harvest.errors import RequestError
from harvest.model.load import load_config, load_model
from harvest.model.options import options_of, refuse_options
from harvest.settings.model import NO_OPTIONS, OF_OURS, ModelSettings

FAMILIES = ("llama", "bert", "gpt2", "qwen3")


def checkpoint(family: str, folder: Path, **options: Any) -> ModelSettings:
    tiny_family(family).save_pretrained(folder)
    return ModelSettings(name=str(folder), options=options)


def loaded(settings: ModelSettings) -> Any:
    return load_model(settings, load_config(settings), "float32", "cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_option_that_is_told_is_one_that_the_model_takes(family: str, tmp_path: Path) -> None:
    """As transformers itself says: with one that it does not know it raises TypeError."""
    settings = checkpoint(family, tmp_path)
    config, told = load_config(settings), options_of(str(tiny_config(family).model_type))
    assert told is not None
    ours = {*OF_OURS, *NO_OPTIONS, "token"}  # which no job gives
    assert {"max_memory", "key_mapping", "use_safetensors", "offload_folder", "cache_dir"} <= told - ours
    for name in sorted(told - ours):
        AutoModel.from_pretrained(tmp_path, config=config, **{name: None})
    with pytest.raises(TypeError, match="made_up"):
        AutoModel.from_pretrained(tmp_path, config=config, made_up=1)
    assert "made_up" not in told


def test_an_option_of_the_models_own_class_is_taken_by_that_kind_alone(tmp_path: Path) -> None:
    settings = checkpoint("bert", tmp_path / "bert", add_pooling_layer=False)
    refuse_options(settings, "bert")
    loaded(settings)
    settings = checkpoint("llama", tmp_path / "llama", add_pooling_layer=False)
    with pytest.raises(RequestError, match=r"^model\.options\.add_pooling_layer: no such option; this model takes "):
        refuse_options(settings, "llama")
    with pytest.raises(RequestError, match=r"^model\.options\.add_pooling_layer: this model takes no such option"):
        loaded(settings)


def test_a_misspelt_option_is_told_the_nearest_and_none_that_a_setting_decides() -> None:
    with pytest.raises(RequestError, match=r"^model\.options\.max_memroy: no such option; did you mean max_memory\? "):
        refuse_options(ModelSettings(name="m", options={"max_memroy": 1}), "llama")
    with pytest.raises(RequestError) as caught:
        refuse_options(ModelSettings(name="m", options={"use_safetensors": True, "dytpe": "float32"}), "llama")
    assert "did you mean" not in str(caught.value)
    assert not {*OF_OURS, *NO_OPTIONS, "token"} & {*str(caught.value).partition("takes ")[2].split(", ")}


def test_what_is_not_told_plainly_is_left_to_loading() -> None:
    odd = {"odd": 1}
    for kind in ("", "None", "no_such_kind", "../llama"):
        assert options_of(kind) is None
        refuse_options(ModelSettings(name="m", options=odd), kind)
    refuse_options(ModelSettings(name="m", options=odd, trust_remote_code=True), "llama")
    refuse_options(ModelSettings(name="m"), "llama")


def test_a_wrong_option_costs_a_second_and_one_line_before_transformers_is_imported(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text(json.dumps({"ids": [1, 2]}) + "\n")
    settings = [f"model.name={tmp_path}/model", f"data.path={tmp_path}/a.jsonl", "data.ids=ids"]
    code = f"""
import sys
from harvest.runtime.coordinate import plan_run
from harvest.errors import RequestError
try:
    plan_run({{"run": {{"path": "{tmp_path}/run"}}}}, {[*settings, "model.options.key_maping={a='b'}"]!r})
except RequestError as error:
    print(error)
assert "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "model.options.key_maping: no such option; did you mean key_mapping? this model takes "
    )
    assert not (tmp_path / "run").exists()
