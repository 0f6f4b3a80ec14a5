"""PEFT adapters: put inside the modules of their base model, whose sites and paths stay what they are.

An adapter is not merged into the weights: merging rounds their sum to the dtype of the weights, and packed ones a
second time, so that a merged model computes something else than the adapted one. Of what peft makes only the base
model is kept, which computes the same with the adapter in it. The only home of `peft`.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from harvest.config import resolve_package
from harvest.errors import RequestError
from harvest.model.checkpoint import HUB_ID, Checkpoint, downloaded, one_clear_line, reach
from harvest.settings.model import ModelSettings

FILES = CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INSIDE = ("IA3", "LOHA", "LOKR", "LORA")
"""Kinds that are tested: each changes modules where they stand. Others add tokens, or ask for more than token ids."""


def adapter_folder(name: str) -> Path:
    """The folder of `model.adapter` with CONFIG and WEIGHTS, fetched from the hub where it is an id there."""
    asked, path = f"model.adapter = {name!r}", Path(resolve_package(name, "model.adapter"))
    if not path.exists() and HUB_ID.match(name):
        checkpoint = Checkpoint(where=name, gguf_file=None, revision="main")
        reach(checkpoint, (CONFIG,), "model.adapter")
        with one_clear_line("model.adapter", name):
            return downloaded(checkpoint, FILES)
    if not path.is_dir():
        raise RequestError(f"{asked}: neither a folder, package:NAME/path nor a hub id")
    for file in FILES:
        if not (path / file).is_file():
            raise RequestError(f"{asked}: the folder has no {file}, so it is no PEFT adapter with safe weights")
    return path


def refuse_adapter(settings: ModelSettings, skeleton: Any) -> None:
    """RequestError where `model.adapter` is set and is none, or none for this model; no value of a weight is read."""
    if settings.adapter is None:
        return
    asked = f"model.adapter = {settings.adapter!r}"
    if importlib.util.find_spec("peft") is None:
        raise RequestError(f"{asked}: peft is not installed; pip install 'harvest[adapter]'")
    places = settings.device_map.values() if isinstance(settings.device_map, dict) else ()
    _refuse_places(asked, {str(place) for place in places})
    folder = adapter_folder(settings.adapter)
    kind = _kind(asked, folder)
    found = _shapes(asked, folder)
    expected = _expected(asked, folder, _target(skeleton, found))
    wrong = sorted(key for key in {*found, *expected} if found.get(key) != expected.get(key))
    if wrong:
        raise RequestError(
            f"{asked}: this {kind} is not for this model: {len(wrong)} of its weights do not fit, the first is "
            f"{wrong[0]}: {found.get(wrong[0], 'none')} in the adapter, {expected.get(wrong[0], 'none')} in the model"
        )


def adapted(model: Any, settings: ModelSettings) -> Any:
    """`model` with the adapter in its modules; as it is where the settings name none."""
    if settings.adapter is None:
        return model
    from peft import PeftModel

    asked, folder = f"model.adapter = {settings.adapter!r}", adapter_folder(settings.adapter)
    _refuse_places(asked, {*map(str, getattr(model, "hf_device_map", {}).values())})
    with one_clear_line("model.adapter", settings.adapter):
        PeftModel.from_pretrained(_target(model, _shapes(asked, folder)), str(folder))  # changes the modules in place
    return model


def _target(model: Any, stored: Iterable[str]) -> Any:
    """What the adapter was made for: the model, or its trunk, as adapters of embedding models are."""
    first = next(iter(stored), "").removeprefix("base_model.model.").partition(".")[0]
    return model if hasattr(model, first) else model.base_model


def _refuse_places(asked: str, places: set[str]) -> None:
    """peft places offloaded weights anew, and rewrites files of weights that are on the disk."""
    if places != {"cpu"} and places & {"cpu", "disk"}:
        raise RequestError(
            f"{asked}: model.device_map puts modules in memory beside other devices, or on the disk; allowed is a "
            "model on one device, or on several of one kind"
        )


def _kind(asked: str, folder: Path) -> str:
    """What sort of adapter it is; RequestError for one that acts beyond the modules of the model."""
    with one_clear_line("model.adapter", str(folder)):
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind = str(config.get("peft_type"))
    if kind not in INSIDE:
        raise RequestError(f"{asked}: its kind is {kind}; allowed are {', '.join(INSIDE)}")
    if config.get("alora_invocation_tokens"):
        raise RequestError(f"{asked}: it begins to act at certain tokens (alora_invocation_tokens), which is not built")
    return kind


def _shapes(asked: str, folder: Path) -> dict[str, list[int]]:
    """Name -> shape of what is stored."""
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            return {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118  # no mapping
    except Exception as error:  # of a library in Rust, which raises a kind of its own
        raise RequestError(f"{asked}: {WEIGHTS} cannot be read: {' '.join(str(error).split())[:200]}") from error


def _expected(asked: str, folder: Path, skeleton: Any) -> dict[str, list[int]]:
    """Name -> shape of what this model needs."""
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict

    try:
        config = PeftConfig.from_pretrained(str(folder))
        with torch.device("meta"):
            model = PeftModel(copy.deepcopy(skeleton), config, low_cpu_mem_usage=True)
        needed = get_peft_model_state_dict(model, save_embedding_layers=False)
    except Exception as error:  # peft raises many kinds for a model that lacks what the adapter is for
        raise RequestError(f"{asked}: it is not for this model: {' '.join(str(error).split())[:300]}") from error
    return {key: list(tensor.shape) for key, tensor in needed.items()}
