"""What a verification found: damage (a reader would be misled or stopped) and notes (worth knowing, not wrong)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as the ledger says, or worth knowing."""

    damage: bool
    shard: str | None
    """Key of the shard; None for the run as a whole."""
    object: str
    """Path within the run."""
    what: str

    def __str__(self) -> str:
        return f"{'damage' if self.damage else 'note'}: {self.object}: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a verification read and found."""

    run: str
    shards: int
    """Commit records that could be read."""
    objects: int
    """Objects that they vouch for."""
    bytes: int
    rows: int
    remade: tuple[str, ...]
    """Reductions whose sums were made again from stored rows; none where no rows are stored."""
    missing: tuple[str, ...]
    """Keys of the shards that a resume would harvest, as far as they are known."""
    findings: tuple[Finding, ...]
    """Damage first, in dataset order."""

    @property
    def damaged(self) -> bool:
        """Whether anything is damage."""
        return any(finding.damage for finding in self.findings)

    @property
    def text(self) -> str:
        """A line for each finding, then the sum."""
        damage = sum(finding.damage for finding in self.findings)
        read = f"{self.shards} shards, {self.objects} objects, {self.bytes:,} bytes, {self.rows:,} rows read"
        made = f"sums made again from rows: {', '.join(self.remade) or 'none'}"
        told = f"{damage} damaged, {len(self.findings) - damage} notes" if self.findings else "everything is as it was"
        return "\n".join([*map(str, self.findings), f"{self.run}: {read}; {made}; {told}"])

    @property
    def data(self) -> dict[str, Any]:
        """The same as plain values."""
        return {**asdict(self), "damaged": self.damaged}
