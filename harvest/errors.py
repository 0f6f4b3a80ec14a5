"""What can go wrong, by who can mend it: the user's request, the work itself, or a damaged store."""

from __future__ import annotations


class HarvestError(Exception):
    """Base of every error that Harvest raises on purpose; its text is one line for the user."""

    status = 1
    """Exit status of the command that ends with this error."""


class RequestError(HarvestError, ValueError):
    """The request is wrong: names the setting, its value and what is allowed. Nothing was written."""

    status = 2


class DocumentError(HarvestError):
    """A document cannot be used, and would not be usable at a second try either."""

    def __init__(self, document: int, reason: str, where: str = "") -> None:
        self.document, self.reason, self.where = document, reason, where
        super().__init__(f"document {document}{f' ({where})' if where else ''}: {reason}")


class MismatchError(HarvestError):
    """A batch gives other rows than the document alone, or the data other rows than were harvested."""


class WorkError(HarvestError):
    """The work failed: names the shard, document or worker."""


class LostLeaseError(HarvestError):
    """Another coordinator has taken this run over; whatever this process still does must not count."""


class DamageError(HarvestError):
    """What is on disk is not what the ledger says."""


class InterruptError(HarvestError):
    """Stopped on request; the same command resumes."""

    status = 130


def ending(error: BaseException) -> tuple[str, int]:
    """How a command ends with an error: the last line that it says, and its exit status."""
    if isinstance(error, HarvestError):
        text, status = str(error), error.status
    elif isinstance(error, KeyboardInterrupt):
        text, status = "interrupted; the same command resumes", 130
    else:
        text, status = f"failed: {type(error).__name__}: {error}", 1
    return " ".join(text.split()), status
