"""What the tests of the report share: small runs, and a page read by html.parser alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.reading.reader import Run

RANDOM = np.random.default_rng(5)
HOSTILE = "<script>alert('x')</script>&amp;<img src=http://evil.example/x.png onerror=alert(1)>"
DIRECTION = {
    "name": "tone",
    "column": "label",
    "positive": ["1"],
    "negative": ["0"],
    "holdout": 0.4,
    "modes": ["mean_difference", "whitened"],
}


def records(count: int = 60) -> list[dict[str, Any]]:
    """Texts whose label shows in their last letters; some would be markup."""
    rows = []
    for number in range(count):
        body = "".join(RANDOM.choice(list("abcdef"), size=int(RANDOM.integers(1, 20))))
        rows.append({"text": body + "<b>&"[: number % 5] + "xy"[number % 2], "label": str(number % 2)})
    return rows


def run(
    path: Path, rows: Any = None, *, model: Any = None, tokenizer: Any = "byte", job: Any = None, **tables: Any
) -> Run:
    """A finished run over objects; `job` is laid under the tables."""
    job = {**(job or {}), **tables, "run": {"path": str(path), "threads": 1, **tables.get("run", {})}}
    return harvest.run(
        job,
        model=tiny_llama(vocab=300) if model is None else model,
        tokenizer=byte_tokenizer() if tokenizer == "byte" else tokenizer,
        data=records() if rows is None else rows,
    )


@dataclass
class Parsed:
    """A page as a browser would take it apart."""

    tags: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    text: str = ""
    styles: str = ""
    ids: list[str] = field(default_factory=list)

    def of(self, tag: str) -> list[dict[str, str]]:
        """Attributes of every element of this kind."""
        return [attributes for name, attributes in self.tags if name == tag]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page, self._open = Parsed(), ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {key: value or "" for key, value in attrs}
        self.page.tags.append((tag, attributes))
        self.page.ids += [attributes["id"]] if "id" in attributes else []
        self.page.styles += attributes.get("style", "") + "\n"
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "style":
            self.page.styles += data
        else:
            self.page.text += data


def parse(page: str | Path) -> Parsed:
    """A page, or the file that holds it."""
    reader = _Reader()
    reader.feed(page.read_text(encoding="utf-8") if isinstance(page, Path) else page)
    reader.close()
    return reader.page


def outside(page: Parsed) -> list[str]:
    """Every address that the page would ask for or lead to, but for places on itself."""
    links = [
        v for _, at in page.tags for key, v in at.items() if key.split(":")[-1] in ("src", "href", "srcset", "data")
    ]
    links += re.findall(r"url\(([^)]*)\)", page.styles + " ".join(v for _, at in page.tags for v in at.values()))
    links += re.findall(r"@import[^;]*", page.styles)
    return [link for link in links if not link.strip("\"' ").startswith("#") and link != "data:,"]
