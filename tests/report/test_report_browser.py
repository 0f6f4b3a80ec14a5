"""The page in a real headless Chromium: nothing complains, everything is drawn, light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import Page, chromium
from PIL import Image
from reportcase import DIRECTION, HOSTILE, records, run
from tiny import tiny_llama

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


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 names, and documents of a thousand tokens: every chart and table is as full as it gets."""
    folder = tmp_path_factory.mktemp("many")
    sites = [
        "residual",
        "residual_pre",
        "attn",
        "mlp",
        "mlp_input",
        "module:model.layers.{layer}.post_attention_layernorm",
    ]
    model = tiny_llama(layers=50, vocab=300, hidden_size=8, max_position_embeddings=2048)
    rows = [
        {"text": "abcdef"[number % 6] * (40 + 960 * (number == 0)), "label": str(number % 2)} for number in range(24)
    ]
    run(folder / "run", rows, model=model, capture={"sites": sites}, directions=[{**DIRECTION, "modes": ["whitened"]}])
    return folder / "run/report.html"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    run(folder / "run", capture={"layers": [1]}, directions=[DIRECTION])
    return folder / "run/report.html"


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("names", ["one", "many"])
def test_no_text_of_a_chart_runs_into_another_or_out_of_it(
    names: str, width: int, page: Page, request: pytest.FixtureRequest
) -> None:
    page.show(request.getfixturevalue(names), width=width)
    assert page.complaints == []
    assert page.value("document.documentElement.scrollWidth") == width
    found = page.value(
        "[...document.querySelectorAll('svg.chart')].map(chart => {"
        " const all = chart.getBoundingClientRect();"
        " const boxes = [...chart.querySelectorAll('text')].map(one => [one.textContent, one.getBoundingClientRect()]);"
        " const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1"
        "  && a.top < b.bottom - 3 && b.top < a.bottom - 3;"
        " return [chart.getAttribute('aria-label'),"
        "  boxes.filter(([, b]) => b.left < all.left - 1 || b.right > all.right + 1).map(([text]) => text),"
        "  boxes.flatMap(([text, a], i) => boxes.slice(i + 1)"
        "   .filter(([, b]) => meet(a, b)).map(([other]) => [text, other]))];"
        "})"
    )
    assert len(found) >= 4
    assert [(title, out) for title, out, _ in found if out] == []
    assert [(title, met) for title, _, met in found if met] == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_table_that_goes_on_has_a_shadow_where_it_does_and_says_so(
    dark: bool, page: Page, many: Path, one: Path, tmp_path: Path
) -> None:
    page.show(many, width=1280, dark=dark)
    table = "document.querySelector('#health .scroll')"
    assert page.value(f"{table}.scrollHeight > 2 * {table}.clientHeight")
    assert page.value(f"{table}.scrollWidth == {table}.clientWidth"), "every column is seen on a desk"
    assert page.value(f"{table}.previousElementSibling.textContent") == "300 names, a line each; the table scrolls."
    ends = [shade(page, table, end, tmp_path) for end in ("0", "1e6")]
    assert ends[0] > 20, "more below"
    assert ends[1] < 5, "its end"
    page.show(one, width=1280, dark=dark)
    assert page.value(f"{table}.scrollHeight <= {table}.clientHeight + 1")
    assert "the table scrolls" not in page.value("document.querySelector('#health').textContent")
    assert shade(page, table, "0", tmp_path) < 5


def shade(page: Page, table: str, scrolled: str, tmp_path: Path) -> int:
    """How much darker or lighter than the paper the lowest line of a table is, of 255, scrolled so far down."""
    page.value(f"{table}.scrollTop = {scrolled}")
    x, y = page.value(
        f"(() => {{ const box = {table}.getBoundingClientRect();"
        " return [box.left + scrollX + box.width / 2, box.bottom + scrollY]; })()"
    )
    page.picture(tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as shot:
        line = np.asarray(shot.convert("L"))[int(y) - 6 : int(y) - 1, int(x) - 60 : int(x) + 60]
        paper = int(np.asarray(shot.convert("L"))[2, 2])
    return int(np.abs(np.median(line, axis=1) - paper).max())
