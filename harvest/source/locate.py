"""From `data.path` and `data.files` to a sorted list of data files of one format; nothing is guessed silently."""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterable
from typing import Any

import fsspec

from harvest.config import resolve_package
from harvest.errors import RequestError
from harvest.settings.base import path_meant, shown
from harvest.settings.tables import DataSettings
from harvest.source.places import COMPRESSIONS, FORMATS, Place, format_of
from harvest.source.rows import one_line

_MAGIC = re.compile(r"[*?\[]")
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_KNOWN = f"{', '.join(FORMATS)}; the text formats also with {', '.join(COMPRESSIONS)} behind"


def find_places(data: DataSettings) -> list[Place] | None:
    """The data files that are meant, sorted by name; None where `data.path` can only be a hub id.

    Raises RequestError: nothing there, no data files, several formats, an unknown split.
    """
    if data.split is not None and _MAGIC.search(data.split.replace("+", "*")):
        raise RequestError(
            f"data.split = {data.split!r}: a split's name is allowed; for a part use data.limit or data.sample"
        )
    path = os.path.expanduser(resolve_package(data.path, "data.path"))
    try:
        fs, root = fsspec.core.url_to_fs(path)
        fs.invalidate_cache()  # a listing from earlier in this process may be out of date
        return _Finder(data, fs, root).find()
    except RequestError:
        raise
    except Exception as error:  # every file system has errors of its own: no such bucket, no credentials, no network
        raise RequestError(f"data.path = {data.path!r}: {_why(error, path)}") from error


def _why(error: Exception, path: str) -> str:
    if isinstance(error, ValueError) and "rotocol" in str(error):
        return f"unknown kind of store {path.partition('://')[0]!r}"
    said = f"cannot be read: {type(error).__name__}: {one_line(error)}"
    if isinstance(error, ImportError):
        said = f"needs a package that is not installed: {one_line(error)}"
    elif "redential" in said:
        said += "; credentials are read from the environment only"
    return said


