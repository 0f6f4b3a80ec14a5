"""What every table of a job file is: strict, frozen, no unknown keys; and the kinds of numbers that several have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Auto = Literal["auto"]
Names = Annotated[tuple[str, ...], Field(strict=False)]
MOST = 2**53
"""Counts beyond it are typing errors, and what counts rows and bytes does not hold them."""
MOST_THREADS = 1024


class Settings(BaseModel):
    """One table of the job file. Unknown keys are errors; TOML types are taken as they are."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


def _check_count(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= MOST):
        return value
    raise ValueError("allowed are 'auto' or a whole number of at least 1" + _bound(value, MOST))


def _check_threads(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= MOST_THREADS):
        return value
    raise ValueError("allowed are 'auto' or a whole number of at least 1" + _bound(value, MOST_THREADS))


def _bound(value: Any, most: int) -> str:
    return f" and at most {most}" if type(value) is int and value > most else ""


def _check_amount(value: Any) -> Any:
    if value == "auto" or (type(value) in (int, float) and 0 <= value <= MOST):
        return value
    raise ValueError("allowed are 'auto' or a number of at least 0")


Count = Annotated[int | Literal["auto"], BeforeValidator(_check_count)]
Threads = Annotated[int | Literal["auto"], BeforeValidator(_check_threads)]
Amount = Annotated[int | float | Literal["auto"], BeforeValidator(_check_amount)]
