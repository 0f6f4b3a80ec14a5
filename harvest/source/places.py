"""One data file, local or remote: how it is opened, which format it has, and what tells that it changed."""

from __future__ import annotations

import hashlib
import io
import os
import zlib
from dataclasses import dataclass
from functools import cached_property
from lzma import LZMAError
from pathlib import PurePosixPath
from typing import Any, BinaryIO, cast

import fsspec
import pyarrow as pa

from harvest.errors import RequestError

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "txt",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""Suffix -> format; the text formats also with one of COMPRESSIONS behind."""
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
TORN = (EOFError, OSError, LZMAError, zlib.error)
"""What decompressing a file that was cut off or damaged raises."""
_TEXT = ("jsonl", "json", "csv", "txt")
_BUFFER = 1 << 20
_ENDS = 64 << 10
_VERSIONS = ("ETag", "etag", "generation", "VersionId", "version_id", "sha256", "mtime", "LastModified", "created")
"""Where fsspec's file systems say which version of an object is there, best first."""


def split_suffix(name: str) -> tuple[str, str]:
    """(suffix that names the format, suffix that names the compression or ""), in small letters."""
    path = PurePosixPath(name.lower().replace("\\", "/"))
    if path.suffix in COMPRESSIONS:
        return PurePosixPath(path.stem).suffix, path.suffix
    return path.suffix, ""


def format_of(name: str) -> str | None:
    """The format that a file name promises; None where it is none that is read here."""
    suffix, compression = split_suffix(name)
    kind = FORMATS.get(suffix)
    return kind if kind in _TEXT or not compression else None


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a data file is."""

    name: str
    """What messages and `@file` show."""
    path: str
    """Local path, or URL for fsspec."""
    format: str
    """One of FORMATS."""
    version: str | None = None
    """Hub commit, where one is known: then nothing else is needed to tell a change."""

    @property
    def local(self) -> bool:
        """A plain file on this machine."""
        return "://" not in self.path

    @property
    def compressed(self) -> bool:
        """Bytes have to be decompressed from the beginning to reach a place in it."""
        return bool(split_suffix(self.path)[1])

    @property
    def seekable(self) -> bool:
        """Its rows can be counted at the speed of the disk."""
        return self.local and not self.compressed

    @cached_property
    def _remote(self) -> tuple[Any, str]:
        fs, path = fsspec.core.url_to_fs(self.path)
        return fs, path

    def open_raw(self) -> BinaryIO:
        """The bytes as they lie there."""
        if self.local:
            return open(self.path, "rb", buffering=_BUFFER)
        fs, path = self._remote
        return cast(BinaryIO, fs.open(path, "rb"))

    def open_text(self, byte: int = 0) -> BinaryIO:
        """The decompressed bytes from `byte` on."""
        compression = COMPRESSIONS.get(split_suffix(self.path)[1])
        raw = self.open_raw()
        if compression is None:
            raw.seek(byte)
            return raw if self.local else cast(BinaryIO, io.BufferedReader(cast(Any, raw), _BUFFER))
        if compression == "zstd":
            # small buffer: what arrow has decompressed of a read that then fails is lost
            stream = cast(BinaryIO, io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), 4096))
        else:
            stream = fsspec.compression.compr[compression](raw)
        while byte > 0 and (passed := stream.read(min(byte, _BUFFER))):
            byte -= len(passed)
        return stream

    def head(self, size: int) -> bytes:
        """The first bytes of the decompressed file, or what can be read of them.

        Raises RequestError where a compressed file does not even begin.
        """
        found = b""
        with self.open_text() as file:
            try:
                while len(found) < size and (more := cast(Any, file).read1(size - len(found))):
                    found += more
            except TORN as error:
                if not self.compressed:
                    raise  # a disk or network that fails is no property of the data
                if not found:
                    kind = COMPRESSIONS[split_suffix(self.path)[1]]
                    raise self.refuse(f"not a readable {kind} file: {' '.join(str(error).split())}") from None
        return found

    def fingerprint(self) -> str:
        """Hub commit; or size and a hash of both ends (local), or size and version (remote)."""
        if self.version is not None:
            return f"{self.version}:{self.name}"
        if not self.local:
            fs, path = self._remote
            info = fs.info(path)
            version = next((info[key] for key in _VERSIONS if info.get(key) is not None), "")
            return f"{info.get('size')}-{str(version).strip(chr(34))}"
        size = os.path.getsize(self.path)
        ends = hashlib.blake2b(digest_size=16)
        with open(self.path, "rb") as file:
            ends.update(file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            ends.update(file.read(_ENDS))
        return f"{size}-{ends.hexdigest()}"

    def stamp(self) -> str:
        """What changes with every write to the file; cheap where it is local. Raises FileNotFoundError."""
        if self.local:
            found = os.stat(self.path)
            return f"{found.st_size}-{found.st_mtime_ns}"
        if self.version is None:  # listings are remembered by fsspec
            fs, path = self._remote
            fs.invalidate_cache(path)
        return self.fingerprint()

    def refuse(self, reason: str) -> RequestError:
        """The error for a file that cannot be what its name says."""
        return RequestError(f"data.path: {self.name}: {reason}")
