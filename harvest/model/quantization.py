"""Weights packed by bitsandbytes while they are loaded: what cannot work is refused before anything is loaded.

transformers calls bitsandbytes; nothing of it is imported here. `nf4` packs weights only and computes in the dtype of
the forward. `int8` rounds what a layer reads as well, but for the columns in which any token of the forward has a
large value: so a token depends on all tokens beside it, and windows must run one by one (see `packing`).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.utils import is_bitsandbytes_available

from harvest.errors import RequestError
from harvest.model.checkpoint import locate
from harvest.settings.model import ModelSettings

DEVICES = ("cpu", "cuda")
"""Where it is tested, or known to work."""
BYTES = {"nf4": 0.5625, "int8": 1.0}
"""Of a packed weight: four bits and, for every 64 of them, a float32."""


def refuse_quantization(settings: ModelSettings, config: Any, device: str) -> None:
    """RequestError where `model.quantization` is set and this checkpoint, device or machine cannot do it."""
    if settings.quantization is None:
        return
    asked = f"model.quantization = {settings.quantization!r}"
    if locate(settings.name, settings.revision).gguf_file is not None:
        raise RequestError(f"{asked}: the weights of a .gguf file are quantized already; leave it out")
    given = getattr(config, "quantization_config", None)
    if given is not None:
        method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
        raise RequestError(f"{asked}: the checkpoint is quantized already ({method}); leave it out")
    kind = device.partition(":")[0]
    if kind not in DEVICES:
        raise RequestError(f"{asked}: not on model.device = {device!r}; allowed are {', '.join(DEVICES)}")
    places = {str(place) for place in settings.device_map.values()} if isinstance(settings.device_map, dict) else set()
    if places != {"cpu"} and places & {"cpu", "disk"}:
        raise RequestError(f"{asked}: model.device_map puts modules in memory or on the disk; allowed are devices")
    if not is_bitsandbytes_available():
        raise RequestError(f"{asked}: bitsandbytes is not installed; pip install 'harvest[quantization]'")


def quantization_arguments(settings: ModelSettings, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """For `from_pretrained`: packed as the setting says, each weight on its device from the start."""
    if settings.quantization is None:
        return {}
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # a line for every layer of every forward
    if settings.quantization == "nf4":
        how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    else:
        how = BitsAndBytesConfig(load_in_8bit=True)
    return {"quantization_config": how, "device_map": {"": device}}


def packed_weights(model: Any) -> int:
    """How many weights of a skeleton would be packed: those of linear layers, but for the head's."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = (module for module in model.modules() if isinstance(module, nn.Linear) and module is not head)
    return sum(module.weight.numel() for module in linear)
