"""Where a checkpoint is: a hub id, a folder, a `.gguf` file or a file of a package; what is not there is named at once.

Nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harvest.config import resolve_package
from harvest.errors import RequestError
from harvest.overlap import within
from harvest.settings.base import nearest, path_meant

LONGEST_NAME = 1024
"""Characters of a model's name or path; file systems take no more in one piece."""
HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
_GIST = 300
HUB_SECONDS = 5.0
"""Until the hub counts as out of reach."""


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
            raise RequestError(f"{setting} = {name!r}: no such file{path_meant(str(path))}")
        return Checkpoint(where=str(path.parent), gguf_file=path.name, revision=None)
    if path.is_dir():
        if (path / "adapter_config.json").is_file() and setting == "model.name":
            raise RequestError(
                f"{setting} = {name!r}: the folder has an adapter_config.json; an adapter goes into model.adapter, and "
                "model.name is its base model"
            )
        if not (path / "config.json").is_file() and setting == "model.name":
            raise RequestError(f"{setting} = {name!r}: the folder has no config.json, so it is no checkpoint")
        return Checkpoint(where=str(path), gguf_file=None, revision=None)
    if path.exists() or not HUB_ID.match(name):
        raise RequestError(
            f"{setting} = {name!r}: neither a folder, a .gguf file, package:NAME/path nor a hub id"
            f"{'' if path.exists() else path_meant(str(path))}"
        )
    return Checkpoint(where=name, gguf_file=None, revision=revision)


def config_file(checkpoint: Checkpoint) -> Path | None:
    """Its config.json, where it is on this machine already."""
    if checkpoint.revision is None:
        return Path(checkpoint.where, "config.json")
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(checkpoint.where, "config.json", revision=checkpoint.revision)
    return Path(path) if isinstance(path, str) else None


def commit_of(checkpoint: Checkpoint) -> str | None:
    """The commit of a hub id, once its config has been loaded: as the cache knows it, so that no network is needed."""
    path = config_file(checkpoint)
    return None if path is None else path.parent.name


def pinned(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint at the commit of its config: a branch may move before the weights are loaded."""
    if checkpoint.revision is None:
        return checkpoint
    return dataclasses.replace(checkpoint, revision=commit_of(checkpoint) or checkpoint.revision)


def reach(checkpoint: Checkpoint, files: tuple[str, ...], setting: str) -> None:
    """Asks the hub once for the first of `files`, unless one of them is cached; RequestError where nobody answers.

    Loading itself asks for each file over and over, which takes half a minute where there is no network. Whatever the
    hub answers is left to loading, which says it better.
    """
    if checkpoint.revision is None:
        return
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    cached = [try_to_load_from_cache(checkpoint.where, file, revision=checkpoint.revision) for file in files]
    if any(isinstance(path, str) for path in cached):
        return
    try:
        url = hf_hub_url(checkpoint.where, files[0], revision=checkpoint.revision)
        within(HUB_SECONDS, lambda: get_hf_file_metadata(url, timeout=HUB_SECONDS))
    except HfHubHTTPError:
        return
    except Exception as error:  # the kinds of the HTTP library, which is another one in each version of the hub's
        raise RequestError(
            f"{setting} = {checkpoint.where!r}: no such folder or file, not in the hub's cache on this machine, and "
            f"the hub cannot be reached ({type(error).__name__}: {' '.join(str(error).split())[:200]}); name a folder, "
            f"or fetch it once where there is a network{meant(checkpoint)}"
        ) from error


def meant(checkpoint: Checkpoint) -> str:
    """`; did you mean ...?` where a folder here, or a model of the hub's cache, is called nearly so; else nothing."""
    if checkpoint.revision is None or config_file(checkpoint) is not None:  # it is found
        return ""
    if beside := path_meant(checkpoint.where):
        return beside
    from huggingface_hub.constants import HF_HUB_CACHE

    cached = [folder.name for folder in Path(HF_HUB_CACHE).glob("models--*")]
    near = nearest(checkpoint.where, [name.removeprefix("models--").replace("--", "/") for name in cached], 0.75)
    return f"; did you mean {near[0]}?" if near and near[0] != checkpoint.where else ""


def downloaded(checkpoint: Checkpoint, files: tuple[str, ...]) -> Path:
    """The folder in the hub's cache that has these files of one commit, fetched where they are not there."""
    from huggingface_hub import hf_hub_download

    first, *others = files
    folder = Path(hf_hub_download(checkpoint.where, first, revision=checkpoint.revision)).parent
    for file in others:
        hf_hub_download(checkpoint.where, file, revision=folder.name)
    return folder


@contextlib.contextmanager
def one_clear_line(setting: str, name: str) -> Iterator[None]:
    """Turns what transformers says over many lines into one that names the setting."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:  # foreign code over foreign files: what it raises is not ours to list
        raise RequestError(f"{setting} = {name!r}: cannot be loaded: {gist(error)}") from error


def gist(error: Exception) -> str:
    """What foreign code says over many lines: whole sentences while they are few, else its beginning."""
    reason = " ".join(str(error).split()) or type(error).__name__
    end = max(reason.rfind(mark, 0, _GIST) for mark in (". ", "! ", "? "))
    return reason if len(reason) <= _GIST else reason[:end] if end > 0 else f"{reason[:_GIST]}..."
