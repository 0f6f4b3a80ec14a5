"""The checkpoint: described without its weights, loaded as transformers loads it.

The only home of `transformers`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from harvest.errors import RequestError
from harvest.model.adapter import adapted
from harvest.model.architectures import is_encoder, unused_positions
from harvest.model.checkpoint import locate, meant, one_clear_line, pinned, reach
from harvest.model.compiling import compile_blocks
from harvest.model.gguffile import read_once
from harvest.model.quantization import BYTES, packed_weights, quantization_arguments
from harvest.model.spread import input_device
from harvest.settings.model import ModelSettings

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNREAD = ("pooler.",)
"""Weights beyond what is captured, which many encoders are published without."""
MAX_CONTEXT = 2048
"""`tokens.context = "auto"` stops here: longer windows are a choice, not a default."""


def load_config(settings: ModelSettings) -> Any:
    """The checkpoint's config, without weights."""
    checkpoint = locate(settings.name, settings.revision)
    reach(checkpoint, ("config.json",), "model.name")
    try:
        with _quiet(), one_clear_line("model.name", settings.name):
            return AutoConfig.from_pretrained(
                checkpoint.where, trust_remote_code=settings.trust_remote_code, **checkpoint.arguments
            )
    except RequestError as error:
        raise RequestError(f"{error}{meant(checkpoint)}") from error


def skeleton(config: Any, settings: ModelSettings) -> Any:
    """The model on the meta device: its modules, sites and attention, in a second and without memory."""
    blamed = ("model.name", settings.name) if settings.attention == "auto" else ("model.attention", settings.attention)
    try:
        with _quiet(), one_clear_line(*blamed), torch.device("meta"):
            return _auto_class(config).from_config(
                config, trust_remote_code=settings.trust_remote_code, **_attention(settings)
            )
    except RequestError as error:
        if settings.attention == "auto":
            raise
        raise RequestError(f"{error}; 'auto', 'eager' and 'sdpa' need nothing more") from None


def _auto_class(config: Any) -> Any:
    """With the head where there is one; remote code often has no other class."""
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    of_remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    with_head = (known or of_remote) and not is_encoder(config)
    return AutoModelForCausalLM if with_head else AutoModel


def load_model(settings: ModelSettings, config: Any, dtype: str, device: str, with_head: bool = False) -> Any:
    """The model, with its adapter in it, in eval mode on `device` or where `model.device_map` puts it.

    Its dtype is `dtype`: float32, bfloat16 or float16.

    `config` is that of `load_config`.

    Raises RequestError where it cannot be loaded, or where the checkpoint lacks weights of the trunk, or `with_head` of
    the head: transformers would make those up.
    """
    checkpoint = pinned(locate(settings.name, settings.revision))
    with _quiet(), one_clear_line("model.name", settings.name), _known_options(settings.options):
        model, loading = _auto_class(config).from_pretrained(
            checkpoint.where,
            output_loading_info=True,
            config=config,
            dtype=DTYPES[dtype],
            trust_remote_code=settings.trust_remote_code,
            **checkpoint.arguments,
            **_attention(settings),
            **quantization_arguments(settings, DTYPES[dtype], device),
            **_options(settings),
        )
    _refuse_made_up_weights(model, loading["missing_keys"], settings.name, with_head)
    placed = settings.device_map is not None or settings.quantization is not None
    model = adapted(model if placed else model.to(device), settings).eval()
    if settings.compile:
        compile_blocks(model)
    return model


@contextlib.contextmanager
def _known_options(options: Iterable[str]) -> Iterator[None]:
    """Names the one of `model.options` that the model does not take."""
    try:
        yield
    except TypeError as error:
        unknown = next((key for key in options if repr(key) in str(error)), None)
        if unknown is None:
            raise
        raise RequestError(f"model.options.{unknown}: this model takes no such option; leave it out") from error


def _options(settings: ModelSettings) -> dict[str, Any]:
    """`model.options` and `model.device_map` as `from_pretrained` takes them: TOML has no keys that are numbers."""
    options = dict(settings.options)
    if isinstance(limits := options.get("max_memory"), dict):
        options["max_memory"] = {int(place) if place.isdigit() else place: limit for place, limit in limits.items()}
    if settings.device_map is not None:
        options["device_map"] = settings.device_map
    return options


