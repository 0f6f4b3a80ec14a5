"""A folder of this machine: every create, replace and swap is atomic and survives a power cut."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from harvest.errors import RequestError, WorkError
from harvest.store.files import Bytes, safe_path

LOCK_SECONDS = 10.0
"""How long `swap` waits for another process's swap, which takes microseconds unless that process is frozen."""
WRITE_BACK_BYTES = 8 << 20
HAS_ADVICE = sys.platform == "linux"
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What file systems without hard links answer."""


class LocalFiles:
    """See `Files`."""

    local = True
    exclusive = True

    def __init__(self, root: str, setting: str = "run.path") -> None:
        """Raises RequestError where the path, or a folder on the way to it, is a file."""
        if not root or "\0" in root:
            raise RequestError(f"{setting} = {root!r}: a folder or a URL is needed")
        self.root = Path(os.path.abspath(os.path.expanduser(root)))
        self.url = str(self.root)
        try:
            os.lstat(self.root)
        except (FileNotFoundError, NotADirectoryError):
            pass  # absent, or told below what is in the way
        except OSError as error:  # a name too long, a folder that may not be searched
            raise RequestError(f"{setting} = {root[:200]!r}: {error.strerror}") from None
        for place in (self.root, *self.root.parents):
            if os.path.lexists(place):
                if not place.is_dir():
                    told = (
                        "it is a file, not a folder" if place == self.root else f"{place} is in the way, not a folder"
                    )
                    raise RequestError(f"{setting} = {root!r}: {told}")
                break

    def __repr__(self) -> str:
        return f"LocalFiles({self.url!r})"

    def _at(self, path: str) -> str:
        return f"{self.root}/{safe_path(path)}"

    def read(self, path: str) -> bytes:
        with open(self._at(path), "rb") as file:
            return file.read()

    def read_range(self, path: str, start: int, length: int) -> bytes:
        with open(self._at(path), "rb", buffering=0) as file:
            parts = []
            while length > 0 and (part := os.pread(file.fileno(), min(length, 2**30), start)):
                parts.append(part)
                start, length = start + len(part), length - len(part)
        return b"".join(parts)

    def map(self, path: str) -> np.ndarray | None:
        if self.size(path) == 0:
            return np.empty(0, np.uint8)  # an empty file cannot be mapped
        return np.asarray(np.memmap(self._at(path), np.uint8, mode="r"))

    def exists(self, path: str) -> bool:
        return os.path.lexists(self._at(path))

    def size(self, path: str) -> int:
        return os.stat(self._at(path)).st_size

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        found = _walk(self._at(prefix) if prefix else str(self.root), prefix)
        return ((path, size) for path, size, is_folder in found if not is_folder)

    def create(self, path: str, data: bytes) -> bool:
        target = self._at(path)
        if os.path.lexists(target):
            return False
        _make_folders(os.path.dirname(target))
        with _temporary(target, data) as temporary:
            if not _link(temporary, target):
                return False
        sync_folder(os.path.dirname(target))
        return True

    def replace(self, path: str, data: bytes) -> None:
        target = self._at(path)
        _make_folders(os.path.dirname(target))
        with _temporary(target, data) as temporary:
            os.replace(temporary, target)
        sync_folder(os.path.dirname(target))

    def swap(self, path: str, old: bytes, new: bytes) -> bool:
        target = self._at(path)
        try:
            # The new bytes are on disk before the lock is taken, so that it is held for microseconds only.
            with _temporary(target, new) as temporary, _locked(target):
                with open(target, "rb") as file:
                    if file.read() != old:
                        return False
                os.replace(temporary, target)
        except FileNotFoundError:
            return False
        sync_folder(os.path.dirname(target))
        return True

    def open_write(self, path: str) -> LocalSink:
        target = self._at(path)
        while True:
            _make_folders(os.path.dirname(target))
            with contextlib.suppress(FileNotFoundError):  # a folder that was just removed as empty
                return LocalSink(target)

    def sync(self, prefix: str) -> None:
        start = self._at(prefix)
        for folder in [start, *(f"{self.root}/{path}" for path, _, is_folder in _walk(start, prefix) if is_folder)]:
            sync_folder(folder)
        sync_folder(os.path.dirname(start))

    def delete(self, path: str) -> None:
        target = self._at(path)
        self._refuse_outside(os.path.dirname(target))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target)

    def delete_tree(self, prefix: str, only: Callable[[str], bool] | None = None) -> None:
        start = self._at(prefix)
        self._refuse_outside(os.path.dirname(start))
        if os.path.islink(start) or not os.path.isdir(start):
            return
        for path, _, is_folder in _walk(start, prefix):  # children come before their folder
            with contextlib.suppress(FileNotFoundError):
                if is_folder:
                    _remove_if_empty(f"{self.root}/{path}")
                elif only is None or only(path):
                    os.unlink(f"{self.root}/{path}")
        _remove_if_empty(start)

    def _refuse_outside(self, folder: str) -> None:
        """A link on the way may lead out of the run; what lies behind it is not ours to delete."""
        if not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(self.root)):
            raise WorkError(f"{folder} leads out of the run folder {self.root} by a link; nothing there is deleted")

    def free_bytes(self) -> int | None:
        place = next(folder for folder in (self.root, *self.root.parents) if folder.exists())
        space = os.statvfs(place)
        return space.f_bavail * space.f_frsize


class LocalSink:
    """See `Sink`."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._open = True
        self._written = self._begun = 0

    def write(self, data: Bytes | np.ndarray) -> None:
        """Asks the disk to begin every few MiB, so that `close` finds little left to wait for."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]  # a buffer, which has no type before Python 3.12
        while view:
            count = os.write(self._file, view)
            self._written += count
            view = view[count:]
        if HAS_ADVICE and self._written - self._begun >= WRITE_BACK_BYTES:
            # On Linux this advice starts writing dirty pages back and returns; being dirty they also stay cached.
            os.posix_fadvise(self._file, self._begun, self._written - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = self._written

    def close(self) -> None:
        if self._open:
            self._open = False
            try:
                os.fsync(self._file)
            finally:
                os.close(self._file)

    def abort(self) -> None:
        if self._open:
            self._open = False
            os.close(self._file)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.target)


def _walk(folder: str, path: str) -> Iterator[tuple[str, int, bool]]:
    """(path, bytes, is a folder) of all below, children before their folder; links count as files, unfollowed.

    Files come sorted by path, as they are found: who stops after a few has not waited for the rest.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name + "/" * entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        inner = f"{path}/{entry.name}" if path else entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, inner)
            yield inner, 0, True
        else:
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                yield inner, entry.stat(follow_symlinks=False).st_size, False


