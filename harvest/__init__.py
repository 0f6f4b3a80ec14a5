"""Harvest: language-model activations at dataset scale. Importing it loads neither torch nor ray."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what _HOME says, for editors and type checkers
    from harvest.config import Job as Job
    from harvest.errors import DocumentError as DocumentError
    from harvest.errors import HarvestError as HarvestError
    from harvest.errors import RequestError as RequestError
    from harvest.errors import WorkError as WorkError
    from harvest.model.cache import ActivationCache as ActivationCache
    from harvest.model.cache import ActivationRecord as ActivationRecord
    from harvest.model.interface import CapturedSite as CapturedSite
    from harvest.model.interface import CaptureRequest as CaptureRequest
    from harvest.model.interface import CaptureSpec as CaptureSpec
    from harvest.model.interface import capture_activations as capture_activations
    from harvest.model.sites import decoder_layers as decoder_layers
    from harvest.model.steer import steer as steer
    from harvest.reading.activations import Activations as Activations
    from harvest.reading.joined import join as join
    from harvest.reading.reader import Run as Run
    from harvest.reading.several import open_runs
    from harvest.reduce.accumulate import ConceptAccumulator as ConceptAccumulator
    from harvest.reduce.accumulate import concept_direction as concept_direction
    from harvest.reduce.direction import Direction as Direction
    from harvest.runtime.coordinate import run as run

    open = open_runs

__version__ = "0.1.0"

_HOME = {
    "run": "harvest.runtime.coordinate:run",
    "open": "harvest.reading.several:open_runs",
    "join": "harvest.reading.joined:join",
    "Run": "harvest.reading.reader:Run",
    "Activations": "harvest.reading.activations:Activations",
    "Direction": "harvest.reduce.direction:Direction",
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