def _refuse_made_up_weights(model: Any, missing: Iterable[str], name: str, with_head: bool) -> None:
    prefix = "" if model.base_model is model or with_head else f"{model.base_model_prefix}."
    lacking = sorted(key for key in missing if key.startswith(prefix) and not key.startswith(UNREAD))
    if lacking:
        raise RequestError(
            f"model.name = {name!r}: the checkpoint lacks {len(lacking)} weights of the model, the first is "
            f"{lacking[0]}; a forward with made-up ones would tell nothing"
        )


def load_tokenizer(settings: ModelSettings, name: str | None) -> Any:
    """The tokenizer called `name`, else the model's own; None where the model has none (token ids need none)."""
    setting = "tokens.tokenizer" if name else "model.name"
    checkpoint = locate(name or settings.name, settings.revision if not name else "main", setting)
    folder = checkpoint.local
    bare = folder and folder.is_dir() and not any((folder / file).exists() for file in TOKENIZER_FILES)
    if bare and name is None:
        return None
    reach(checkpoint, ("tokenizer_config.json", *TOKENIZER_FILES), setting)
    try:
        with _quiet(), one_clear_line(setting, name or settings.name):
            return AutoTokenizer.from_pretrained(
                checkpoint.where, trust_remote_code=settings.trust_remote_code, **checkpoint.arguments
            )
    except RequestError:
        if not bare:
            raise
        files = ", ".join(TOKENIZER_FILES)
        raise RequestError(f"{setting} = {name!r}: no tokenizer; allowed is a folder with one of {files}") from None


def _attention(settings: ModelSettings) -> dict[str, str]:
    return {} if settings.attention == "auto" else {"attn_implementation": settings.attention}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own bars and advice."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # six lines of retries before our one
    transformers.logging.disable_progress_bar()
    try:
        with read_once():
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)


# ---- what the plan needs to know ---------------------------------------------------------------------------------


def checkpoint_dtype(config: Any, settings: ModelSettings) -> str:
    """What `model.dtype = "auto"` stands for: the checkpoint's own dtype; float32 where it does not say."""
    if settings.dtype != "auto":
        return settings.dtype
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    name = str(dtype).removeprefix("torch.")
    return name if name in DTYPES else "float32"


def context_limit(config: Any) -> int | None:
    """Positions that the model was built for; None where the config names no limit."""
    text = config.get_text_config()
    for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
        limit = getattr(text, key, None)
        if isinstance(limit, int) and limit > 0:
            return limit - unused_positions(text)
    return None


def resolve_device(settings: ModelSettings) -> str:
    """What `model.device = "auto"` stands for: the first CUDA device where there is one, else the CPU."""
    if settings.device != "auto":
        try:
            device = torch.device(settings.device)
        except RuntimeError:
            raise RequestError(
                f"model.device = {settings.device!r}: allowed are 'auto', 'cpu', 'cuda', 'cuda:0'"
            ) from None
        if device.type == "cuda" and not torch.cuda.is_available():
            raise RequestError(f"model.device = {settings.device!r}: this machine has no CUDA device; allowed is 'cpu'")
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype_of(model: Any) -> str:
    """Of a model object of the caller's; RequestError for one that Harvest cannot run in."""
    values = next(parameter for parameter in model.parameters() if parameter.is_floating_point())  # not the packed ones
    name = str(values.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise RequestError(f"model: its weights are {name}; allowed are {', '.join(DTYPES)}")
    return name


def device_of(model: Any) -> str:
    """Where the forward of a model object of the caller's begins."""
    return str(input_device(model))


def weight_bytes(model: Any, dtype: str, quantization: str | None = None) -> int:
    """Bytes of a model's parameters in `dtype`, or packed as `model.quantization` says; works on a skeleton."""
    values: int = sum(parameter.numel() for parameter in model.parameters())
    packed = 0 if quantization is None else packed_weights(model)
    return (values - packed) * DTYPES[dtype].itemsize + int(packed * BYTES.get(quantization or "", 0.0))
