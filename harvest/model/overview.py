"""Which architectures have which sites, as a table: rendered from the table that the code uses."""

from __future__ import annotations

from harvest.model.architectures import ARCHITECTURES, Architecture
from harvest.model.points import IN_BLOCK, OUTSIDE, SITES, SUMS


def overview() -> str:
    """A Markdown table: families that lack the same sites share a line, those that lack fewest first."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for family, architecture in ARCHITECTURES.items():
        groups.setdefault(_lacking(architecture), []).append(family)
    lines = ["| architectures (`config.model_type`) | sites they do not have |", "| --- | --- |"]
    for lacking, families in sorted(groups.items(), key=lambda item: len(item[0])):
        lines.append(f"| {', '.join(families)} | {', '.join(lacking) or 'none'} |")
    return "\n".join(lines) + "\n"


def _lacking(architecture: Architecture) -> tuple[str, ...]:
    return tuple(described for site in SITES if (described := _lacks(architecture, site)) is not None)


def _lacks(architecture: Architecture, site: str) -> str | None:
    """The site with its condition where the family never or not always has it; None where it always does."""
    flag = architecture.post_norm if site in SUMS else False
    if not flag and site == "residual_mid":
        flag = architecture.parallel
    if flag is True or (IN_BLOCK.get(site) or OUTSIDE[site])(architecture) is None:
        return f"`{site}`"
    if site == "mlp_neurons" and architecture.router is not None:
        return f"`{site}` in blocks of experts"  # whose weights are fused, so that there is no module to read
    return f"`{site}` in some models" if flag else None
