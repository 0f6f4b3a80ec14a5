"""What in a run folder is ours: nothing else is ever deleted, and a folder of someone else's is refused untouched."""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
from collections.abc import Iterable

from harvest.errors import RequestError
from harvest.store import layout
from harvest.store.files import Files

SHOWN = 3
"""Files that a refusal names."""
CLEARED_FIRST = (layout.COMPLETE, layout.STATISTICS, layout.COVARIANCE, layout.REPORT)
"""What claims results goes before the results: a killed clearing leaves an unfinished run, never a false one."""


def foreign(files: Files) -> list[str]:
    """Paths in the folder that no run writes, sorted."""
    return [path for path, _ in files.list() if not layout.is_ours(path)]


def require_run_or_empty(files: Files) -> bool:
    """Whether the folder holds a run (False: it is empty or absent). Raises RequestError for anything else."""
    if files.exists(layout.RUN):
        return True
    found = (path for path, _ in files.list() if not (layout.is_ours(path) and "/" not in path))
    others = list(itertools.islice(found, SHOWN + 1))  # a few: what is there may be all of a disk
    if others:
        shown = ", ".join(others[:SHOWN]) + (" and more" if len(others) > SHOWN else "")
        raise RequestError(
            f"run.path = {files.url!r}: holds files that are not a run ({shown}); choose an empty folder"
        )
    return False


def no_run(path: str) -> RequestError:
    """The error for a place without a run."""
    return RequestError(f"{path} is not a run (no {layout.RUN}); allowed is the run.path of a job that has begun")


def require_writable(files: Files, setting: str = "run.path") -> None:
    """Raises RequestError where nothing can be written into a local folder, or made where it will be."""
    place = files.url
    while files.local and not os.path.isdir(place):
        place = os.path.dirname(place)
    try:
        if files.local:
            tempfile.TemporaryFile(dir=place).close()  # without a name, so that nobody sees it
    except OSError as error:
        why = "" if error.errno == errno.ENOENT else f": {error.strerror}"  # `/proc` says so of its own children
        raise RequestError(
            f"{setting} = {files.url!r}: cannot be written ({place} takes no files{why}); choose another folder"
        ) from None


def stray_attempts(files: Files, committed: Iterable[str], life: str = "") -> list[str]:
    """Attempts on disk that are neither committed nor of this `life`, sorted."""
    found = {attempt for path, _ in files.list(layout.SHARDS) if (attempt := layout.attempt_of(path))}
    own = {attempt for attempt in found if (parsed := layout.parse_attempt(attempt)) and parsed[1] == life}
    return sorted(found - set(committed) - own)


def remove_attempt(files: Files, attempt: str) -> None:
    """Removes the files of an attempt that we name; anything else in there stays, and its folder with it."""
    if layout.parse_attempt(attempt) is None:
        raise ValueError(f"{attempt!r} is not the name of an attempt")
    files.delete_tree(layout.attempt_path(attempt), only=layout.is_ours)


def remove_strays(files: Files, committed: Iterable[str], life: str = "") -> list[str]:
    """Removes what earlier lives left uncommitted; call it after taking the lease. Returns the attempts removed.

    The record is looked for once more right before each removal: a coordinator that was taken over while it
    committed may have been faster.
    """
    removed = []
    for attempt in stray_attempts(files, committed, life):
        parsed = layout.parse_attempt(attempt)
        assert parsed is not None
        if files.exists(layout.record_path(parsed[0])) and f'"{attempt}"' in _record_text(files, parsed[0]):
            continue
        remove_attempt(files, attempt)
        removed.append(attempt)
    if files.local:  # a life that was killed before it wrote into a new folder left it empty: no file tells of it
        files.delete_tree(layout.SHARDS, only=lambda path: False)
    return removed


def _record_text(files: Files, key: str) -> str:
    try:
        return files.read(layout.record_path(key)).decode(errors="replace")
    except FileNotFoundError:
        return ""


def clear_run(files: Files, *, keep_run: bool = False) -> list[str]:
    """Removes an earlier run's own files, for `run.overwrite`; returns what stays because no run wrote it.

    Call it with the lease held, which stays. `keep_run` leaves run.json for a caller that replaces it: without one,
    a folder with someone else's files beside ours would be no run's, and be refused to the next life. Raises
    RequestError, touching nothing, where there is no run.
    """
    if not require_run_or_empty(files):
        return []
    for path in CLEARED_FIRST:
        files.delete(path)
    for folder in (layout.LEDGER, layout.DIRECTIONS, layout.SHARDS):
        files.delete_tree(folder, only=layout.is_ours)
    if not keep_run:
        files.delete(layout.RUN)
    return foreign(files)
