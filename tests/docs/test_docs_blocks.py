"""Every block of every page does what the page says, one after the other, as its reader would try them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import PAGES, SITE, blocks, follow

import harvest


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(SITE)))
def test_the_blocks_of_a_page_can_be_followed_from_top_to_bottom(
    page: Path, desk: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    steps = blocks(page)
    if any("s3://my-bucket" in block.text for block in steps):
        request.getfixturevalue("bucket")
    scope: dict[str, Any] = {}
    for block in steps:
        left = follow(block, scope, capsys)
        if "bits" in left:  # rows read without Harvest
            first = harvest.open("runs/demo")["residual.15"].numpy(slice(0, left["rows"]))
            assert np.array_equal(left["values"], first)
