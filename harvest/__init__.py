"""Harvest: language-model activations at dataset scale. Importing it loads neither torch nor ray."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "run": "harvest.runtime.coordinate:run",
    "open": "harvest.several:open_runs",
    "join": "harvest.joined:join",
    "capture_activations": "harvest.model.interface:capture_activations",
    "CaptureSpec": "harvest.model.interface:CaptureSpec",
    "CapturedSite": "harvest.model.interface:CapturedSite",
    "CaptureRequest": "harvest.model.interface:CaptureRequest",
    "ActivationRecord": "harvest.model.cache:ActivationRecord",
    "ActivationCache": "harvest.model.cache:ActivationCache",
    "decoder_layers": "harvest.model.sites:decoder_layers",
    "steer": "harvest.model.steer:steer",
    "concept_direction": "harvest.reduce.accumulate:concept_direction",
    "ConceptAccumulator": "harvest.reduce.accumulate:ConceptAccumulator",
    "Job": "harvest.config:Job",
    "HarvestError": "harvest.errors:HarvestError",
    "RequestError": "harvest.errors:RequestError",
    "DocumentError": "harvest.errors:DocumentError",
    "WorkError": "harvest.errors:WorkError",
}
"""Public name -> `module:attribute`, imported when it is first used."""

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        module, _, attribute = _HOME[name].partition(":")
        value = getattr(importlib.import_module(module), attribute)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'harvest' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
