"""A folder in an object store, through fsspec; S3 alone is asked for its conditional puts, which fsspec does not have.

`memory://` lives in this process and serves tests and small in-process runs.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import fsspec
import numpy as np

from harvest.errors import RequestError
from harvest.store.files import Bytes, safe_path

OPTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "s3": {
        "endpoint": ("endpoint_url",),
        "profile": ("profile",),
        "region": ("client_kwargs", "region_name"),
        "anonymous": ("anon",),
        "requester_pays": ("requester_pays",),
    },
    "gs": {"endpoint": ("endpoint_url",), "project": ("project",), "requester_pays": ("requester_pays",)},
    "az": {"account": ("account_name",), "anonymous": ("anon",)},
}
"""`run.storage` key -> where the option goes in the file system's own arguments."""
ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
PART_BYTES = 8 << 20
"""Buffered per open object (S3 wants parts of 5 MiB or more); fsspec's own 50 MiB times 90 names would be 4.5 GB."""
CONFLICT_TRIES = 20
CONFLICT_SECONDS = 0.1
_lock = threading.RLock()
"""Makes `create` and `swap` whole within this process."""


def open_remote(url: str, options: Mapping[str, Any], setting: str) -> RemoteFiles:
    """Raises RequestError for a store that is unknown or not installed, and for options that it does not take."""
    scheme, _, rest = url.partition("://")
    kind = ALIASES.get(scheme, scheme)
    known = OPTIONS.get(kind, {})
    # A connection that fsspec kept knows the credentials and the endpoint of the environment at its time, not of now.
    arguments: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    for key, value in options.items():
        if key not in known:
            allowed = ", ".join(known) or "no settings"
            raise RequestError(f"run.storage.{key} = {value!r}: {scheme}:// takes {allowed}")
        table = arguments
        for part in known[key][:-1]:
            table = table.setdefault(part, {})
        table[known[key][-1]] = value
    try:
        system = fsspec.filesystem(scheme, **({} if scheme == "memory" else arguments))
    except ValueError:
        raise RequestError(f"{setting} = {url!r}: unknown kind of store {scheme!r}") from None
    except ImportError as error:
        raise RequestError(f"{setting} = {url!r}: {error}") from None
    if not rest.strip("/"):
        raise RequestError(f"{setting} = {url!r}: names no folder")
    if kind == "s3":
        system = _ClearS3(system, f"{setting} = {url!r}")
    files = (S3Files if kind == "s3" else RemoteFiles)(system, url.rstrip("/"), options)
    if scheme == "memory" and system.isfile(files.root):
        raise RequestError(f"{setting} = {url!r}: is a file; a folder is needed")
    return files


