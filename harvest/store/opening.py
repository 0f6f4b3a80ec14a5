"""From a path or URL to the files of a run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harvest.errors import RequestError
from harvest.store.files import Files
from harvest.store.local import LocalFiles


def open_files(path: str, storage: Mapping[str, Any] | None = None, setting: str = "run.path") -> Files:
    """The folder at a local path, `file://`, `memory://`, `s3://` or another fsspec URL. Creates nothing.

    `storage`: endpoint, profile, region and so on, by kind of store; secrets come from the environment only.
    Raises RequestError naming `setting` or `run.storage.<key>`.
    """
    scheme, separator, rest = path.partition("://")
    options = dict(storage or {})
    if not separator or scheme == "file":
        for key in options:
            raise RequestError(f"run.storage.{key} = {options[key]!r}: a local folder takes no storage settings")
        return LocalFiles(rest if separator else path, setting)
    if "@" in rest.partition("/")[0]:
        raise RequestError(f"{setting}: credentials in a URL; they are read from the environment only")
    from harvest.store.remote import open_remote  # loads fsspec, which a local run does without

    return open_remote(path, options, setting)
