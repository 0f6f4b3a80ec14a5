"""The built site: strict, whole by itself, every link and anchor there, readable wide and narrow, light and dark."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from pages import PAGES
from realdata import ROOT

sys.path.insert(0, str(ROOT / "tests/report"))
from browser import Page, chromium

LOADING = {"link": "href", "form": "action"} | dict.fromkeys(("script", "img", "iframe", "source", "video"), "src")


@dataclass
class Parsed(HTMLParser):
    """What a page links to, loads, and can be linked to at."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    headings: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value for key, value in attrs if value is not None}
        self.anchors |= {given[key] for key in ("id", "name") if key in given}
        self.headings += tag == "h1"
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in LOADING and LOADING[tag] in given:
            self.loads.append(given[LOADING[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` builds it; a warning is an error."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml", "-d", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def parsed(site: Path) -> dict[Path, Parsed]:
    found = {}
    for path in sorted(site.rglob("*.html")):
        found[path] = Parsed()
        found[path].feed(path.read_text(encoding="utf-8"))
    return found


def test_every_page_is_built_and_has_one_heading(site: Path, parsed: dict[Path, Parsed]) -> None:
    named = re.findall(r"^ +- [^:]+: (\S+)\.md$", (ROOT / "docs/mkdocs.yml").read_text(), flags=re.MULTILINE)
    pages = {site / f"{page}.html" for page in named}
    assert len(pages) == len(named) >= len(PAGES)
    assert set(parsed) == pages | {site / "404.html"}
    assert {path for path in pages if parsed[path].headings != 1} == set()


def test_every_link_leads_to_a_page_and_an_anchor_that_are_there(site: Path, parsed: dict[Path, Parsed]) -> None:
    dead = []
    for path, page in parsed.items():
        for link in page.links:
            target, anchor = urldefrag(link)
            if urlsplit(link).scheme or path.name == "404.html":
                continue
            there = (path.parent / unquote(target)).resolve() if target else path
            if there not in parsed or (anchor and unquote(anchor) not in parsed[there].anchors):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []


def test_links_to_elsewhere_are_few_and_known(parsed: dict[Path, Parsed]) -> None:
    known = ("https://zarr.dev", "https://docs.ray.io")
    away = {link for page in parsed.values() for link in page.links if urlsplit(link).scheme}
    assert {link for link in away if not link.startswith(known)} == set()


def test_nothing_is_loaded_from_elsewhere(site: Path, parsed: dict[Path, Parsed]) -> None:
    loads = [load for page in parsed.values() for load in page.loads]
    assert len(loads) > len(parsed)
    assert [load for load in loads if urlsplit(load).scheme or urlsplit(load).netloc] == []
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert re.findall(r"@import|url\(\s*['\"]?(?:https?:)?//", text) == [], sheet


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    command = chromium()
    if command is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    with Page(command) as found:
        yield found


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, True)], ids=["phone, light", "desk, dark"])
def test_pages_fit_their_window_and_ask_for_nothing_but_their_own_files(
    width: int, dark: bool, browser: Page, site: Path, parsed: dict[Path, Parsed]
) -> None:
    for path in parsed:
        if path.name == "404.html":  # its addresses begin at the root of a server
            continue
        browser.call("Page.navigate", url="about:blank")
        browser.call("Storage.clearDataForOrigin", origin="file://", storageTypes="local_storage")
        browser.show(path, width=width, dark=dark)
        where = f"{path.relative_to(site)} at {width}"
        assert browser.value("document.documentElement.scrollWidth") == width, where
        assert [url for url in browser.asked_for if not url.startswith((site.as_uri(), "data:", "blob:"))] == [], where
        assert browser.complaints == [], where
        scheme = browser.value("document.body.dataset.mdColorScheme")
        assert scheme == ("slate" if dark else "default"), where


def test_search_finds_a_word_from_the_disk(browser: Page, site: Path) -> None:
    browser.show(site / "index.html", width=1280)
    found = browser.value(
        "(async () => { const box = document.querySelector('[data-md-component=search-query]');"
        " document.querySelector('[data-md-toggle=search]').click(); box.focus(); box.value = 'llamascopium';"
        " for (const kind of ['input', 'keyup', 'change']) box.dispatchEvent(new Event(kind, {bubbles: true}));"
        " for (let i = 0; i < 100; i++) { await new Promise(done => setTimeout(done, 50));"
        "  const hits = [...document.querySelectorAll('.md-search-result__item a')];"
        "  if (hits.length) return hits.map(hit => hit.getAttribute('href')); } return []; })()"
    )
    assert any("howto/export.html" in link for link in found)