class _Finder:
    """Looks for files in one file system, local or not."""

    def __init__(self, data: DataSettings, fs: Any, root: str) -> None:
        self.data, self.fs, self.root = data, fs, root
        self.local = "://" not in data.path

    def find(self) -> list[Place] | None:
        is_folder = self.fs.isdir(self.root)
        if not is_folder and not self.fs.exists(self.root) and not _MAGIC.search(self.root):
            self._check_hub_id()
            return None
        if self.local and self.data.name is not None:
            if is_folder:
                return None  # a dataset repository on this disk, with configurations that `datasets` knows to read
            raise self._wrong(
                "data.name", self.data.name, "names a configuration of a hub dataset; leave it out for files"
            )
        if self.data.revision is not None:
            raise self._wrong(
                "data.revision", self.data.revision, "names a commit of a hub dataset; leave it out for files"
            )
        if self.data.files is not None:
            places = self._places(self._listed(), self.root if is_folder else posixpath.dirname(self.root))
            return places if isinstance(self.data.files, dict) else self._split(places)
        if is_folder:
            return self._folder()
        if self.fs.exists(self.root):
            return self._split(self._places([self.root], posixpath.dirname(self.root)))
        files = self._matches(self.root)
        if not files:
            raise self._wrong("data.path", self.data.path, "no file matches")
        return self._split(self._places(files, _before_magic(self.root)))

    def _matches(self, pattern: str) -> list[str]:
        """The files that match, without hidden ones unless the part before the first wildcard names them."""
        known = len(_before_magic(pattern))
        return sorted(p for p in self.fs.glob(pattern) if not _hidden(p[known:]) and not self.fs.isdir(p))

    def _check_hub_id(self) -> None:
        """Nothing is there: raises RequestError unless it may be a hub id."""
        if not self.local:
            raise self._wrong("data.path", self.data.path, "no such file or folder")
        if not _HUB_ID.match(self.data.path) or format_of(self.data.path) is not None:
            raise self._wrong("data.path", self.data.path, f"no such file (and no hub id){path_meant(self.data.path)}")

    def _wrong(self, setting: str, value: Any, reason: str) -> RequestError:
        return RequestError(f"{setting}{'' if value is None else f' = {shown(value)}'}: {reason}")

    def _listed(self) -> list[str]:
        """The files of `data.files`: names and globs relative to `data.path`."""
        files = self.data.files
        if isinstance(files, dict) and files:
            split = self.data.split or (next(iter(files)) if len(files) == 1 else None)
            if split not in files:
                raise self._wrong("data.split", self.data.split, f"allowed are those of data.files: {', '.join(files)}")
            files = files[split]
        names = [files] if isinstance(files, str) else files
        if not names or not isinstance(names, list) or not all(name and isinstance(name, str) for name in names):
            raise self._wrong("data.files", self.data.files, "allowed are names and globs of files, also by split")
        found: set[str] = set()
        for name in names:
            path = name if posixpath.isabs(name) else posixpath.join(self.root, name)
            if self.fs.isfile(path):
                found.add(path)
                continue
            matches = self._matches(path) if _MAGIC.search(path) else []
            if not matches:
                raise self._wrong("data.files", name, f"no such file in {self.data.path}")
            found.update(matches)
        return sorted(found)

    def _folder(self) -> list[Place]:
        """What `save_to_disk` wrote, or all data files in the folder."""
        root = self.root
        if self.fs.exists(f"{root}/dataset_dict.json"):
            splits = json.loads(self.fs.cat_file(f"{root}/dataset_dict.json"))["splits"]
            split = self.data.split or (splits[0] if len(splits) == 1 else None)
            if split not in splits:
                raise self._wrong("data.split", self.data.split, f"{self.data.path} has the splits {', '.join(splits)}")
            root = f"{root}/{split}"
        if self.fs.exists(f"{root}/state.json") and self.fs.exists(f"{root}/dataset_info.json"):
            state = json.loads(self.fs.cat_file(f"{root}/state.json"))
            # in this order the dataset was saved; names that come from a file stay inside the folder
            names = [posixpath.basename(entry["filename"]) for entry in state["_data_files"]]
            return self._places([f"{root}/{name}" for name in names], root)
        inside = (path for path in self.fs.find(root) if not _hidden(path[len(root) :]))
        files = sorted(path for path in inside if format_of(path) is not None)
        if not files:
            raise self._wrong("data.path", self.data.path, f"no data file in this folder; read are {_KNOWN}")
        return self._split(self._places(files, root))

    def _places(self, paths: Iterable[str], root: str) -> list[Place]:
        places = []
        for path in paths:
            kind = format_of(path)
            if kind is None:
                raise self._wrong("data.path", posixpath.basename(path), f"unknown format; read are {_KNOWN}")
            name = posixpath.relpath(path, root or "/")
            places.append(Place(name=name, path=path if self.local else self.fs.unstrip_protocol(path), format=kind))
        kinds = {place.format: place.name for place in reversed(places)}
        if len(kinds) > 1:
            listed = ", ".join(f"{kind} ({name})" for kind, name in sorted(kinds.items()))
            raise self._wrong("data.path", self.data.path, f"files of several formats: {listed}; name one with a glob")
        return places

    def _split(self, places: list[Place]) -> list[Place]:
        """The files whose name says the split, as `datasets` names them: `train/...`, `train-00000.parquet`."""
        if self.data.split is None:
            return places
        word = re.compile(rf"(^|[/._ -]){re.escape(self.data.split)}([/._ -]|$)")
        named = [place for place in places if word.search(place.name)]
        if not named and self.data.split != "train":  # files that say no split are all `train`
            listed = ", ".join(place.name for place in places[:10])
            raise self._wrong(
                "data.split",
                self.data.split,
                f"no file of {self.data.path} says so by its name: {listed}; leave it out for all",
            )
        return named or places


def _before_magic(pattern: str) -> str:
    """The folder that a glob starts from."""
    return posixpath.dirname(_MAGIC.split(pattern, maxsplit=1)[0])


def _hidden(path: str) -> bool:
    return any(part.startswith((".", "__")) for part in path.split("/"))
