"""The Zarr data type `bfloat16` for zarr-python: importing this module registers it; loads no torch.

Without it zarr-python refuses such an array by name, which beats a `uint16` that reads as wrong numbers. The
package also names it under the entry point `zarr.data_type`, which zarr-python 3.1.6 lists but never loads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Self

import ml_dtypes
import numpy as np
from zarr.core.dtype.common import DataTypeValidationError, HasEndianness, HasItemSize
from zarr.core.dtype.wrapper import ZDType
from zarr.dtype import data_type_registry

BITS: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How Zarr spells the values that JSON lacks."""


@dataclass(frozen=True, kw_only=True)
class BFloat16(ZDType[Any, Any], HasEndianness, HasItemSize):  # type: ignore[misc]  # zarr is not analysed
    """Brain floating point: the upper half of a float32, little endian. Zarr format 3 only."""

    dtype_cls = type(np.dtype(ml_dtypes.bfloat16))
    _zarr_v3_name = "bfloat16"

    @property
    def item_size(self) -> int:
        return 2

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        if dtype == np.dtype(ml_dtypes.bfloat16):
            return cls()
        raise DataTypeValidationError(f"{dtype} is not bfloat16")

    def to_native_dtype(self) -> np.dtype[Any]:
        if self.endianness != "little":
            raise DataTypeValidationError(f"bfloat16 is stored little endian, not {self.endianness!r}")
        return BITS

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise DataTypeValidationError(f"Zarr format 2 has no bfloat16 ({data!r})")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data == cls._zarr_v3_name:
            return cls()
        raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name!r}")

    def to_json(self, zarr_format: Literal[2, 3]) -> Any:
        if zarr_format == 3:
            return self._zarr_v3_name
        raise ValueError("Zarr format 2 has no bfloat16")

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, (int, float, np.floating, np.integer, ml_dtypes.bfloat16))

    def cast_scalar(self, data: object) -> Any:
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} cannot be a bfloat16")
        return ml_dtypes.bfloat16(data)

    def default_scalar(self) -> Any:
        return ml_dtypes.bfloat16(0)

    def from_json_scalar(self, data: Any, *, zarr_format: Literal[2, 3]) -> Any:
        if isinstance(data, str) and _is_bits(data):
            return np.array(int(data, 16), np.uint16).view(ml_dtypes.bfloat16)[()]
        value = SPECIAL.get(data, data) if isinstance(data, str) else data
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{data!r} is no bfloat16 fill value")
        return ml_dtypes.bfloat16(value)

    def to_json_scalar(self, data: object, *, zarr_format: Literal[2, 3]) -> float | str:
        value = float(self.cast_scalar(data))
        if math.isnan(value):
            return "NaN"
        return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")


def _is_bits(text: str) -> bool:
    """`0x` and four hex digits: a fill value by its bits."""
    return len(text) == 6 and text.startswith("0x") and all(digit in "0123456789abcdefABCDEF" for digit in text[2:])


if BFloat16._zarr_v3_name not in data_type_registry.contents:  # a zarr-python that knows bfloat16 keeps its own
    data_type_registry.register(BFloat16._zarr_v3_name, BFloat16)
