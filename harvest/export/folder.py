"""The folder that an export is written to: it is there in full, or it says that it is unfinished.

Locally everything is written to `OUT.unfinished` beside it, which becomes OUT in one step. In an object store OUT
holds UNFINISHED.json until the last object is there. What fails or is interrupted leaves nothing; what is killed
leaves what says so, and is never taken for an export.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import google_crc32c
import numpy as np

from harvest.errors import HarvestError, RequestError, WorkError
from harvest.store.files import Bytes, Files, Sink, naming_full_disk
from harvest.store.folder import require_writable
from harvest.store.local import sync_folder
from harvest.store.opening import open_files

UNFINISHED = "UNFINISHED.json"
CARD = "export.json"
SUFFIX = ".unfinished"
PIECE_BYTES = 128 << 10
"""Written, then checksummed while still in the core's cache."""


class Writer:
    """One file of the export, from front to back, checksummed; pyarrow takes it for a file."""

    closed = False

    def __init__(self, sink: Sink, where: str, wrote: Callable[[int], None]) -> None:
        """`wrote` hears of every write how many bytes it was."""
        self._sink, self._where, self._wrote = sink, where, wrote
        self.bytes = 0
        self._crc = 0

    def write(self, data: Bytes | np.ndarray) -> int:
        """Any C-contiguous buffer; returns its bytes."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]  # a buffer, which has no type before Python 3.12
        with naming_full_disk(self._where, len(view)):
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                self._sink.write(piece)
                self._crc = google_crc32c.extend(self._crc, np.frombuffer(piece, np.uint8))
        self.bytes += len(view)
        self._wrote(len(view))
        return len(view)

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        """For pyarrow."""

    def close(self) -> None:
        """Makes the file durable."""
        if not self.closed:
            with naming_full_disk(self._where, 0):
                self._sink.close()
            self.closed = True

    def abort(self) -> None:
        """Gives up the file."""
        with contextlib.suppress(OSError):
            self._sink.abort()

    @property
    def card(self) -> dict[str, Any]:
        """What the export's card says of the file."""
        return {"bytes": self.bytes, "crc32c": f"{self._crc:08x}"}

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


class Folder:
    """As a context manager it removes what it wrote when the block fails, unless only its name is still to come."""

    def __init__(self, out: str, run: Files) -> None:
        """Looks only. Raises RequestError for an OUT that cannot be used: taken, unfinished, within the run."""
        self.out = out
        self._target = open_files(out, setting="out")
        try:
            self._refuse_taken(run)
            require_writable(self._target, "out")
        except OSError as error:
            raise _unusable(out, error) from None
        self._files = self._target
        if self._target.local:
            self._files = open_files(self._target.url + SUFFIX, setting="out")
        self._written: dict[str, Writer] = {}
        self._whole = False
        """Everything is written; what is left is the folder's name."""
        self.bytes = 0
        """Written so far."""
        self.advanced: Callable[[int], None] = lambda written: None
        """Hears of it."""

    def _refuse_taken(self, run: Files) -> None:
        first = next((path for path, _ in self._target.list()), None)
        if not self._target.local:
            if first is not None and self._target.exists(UNFINISHED):
                raise RequestError(
                    f"out = {self.out!r}: holds an export that did not finish; remove it, or name another"
                )
        else:
            root = Path(self._target.url)
            if run.local and root.resolve().is_relative_to(Path(run.url).resolve()):
                raise RequestError(f"out = {self.out!r}: lies within the run {run.url}; name a folder outside")
            if os.path.lexists(f"{root}{SUFFIX}"):
                raise RequestError(
                    f"out = {self.out!r}: {root}{SUFFIX} is there, an export that is at work or was killed; "
                    "remove it, or name another"
                )
            first = next(iter(sorted(os.listdir(root))), None) if root.is_dir() else None
        if first is not None:
            raise RequestError(f"out = {self.out!r}: holds {first}; allowed is a new or an empty folder")

    @property
    def free_bytes(self) -> int | None:
        return self._target.free_bytes()

    def __enter__(self) -> Folder:
        note = {"unfinished": "an export is being written here, or was killed", "host": socket.gethostname()}
        try:
            if not self._files.create(UNFINISHED, json.dumps({**note, "pid": os.getpid()}, indent=1).encode()):
                raise RequestError(f"out = {self.out!r}: another export has just begun there")
        except OSError as error:
            raise _unusable(self.out, error) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self._whole:
            self._remove()

    def open(self, path: str) -> Writer:
        """A new file of the export."""
        where = f"{self._files.url}/{path}"
        with naming_full_disk(where, 0):
            writer = Writer(self._files.open_write(path), where, self._wrote)
        self._written[path] = writer
        return writer

    def _wrote(self, count: int) -> None:
        self.bytes += count
        self.advanced(self.bytes)

    def blob(self, path: str, data: bytes) -> None:
        """A whole file."""
        with self.open(path) as writer:
            writer.write(data)

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        """Path -> bytes and crc32c of every file that was written."""
        return {path: writer.card for path, writer in sorted(self._written.items())}

    def finish(self, card: Mapping[str, Any]) -> None:
        """Compares with the store, writes the card with all checksums, and gives the folder its name.

        Raises WorkError where the store does not hold what it took.
        """
        self.blob(CARD, json.dumps({**card, "files": self.files}, indent=1).encode() + b"\n")
        listed = dict(self._files.list())
        for path, writer in self._written.items():
            held = listed.get(path, 0)
            if held != writer.bytes:
                raise WorkError(f"{self._files.url}/{path}: {writer.bytes} bytes were written, the store holds {held}")
        self._files.delete(UNFINISHED)
        self._whole = True
        if self._target.local:
            _rename(self._files.url, self._target.url)

    def _remove(self) -> None:
        """What was written, and nothing else; never hides the failure that led here."""
        for path, writer in self._written.items():  # each by itself: one that cannot be dropped leaves the others to be
            with contextlib.suppress(OSError, HarvestError):
                writer.abort()
                self._files.delete(path)
        with contextlib.suppress(OSError, HarvestError):
            self._files.delete(UNFINISHED)
            if self._target.local:
                for folder, _, _ in os.walk(self._files.url, topdown=False):
                    os.rmdir(folder)


def _unusable(out: str, error: OSError) -> RequestError:
    """One line for a folder that cannot be looked at or begun: no access, no such bucket, no answer."""
    said = " ".join(str(error.strerror or error).split())
    return RequestError(said if said.startswith("out = ") else f"out = {out!r}: {said}")


def _rename(source: str, target: str) -> None:
    """Makes every name below durable, then the folder's own; an empty folder of that name is replaced."""
    for folder, _, _ in os.walk(source):
        sync_folder(folder)
    try:
        os.rename(source, target)
    except OSError as error:
        raise WorkError(f"{source} is complete, but cannot become {target}: {error.strerror}; rename it") from None
    sync_folder(os.path.dirname(target))
