"""What a model, a tokenizer or an adapter is, by its content: compared on resume, so that no run mixes two."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from harvest.errors import RequestError
from harvest.model.adapter import FILES as ADAPTER_FILES
from harvest.model.adapter import adapter_folder
from harvest.model.checkpoint import commit_of, locate
from harvest.model.spread import weight_of
from harvest.settings.model import ModelSettings

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.py", "config.json")
"""Files of a model folder that its fingerprint covers."""
OF_TRAINING = ("base_model_name_or_path", "inference_mode", "peft_version", "revision")
"""Settings of an adapter that say nothing about what it computes."""


def of_checkpoint(settings: ModelSettings) -> str:
    """Changes when the weights do: the commit of a hub model whose config was loaded, a content hash of local files."""
    checkpoint = locate(settings.name, settings.revision)
    if checkpoint.local is None:
        commit = commit_of(checkpoint)
        if commit is None:
            raise RequestError(
                f"model.name = {settings.name!r}: the hub names no commit for it, so it cannot be locked"
            )
        return f"commit:{commit}"
    if checkpoint.local.is_file():
        return f"blake2b:{content_hash(checkpoint.local)}"
    return _of_files({file for pattern in WEIGHTS for file in checkpoint.local.glob(pattern)})


def of_adapter(name: str) -> str:
    """Changes when the content of `model.adapter` does."""
    return _of_files(adapter_folder(name) / file for file in ADAPTER_FILES)


def _of_files(files: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        digest.update(f"{file.name}\0{content_hash(file)}\0".encode())
    return f"blake2b:{digest.hexdigest()}"


def of_model(model: Any) -> str:
    """The same for a model object of the caller's: a hash over its class, names, dtypes and values."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(type(model).__name__.encode())
    digest.update(str(getattr(model, "active_adapter", "")).encode())  # of a PeftModel; no attribute of other models
    for adapter, settings in sorted(getattr(model, "peft_config", {}).items()):
        held = {key: value for key, value in settings.to_dict().items() if key not in OF_TRAINING}
        digest.update(f"{adapter}\0{json.dumps(held, sort_keys=True, default=_in_order)}\0".encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        value: Any = weight_of(model, name) if tensor.is_meta else tensor
        flat = value.detach().cpu().contiguous().flatten()
        digest.update(memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else b"")
    return f"object:{digest.hexdigest()}"


def _in_order(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


def of_tokenizer(tokenizer: Any) -> str:
    """Changes when any text could become other ids: vocabulary, merges, processing, special tokens, template."""
    if tokenizer is None:
        return "none"
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    for left_by_use in ("padding", "truncation"):  # set by earlier calls of the caller's; ours set neither
        backend.pop(left_by_use, None)
    parts = [json.dumps(backend, sort_keys=True)]
    parts += [json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str), str(tokenizer.chat_template)]
    return f"blake2b:{hashlib.blake2b(chr(0).join(parts).encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"


def content_hash(path: Path) -> str:
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
