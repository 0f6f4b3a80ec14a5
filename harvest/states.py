"""The saved sums of a committed shard, wherever its attempt lies."""

from __future__ import annotations

from harvest.records import ShardRecord
from harvest.reduce.base import StateFile
from harvest.store import layout
from harvest.store.files import Files


def open_states(files: Files, record: ShardRecord) -> StateFile:
    """The saved sums of a shard. Raises DamageError where they are missing or cut."""
    path = f"{layout.attempt_path(record.attempt)}/{layout.STATES}"

    def read(start: int, length: int) -> bytes:
        try:
            return files.read_range(path, start, length)
        except FileNotFoundError:
            return b""  # reads as cut short, by name

    return StateFile(read, states_path(files, record))


def states_path(files: Files, record: ShardRecord) -> str:
    """What messages call them."""
    return f"{files.url}/{layout.attempt_path(record.attempt)}/{layout.STATES}"
