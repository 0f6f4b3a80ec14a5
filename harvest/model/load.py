"""The checkpoint: described without its weights, loaded as transformers loads it, known by its content.

The only home of `transformers` and `gguf`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from gguf import GGUFReader
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from harvest.config import ModelSettings, resolve_package
from harvest.errors import RequestError
from harvest.model.architectures import is_encoder, unused_positions

LONGEST_NAME = 1024
"""Characters of a model's name or path; file systems take no more in one piece."""
HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.py", "config.json")
"""Files of a model folder that its fingerprint covers."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNREAD = ("pooler.",)
"""Weights beyond what is captured, which many encoders are published without."""
MAX_CONTEXT = 2048
"""`tokens.context = "auto"` stops here: longer windows are a choice, not a default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Where a checkpoint is."""

    where: str
    """Folder or hub id."""
    gguf_file: str | None
    """File within the folder, for a GGUF."""
    revision: str | None
    """Of a hub id."""

    @property
    def arguments(self) -> dict[str, Any]:
        """For every `from_pretrained`."""
        return {
            key: value
            for key, value in (("gguf_file", self.gguf_file), ("revision", self.revision))
            if value is not None
        }

    @property
    def local(self) -> Path | None:
        """The folder or file whose content is hashed; None for a hub id."""
        return None if self.revision is not None else Path(self.where, self.gguf_file or "")


def locate(name: str, revision: str = "main", setting: str = "model.name") -> Checkpoint:
    """Finds a checkpoint by hub id, folder, `.gguf` file or `package:`; RequestError where there is none."""
    path = Path(resolve_package(name, setting))
    if len(name) > LONGEST_NAME:
        raise RequestError(f"{setting} = {name[:40]!r}...: {len(name)} characters; allowed are {LONGEST_NAME}")
    if path.suffix == ".gguf":
        if not path.is_file():
            raise RequestError(f"{setting} = {name!r}: no such file")
        return Checkpoint(where=str(path.parent), gguf_file=path.name, revision=None)
    if path.is_dir():
        if not (path / "config.json").is_file() and setting == "model.name":
            raise RequestError(f"{setting} = {name!r}: the folder has no config.json, so it is no checkpoint")
        return Checkpoint(where=str(path), gguf_file=None, revision=None)
    if path.exists() or not HUB_ID.match(name):
        raise RequestError(f"{setting} = {name!r}: neither a folder, a .gguf file, package:NAME/path nor a hub id")
    return Checkpoint(where=name, gguf_file=None, revision=revision)


@contextlib.contextmanager
def _one_clear_line(setting: str, name: str) -> Iterator[None]:
    """Turns what transformers says over many lines into one that names the setting."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:  # foreign code over foreign files: what it raises is not ours to list
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RequestError(f"{setting} = {name!r}: cannot be loaded: {reason[:400]}") from error


def load_config(settings: ModelSettings) -> Any:
    """The checkpoint's config, without weights."""
    checkpoint = locate(settings.name, settings.revision)
    with _quiet(), _one_clear_line("model.name", settings.name):
        return AutoConfig.from_pretrained(
            checkpoint.where, trust_remote_code=settings.trust_remote_code, **checkpoint.arguments
        )


def skeleton(config: Any, settings: ModelSettings) -> Any:
    """The model on the meta device: its modules, sites and attention, in a second and without memory."""
    blamed = ("model.name", settings.name) if settings.attention == "auto" else ("model.attention", settings.attention)
    with _quiet(), _one_clear_line(*blamed), torch.device("meta"):
        return _auto_class(config).from_config(
            config, trust_remote_code=settings.trust_remote_code, **_attention(settings)
        )


def _auto_class(config: Any) -> Any:
    with_head = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not is_encoder(config)
    return AutoModelForCausalLM if with_head else AutoModel


def load_model(settings: ModelSettings, config: Any, dtype: str, device: str) -> Any:
    """The model in eval mode on `device`, in `dtype` (float32, bfloat16, float16); `config` from `load_config`.

    Raises RequestError where it cannot be loaded, or where the checkpoint lacks weights of the trunk: transformers
    would make those up.
    """
    checkpoint = locate(settings.name, settings.revision)
    with _quiet(), _one_clear_line("model.name", settings.name):
        model, loading = _auto_class(config).from_pretrained(
            checkpoint.where,
            output_loading_info=True,
            config=config,
            dtype=DTYPES[dtype],
            trust_remote_code=settings.trust_remote_code,
            **checkpoint.arguments,
            **_attention(settings),
            **settings.options,
        )
    _refuse_made_up_weights(model, loading["missing_keys"], settings.name)
    return model.to(device).eval()


