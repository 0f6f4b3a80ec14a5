"""int8 rows: symmetric, one float32 scale per row, the nearest code (ties to even); a value is `code * scale`.

A finite row is off by at most its largest magnitude / 254, up to float32 rounding. Rows of zeros have scale 0. A row
with a value that is no finite number has scale NaN, so that all of it reads as NaN: it is counted, never hidden.
"""

from __future__ import annotations

import torch

LEVELS = 127
"""Codes go from -127 to 127; -128 is what a missing chunk reads as elsewhere."""
SMALLEST = 2.0**-149
"""Positive float32."""
BLOCK_BYTES = 1 << 18
"""Of rows worked on together, while they are in the core's cache."""
DECODING = "value = code * scale of its row; a scale of NaN: the row had a value that is no finite number"


def quantise(rows: torch.Tensor) -> torch.Tensor:
    """float32 [n] scales of rows float32 [n, d], which become in place what the store will give back."""
    scales = torch.empty(len(rows), dtype=torch.float32)
    step = max(1, BLOCK_BYTES // max(1, rows.shape[1] * 4))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        scale = _scales_of(block)
        scales[start : start + step] = scale
        block.div_(_divisors(scale)).round_().clamp_(-LEVELS, LEVELS)
        block.mul_(scale[:, None]).add_(0.0)  # -0 becomes 0, as it is read
    return scales


def _scales_of(rows: torch.Tensor) -> torch.Tensor:
    largest = rows.abs().amax(dim=1)  # three times as fast as aminmax
    scale = largest / LEVELS
    scale = torch.where((scale == 0) & (largest > 0), SMALLEST, scale)
    scale = torch.where(torch.isinf(scale * LEVELS), torch.nextafter(scale, torch.zeros(())), scale)
    return torch.where(largest.isfinite(), scale, torch.nan)


def _divisors(scales: torch.Tensor) -> torch.Tensor:
    """[n, 1]: 1 where there is nothing to divide."""
    return torch.where(scales == 0, 1.0, scales)[:, None]


def codes_of(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """int8 [n, d]: the codes of rows [n, d] that `quantise` has made, with the scales [n] it gave; 0 where NaN."""
    codes = torch.empty(rows.shape, dtype=torch.int8)
    step = max(1, BLOCK_BYTES // max(1, rows.shape[1] * 4))
    for start in range(0, len(rows), step):
        exact = rows[start : start + step] / _divisors(scales[start : start + step])
        codes[start : start + step] = exact.nan_to_num_(nan=0.0).round_()
    return codes


def values_of(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [n, d] of codes int8 [n, d] and scales float32 [n, 1]."""
    return torch.mul(codes, scales, out=out)