def _make_folders(folder: str) -> None:
    """`os.makedirs`, with every new name made durable in its parent."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    _make_folders(parent)
    try:
        os.mkdir(folder)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise
    except FileNotFoundError:  # the parent was removed as empty in between
        _make_folders(folder)
    sync_folder(parent)


def sync_folder(folder: str) -> None:
    """Makes the names in a folder durable, where its file system can."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(handle)


def _remove_if_empty(folder: str) -> None:
    try:
        os.rmdir(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


@contextlib.contextmanager
def _temporary(target: str, data: bytes) -> Iterator[str]:
    """A durable file beside the target under a name of its own; gone afterwards unless it was moved away."""
    folder, name = os.path.split(target)
    temporary = f"{folder}/.{name}.{secrets.token_hex(8)}.tmp"
    sink = LocalSink(temporary)
    try:
        sink.write(data)
        sink.close()
        yield temporary
    finally:
        sink.abort()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _link(temporary: str, target: str) -> bool:
    """Gives the file its name if that is free; a hard link is atomic also on network file systems."""
    try:
        os.link(temporary, target)
        return True
    except FileExistsError:
        # NFS answers "exists" to its own repeated request after a lost reply: two names mean that it was ours.
        return os.stat(temporary).st_nlink == 2
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    with _locked(target):
        if os.path.lexists(target):
            return False
        os.replace(temporary, target)
        return True


@contextlib.contextmanager
def _locked(target: str) -> Iterator[None]:
    """Holds the lock file of `target`, which stays behind: removing it would let two processes hold "the" lock."""
    folder, name = os.path.split(target)
    handle = os.open(f"{folder}/.{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        give_up = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise WorkError(f"{target}: locked by another process for {LOCK_SECONDS:.0f} s (frozen?)") from None
                time.sleep(0.002)
        yield
    finally:
        os.close(handle)