def _refuse_made_up_weights(model: Any, missing: Iterable[str], name: str) -> None:
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
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
    folder = checkpoint.local if name is None else None
    if folder and folder.is_dir() and not any((folder / file).exists() for file in TOKENIZER_FILES):
        return None
    with _quiet(), _one_clear_line(setting, name or settings.name):
        return AutoTokenizer.from_pretrained(
            checkpoint.where, trust_remote_code=settings.trust_remote_code, **checkpoint.arguments
        )


def _attention(settings: ModelSettings) -> dict[str, str]:
    return {} if settings.attention == "auto" else {"attn_implementation": settings.attention}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own bars and advice, and with each GGUF header parsed once.

    Config, tokenizer and weights each parse the whole header, token by token: seconds every time.
    """
    verbosity, reader = transformers.logging.get_verbosity(), gguf.GGUFReader
    transformers.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # six lines of retries before our one
    transformers.logging.disable_progress_bar()
    gguf.GGUFReader = _gguf_reader
    try:
        yield
    finally:
        gguf.GGUFReader = reader
        transformers.logging.set_verbosity(verbosity)


_read_gguf = functools.lru_cache(maxsize=1)(lambda path, stamp: GGUFReader(path))


def _gguf_reader(path: str) -> GGUFReader:
    stat = os.stat(path)
    return _read_gguf(str(path), (stat.st_size, stat.st_mtime_ns, stat.st_ino))


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
    name = str(next(model.parameters()).dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise RequestError(f"model: its weights are {name}; allowed are {', '.join(DTYPES)}")
    return name


def device_of(model: Any) -> str:
    """Where a model object of the caller's is."""
    return str(next(model.parameters()).device)


def weight_bytes(model: Any, dtype: str) -> int:
    """Bytes of a model's parameters in `dtype`; works on a skeleton."""
    values: int = sum(parameter.numel() for parameter in model.parameters())
    return values * DTYPES[dtype].itemsize


# ---- fingerprints ------------------------------------------------------------------------------------------------


def model_fingerprint(settings: ModelSettings, config: Any) -> str:
    """Changes when the weights do: the commit of a hub model, a content hash of local files."""
    checkpoint = locate(settings.name, settings.revision)
    if checkpoint.local is None:
        commit = getattr(config, "_commit_hash", None)
        if commit is None:
            raise RequestError(
                f"model.name = {settings.name!r}: the hub names no commit for it, so it cannot be locked"
            )
        return f"commit:{commit}"
    if checkpoint.local.is_file():
        return f"blake2b:{_content_hash(checkpoint.local)}"
    files = sorted({file for pattern in WEIGHTS for file in checkpoint.local.glob(pattern)})
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.name}\0{_content_hash(file)}\0".encode())
    return f"blake2b:{digest.hexdigest()}"


def object_fingerprint(model: Any) -> str:
    """The same for a model object of the caller's: a hash over its class, names, dtypes and values."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(type(model).__name__.encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b"")
    return f"object:{digest.hexdigest()}"


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Changes when any text could become other ids: vocabulary, merges, processing, special tokens, template."""
    if tokenizer is None:
        return "none"
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    for left_by_use in ("padding", "truncation"):  # set by earlier calls of the caller's; ours set neither
        backend.pop(left_by_use, None)
    parts = [json.dumps(backend, sort_keys=True)]
    parts += [json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str), str(tokenizer.chat_template)]
    return f"blake2b:{hashlib.blake2b(chr(0).join(parts).encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"


def _content_hash(path: Path) -> str:
    """blake2b of a file, remembered by (path, size, time of change) in the user's cache folder."""
    stat = path.stat()
    entry = _cache_folder() / hashlib.blake2b(str(path.resolve()).encode(), digest_size=12).hexdigest()
    stamp = f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"
    with contextlib.suppress(OSError, ValueError):
        known_stamp, known = entry.read_text().split()
        if known_stamp == stamp:
            return known
    with path.open("rb") as file:
        found = hashlib.file_digest(file, functools.partial(hashlib.blake2b, digest_size=16)).hexdigest()
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time only
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary = entry.with_suffix(f".{os.getpid()}")
        temporary.write_text(f"{stamp} {found}")
        temporary.replace(entry)
    return found


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "harvest" / "content"
