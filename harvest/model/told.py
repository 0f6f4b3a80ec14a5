"""What a checkpoint's own files tell in plain words before transformers is imported: enough to refuse what cannot be.

Whatever is not told plainly is left to the model itself, which takes seconds to ask.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harvest.model.architectures import ARCHITECTURES, unused_positions
from harvest.model.checkpoint import Checkpoint, config_file, locate
from harvest.model.points import MODULES, OUTSIDE, SITES, point_in, refuse_site, resolve_layers, split_site

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""How configs call the number of blocks."""
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""How they call the longest window."""
ODD = {"auto_map", "text_config", "is_encoder_decoder"}
"""Configs with one of these may mean other things by the same words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What is told; None for what is not."""

    layers: int | None
    positions: int | None
    kind: str
    sites: Mapping[str, str | None] | None
    """Every site -> why this kind of model has none, or None where it has."""

    def refuse(self, sites: Sequence[str], layers: str | Sequence[int]) -> None:
        """Raises RequestError for sites and layers that this model cannot have."""
        if self.layers is not None:
            resolve_layers(layers, self.layers)
        for asked in sites:
            if asked.partition(":")[0] in MODULES and ":" in asked:
                continue
            site, layer = split_site(asked)
            if self.sites is not None:
                available = [name for name, why in self.sites.items() if why is None]
                refuse_site(asked, site, layer, self.sites.get(site), self.kind, available)
            if self.layers is not None and layer is not None and site in SITES and site not in OUTSIDE:
                resolve_layers([layer], self.layers, f"capture.sites = {asked!r}")


NOTHING = Told(layers=None, positions=None, kind="", sites=None)


def told_by(name: str, revision: str) -> Told:
    """What the files of `model.name` tell, in well under a second. Raises RequestError as `locate` does."""
    checkpoint = locate(name, revision)
    if checkpoint.gguf_file is not None:
        return _of_gguf(checkpoint)
    path = config_file(checkpoint)
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path is not None else None
    except (OSError, ValueError):  # told in its own words where the model is loaded
        return NOTHING
    if not isinstance(config, dict) or ODD & config.keys():
        return NOTHING
    return _of_config(config)


def _of_config(config: Mapping[str, Any]) -> Told:
    kind = str(config.get("model_type"))
    positions = _plain(config, POSITIONS)
    if positions is not None and kind in ARCHITECTURES:
        positions -= unused_positions(SimpleNamespace(**{"pad_token_id": 1, **config}))
    return Told(
        layers=_plain(config, LAYERS),
        positions=positions if kind in ARCHITECTURES else None,
        kind=kind,
        sites=_sites(kind),
    )


def _of_gguf(checkpoint: Checkpoint) -> Told:
    from harvest.model.gguffile import told

    found = told(Path(checkpoint.where, checkpoint.gguf_file or ""))
    if found is None or found.kind not in ARCHITECTURES:  # T5's counts are those of two stacks
        return NOTHING
    return Told(layers=found.layers, positions=found.positions, kind=found.kind, sites=_sites(found.kind))


def _plain(config: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    """The one positive number that all of these keys say."""
    found = {config[key] for key in keys if type(config.get(key)) is int}  # a flag is an int, too
    return found.pop() if len(found) == 1 and min(found) > 0 else None


def _sites(kind: str) -> dict[str, str | None] | None:
    """Every site, where the table alone tells which of them a model of this kind has."""
    architecture = ARCHITECTURES.get(kind)
    if architecture is None or architecture.router is not None:  # experts replace a part of some blocks
        return None
    if not isinstance(architecture.parallel, bool) or not isinstance(architecture.post_norm, bool):
        return None  # settings decide that a file may leave to defaults
    points = {site: point_in(architecture, None, site) for site in SITES}
    return {site: point if isinstance(point, str) else None for site, point in points.items()}
