"""What the pipeline tells while it works and what it asks, and how a try at a shard ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harvest.errors import DocumentError, HarvestError, MismatchError, RequestError
from harvest.records import Assignment, ShardRecord, ShardText
from harvest.text.reasons import remedy


class CalledOffError(Exception):
    """Nobody needs this try any more: another one has been faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one try at a shard ended: with a record, or with an error."""

    assignment: Assignment
    record: ShardRecord | None = None
    error: BaseException | None = None

    @property
    def permanent(self) -> bool:
        """The error would repeat itself: another try is pointless."""
        return isinstance(self.error, DocumentError | MismatchError | RequestError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What one batch added, for whoever watches."""

    shard: str
    attempt: str
    """Folder of the try at the shard."""
    tokens: int
    """Real tokens that the forward read."""
    rows: int
    bytes: int
    """That go to the store."""
    forward_seconds: float
    """Without the copies, where they are no part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What the pipeline tells and asks while it works; every call is cheap."""

    was_read: Callable[[Assignment, ShardText], None] = lambda assignment, text: None
    """A shard has been tokenised; its forward is still to come."""
    advanced: Callable[[Progress], None] = lambda progress: None
    still_mine: Callable[[], None] = lambda: None
    """Raises LostLeaseError when another coordinator has taken over; asked before each object that is written."""
    wanted: Callable[[Assignment], bool] = lambda assignment: True
    """Whether this try is still needed; asked before a shard is read, and before each window's forward."""
    ending: Callable[[], None] = lambda: None
    """The pipeline breaks off: the iterator that it takes shards from must not wait for another one."""


def describe(assignment: Assignment, error: BaseException) -> str:
    """One line that names the shard and what happened."""
    text = str(error) if isinstance(error, HarvestError) else f"{type(error).__name__}: {error}"
    if isinstance(error, DocumentError) and error.where:  # as read; a value that the store cannot hold has no place
        text += f"; {remedy(error.reason)}"
    return f"shard {assignment.shard.key}: {' '.join(text.split())}"
