"""The page in a real headless Chromium: nothing complains, everything is drawn, light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, chromium
from reportcase import DIRECTION, HOSTILE, records, run

COMMAND = chromium()
pytestmark = pytest.mark.skipif(
    COMMAND is None, reason="no chromium, chromium-browser or google-chrome on this machine"
)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    assert COMMAND is not None
    with Page(COMMAND) as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    rows = [*records(), {"text": HOSTILE[:40], "label": "1"}, {"text": None, "label": "0"}]
    sites = {"sites": ["residual", "attn", "mlp_neurons", "module:model.layers.1.mlp.down_proj"]}
    name = {"name": f"a-model-of-a-very-long-name-{'x' * 80}"}
    run(folder / "run", rows, data={"on_bad": "skip"}, directions=[DIRECTION], capture=sites, job={"model": name})
    return folder / "run/report.html"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_drawn_without_a_complaint_and_fits_its_window(
    width: int, dark: bool, page: Page, report: Path
) -> None:
    page.show(report, width=width, dark=dark)
    assert page.complaints == []
    assert page.asked_for == [report.absolute().as_uri()], "it stands alone"
    assert page.value("document.documentElement.scrollWidth") == page.value("innerWidth") == width
    drawn = page.value(
        "[...document.querySelectorAll('svg.chart')].map(one => {"
        " const box = one.getBoundingClientRect();"
        " return [box.width, box.height, one.querySelectorAll('path, use').length,"
        " [...one.querySelectorAll('text')].every(text => text.getBBox().width > 0)]; })"
    )
    assert len(drawn) >= 6
    assert all(w > 200 and h > 120 and marks > 10 and texts for w, h, marks, texts in drawn)


def test_the_charts_take_the_colours_of_the_scheme(page: Page, report: Path) -> None:
    probe = (
        "(() => { const line = document.querySelector('svg.chart g[id*=line2d] path[style*=\"--chart-2\"]');"
        " return [getComputedStyle(document.body).backgroundColor, getComputedStyle(line).stroke]; })()"
    )
    found = []
    for dark in (False, True):
        page.show(report, width=1280, dark=dark)
        found.append(page.value(probe))
    assert found == [["rgb(255, 255, 255)", "rgb(37, 99, 200)"], ["rgb(20, 23, 26)", "rgb(108, 163, 255)"]]


def test_tokens_are_coloured_and_readable_in_both_schemes(page: Page, report: Path) -> None:
    for dark in (False, True):
        page.show(report, width=1280, dark=dark)
        colours = page.value(
            "[...document.querySelectorAll('.text span')].map(one => getComputedStyle(one).backgroundColor)"
        )
        assert len(colours) > 30
        assert len(set(colours)) > 5
        assert all(colour.startswith("rgba(") for colour in colours)


def test_a_printed_page_is_dark_on_white_and_hides_nothing(page: Page, report: Path) -> None:
    page.show(report, width=1280, dark=True)
    page.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.value("getComputedStyle(document.querySelector('.scroll')).maxHeight") == "none"
    page.call("Emulation.setEmulatedMedia", media="")


def test_markup_in_the_data_makes_no_element(page: Page, report: Path) -> None:
    page.show(report, width=1280)
    assert page.value("document.querySelectorAll('script, img, iframe, object, b b').length") == 0
    assert page.value("document.scripts.length") == 0
