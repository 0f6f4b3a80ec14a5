"""Datasets of the hub: `datasets` finds commit, split and files; it reads rows only where nothing else can."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import datasets
from datasets import DownloadConfig, load_dataset_builder
from huggingface_hub import HfApi

from harvest.errors import RequestError
from harvest.overlap import within
from harvest.settings.tables import DataSettings
from harvest.source.objects import StreamFile
from harvest.source.places import Place, format_of
from harvest.source.rows import one_line

_SECONDS = 5.0
_PLAIN = {"parquet": (), "json": ("field",), "csv": ("sep", "names", "header", "quotechar"), "text": (), "arrow": ()}
"""Builder -> options of its configuration that change which rows there are: only their defaults are read by us."""


def resolve_hub(data: DataSettings, path: str, columns: Sequence[str]) -> list[Place] | StreamFile:
    """The files of the split at a fixed commit; or a stream where `datasets` alone knows the format.

    `path` may be a folder on this machine that is laid out like those of the hub, configurations included.
    Raises RequestError that names data.path, data.name, data.split or data.revision; also when the hub is not reached.
    """
    local = os.path.isdir(path)
    commit = "local" if local else _commit(data)
    builder = _builder(data, path, None if local else commit)
    files = getattr(builder.config, "data_files", None)
    splits = list(files or builder.info.splits or [])
    split = _pick_split(data, splits)
    if files and _read_by_us(builder, files[split]):
        return _places(files[split], commit, path)
    stream = builder.as_streaming_dataset(split=split)
    return StreamFile(f"{data.path}:{split}", columns, stream, f"{commit}:{split}")


def _commit(data: DataSettings) -> str:
    """The commit that data.revision stands for now: one question to the hub, so that no network is told at once."""
    if datasets.config.HF_HUB_OFFLINE:
        raise _unreached(data, "the hub is switched off by HF_HUB_OFFLINE")
    try:
        commit = within(_SECONDS, lambda: HfApi().dataset_info(data.path, revision=data.revision, timeout=_SECONDS).sha)
    except Exception as error:  # http clients have errors of their own, and all mean: not to be had
        raise _unreached(data, f"{type(error).__name__}: {error}") from error
    return str(commit)


def _unreached(data: DataSettings, reason: str) -> RequestError:
    revision = f" at data.revision = {data.revision!r}" if data.revision else ""
    shown = one_line(reason)[:300]
    return RequestError(
        f"data.path = {data.path!r}{revision}: no such file or folder, and not found on the hub: {shown}"
    )


def _builder(data: DataSettings, path: str, revision: str | None) -> Any:
    try:
        return load_dataset_builder(
            path,
            data.name,
            data_files=data.files,
            revision=revision,
            download_config=DownloadConfig(max_retries=1),
        )
    except ValueError as error:  # no such configuration, or one has to be chosen: the text lists them
        setting, value = ("data.name", data.name) if "onfig" in str(error) else ("data.path", data.path)
        raise RequestError(f"{setting} = {value!r}: {one_line(error)}") from error
    except Exception as error:
        raise RequestError(f"data.path = {data.path!r}: {type(error).__name__}: {one_line(error)}") from error


def _pick_split(data: DataSettings, splits: Sequence[Any]) -> str:
    names = [str(split) for split in splits]
    if data.split is None and len(names) == 1:
        return names[0]
    if data.split is not None and (data.split in names or not names):
        return data.split
    asked = "data.split" if data.split is None else f"data.split = {data.split!r}"
    raise RequestError(f"{asked}: {data.path} has the splits {', '.join(names) or 'unknown'}; name one")


def _read_by_us(builder: Any, files: Sequence[str]) -> bool:
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in _PLAIN or any("::" in str(file) or format_of(str(file)) is None for file in files):
        return False
    defaults = type(builder.config)(name="default")
    plain = all(getattr(builder.config, key, None) == getattr(defaults, key, None) for key in _PLAIN[kind])
    return plain and len({format_of(str(file)) for file in files}) == 1


def _places(files: Sequence[str], commit: str, path: str) -> list[Place]:
    """Sorted; the name is the path within the repository or folder."""
    places = []
    for file in sorted(str(file) for file in files):
        remote = "://" in file
        name = file.partition("@")[2].partition("/")[2] if remote else os.path.relpath(file, path)
        places.append(Place(name=name, path=file, format=str(format_of(file)), version=commit if remote else None))
    return places