class RemoteFiles:
    """See `Files`. `create` and `swap` look before they write: whole within this process only."""

    local = False
    exclusive = False

    def __init__(self, system: Any, url: str, options: Mapping[str, Any]) -> None:
        """`options`: those that `system` was opened with."""
        self.system, self.url, self._options = system, url, dict(options)
        self.root = str(system._strip_protocol(url)).rstrip("/")

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens a connection of its own."""
        return open_remote, (self.url, self._options, "path")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def _at(self, path: str) -> str:
        return f"{self.root}/{safe_path(path)}"

    def read(self, path: str) -> bytes:
        return bytes(self.system.cat_file(self._at(path)))

    def read_range(self, path: str, start: int, length: int) -> bytes:
        return bytes(self.system.cat_file(self._at(path), start=start, end=start + length)) if length else b""

    def map(self, path: str) -> np.ndarray | None:
        return None

    def exists(self, path: str) -> bool:
        return bool(self.system.exists(self._at(path)))

    def size(self, path: str) -> int:
        return int(self.system.info(self._at(path))["size"])

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        start = self._at(prefix) if prefix else self.root
        found = self.system.find(start, detail=True)
        paths = {path: int(info["size"]) for path, info in found.items() if path.startswith(f"{start}/")}
        return iter(sorted((path[len(self.root) + 1 :], size) for path, size in paths.items()))

    def create(self, path: str, data: bytes) -> bool:
        with _lock:
            if self.exists(path):
                return False
            self.system.pipe_file(self._at(path), data)
            return True

    def replace(self, path: str, data: bytes) -> None:
        self.system.pipe_file(self._at(path), data)

    def swap(self, path: str, old: bytes, new: bytes) -> bool:
        with _lock, contextlib.suppress(FileNotFoundError):
            if self.read(path) == old:
                self.replace(path, new)
                return True
        return False

    def open_write(self, path: str) -> RemoteSink:
        return RemoteSink(self.system, self._at(path))

    def sync(self, prefix: str) -> None:
        """A put that was answered is durable."""

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.system.rm_file(self._at(path))

    def delete_tree(self, prefix: str, only: Callable[[str], bool] | None = None) -> None:
        doomed = [self._at(path) for path, _ in self.list(safe_path(prefix)) if only is None or only(path)]
        if doomed:
            with contextlib.suppress(FileNotFoundError):
                self.system.rm(doomed)

    def free_bytes(self) -> int | None:
        return None


class RemoteSink:
    """See `Sink`."""

    def __init__(self, system: Any, target: str) -> None:
        self._system, self._target = system, target
        self._file = system.open(target, "wb", block_size=PART_BYTES)
        self._open = True

    def write(self, data: Bytes | np.ndarray) -> None:
        self._file.write(memoryview(data).cast("B"))  # type: ignore[arg-type]  # a buffer, which has no type before Python 3.12

    def close(self) -> None:
        if self._open:
            self._file.close()
            self._open = False

    def abort(self) -> None:
        """A buffered file is uploaded when it is closed, also by the garbage collector: it is marked closed instead."""
        if not self._open:
            return
        self._open = False
        self._file.discard()
        if not hasattr(self._file, "getbuffer"):
            self._file.closed = True
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._target)


class _ClearS3:
    """The file system, whose client's errors of its own kinds come out as ours: one line that names the setting."""

    def __init__(self, system: Any, where: str) -> None:
        from botocore import exceptions  # type: ignore[import-untyped]  # comes with s3fs, has no stubs

        self._system, self._where = system, where
        self._unknown = (
            exceptions.NoCredentialsError,
            exceptions.PartialCredentialsError,
            exceptions.CredentialRetrievalError,
            exceptions.ProfileNotFound,
        )
        self._any = exceptions.BotoCoreError

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._system, name)
        return self._clear(found) if callable(found) else found

    def _clear(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def cleared(*args: Any, **more: Any) -> Any:
            try:
                return call(*args, **more)
            except self._unknown as error:
                raise RequestError(
                    f"{self._where}: {error}; credentials are read from the environment only (AWS_ACCESS_KEY_ID and "
                    "AWS_SECRET_ACCESS_KEY, or AWS_PROFILE)"
                ) from None
            except self._any as error:
                raise ConnectionError(f"{self._where}: {' '.join(str(error).split())}") from None

        return cleared


class S3Files(RemoteFiles):
    """S3 and what speaks it: `If-None-Match: *` and `If-Match` decide between writers on any machine."""

    exclusive = True

    def create(self, path: str, data: bytes) -> bool:
        # A retry of the client's own may meet the object that its first try put: then what is there is ours.
        return self._put(path, data, IfNoneMatch="*") or self._holds(path, data)

    def swap(self, path: str, old: bytes, new: bytes) -> bool:
        bucket, key, _ = self.system.split_path(self._at(path))
        try:
            answer = self.system.call_s3("get_object", Bucket=bucket, Key=key)
            body = answer["Body"]
            held = fsspec.asyn.sync(self.system.loop, body.read)
        except FileNotFoundError:
            return False
        if held != old:
            return False
        return self._put(path, new, IfMatch=answer["ETag"]) or self._holds(path, new)

    def _holds(self, path: str, data: bytes) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self.read(path) == data
        return False

    def _put(self, path: str, data: bytes, **condition: str) -> bool:
        bucket, key, _ = self.system.split_path(self._at(path))
        for attempt in range(CONFLICT_TRIES):
            try:
                self.system.call_s3("put_object", Bucket=bucket, Key=key, Body=data, **condition)
                return True
            except OSError as error:
                code = _code(error)
                if code in ("PreconditionFailed", "412") or (code == "NoSuchKey" and "IfMatch" in condition):
                    return False
                if code not in ("ConditionalRequestConflict", "409") or attempt == CONFLICT_TRIES - 1:
                    raise
            time.sleep(CONFLICT_SECONDS * (0.5 + secrets.randbelow(1000) / 1000))  # another put is under way
        return False


def _code(error: OSError) -> str | None:
    response = getattr(error.__cause__, "response", None) or {}
    code = response.get("Error", {}).get("Code")
    return None if code is None else str(code)
