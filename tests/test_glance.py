"""What notebooks and prompts show of public objects: the essentials in a few lines, and text that stays text."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import Fake, write_run
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest import glance
from harvest.concepts.directions import Named
from harvest.errors import RequestError

EVIL = '<script>alert("1")</script> & <b>'
"""As a name, a model, a path."""
PLAIN = {"div", "strong", "table", "thead", "tbody", "tr", "td", "th"}


class Page(HTMLParser):
    """Checks that tags are balanced and known; collects the text of each cell."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.cells: list[str] = []
        self.attributes: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in PLAIN, tag
        assert {name for name, _ in attrs} <= {"style"}
        self.attributes += [value or "" for _, value in attrs]
        self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def page(shown: Any) -> Page:
    found = Page(shown._repr_html_())
    own = [style.replace("color: inherit", "") for style in found.attributes]
    assert all("color" not in style and "url" not in style for style in own), "light and dark are the notebook's"
    return found


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return write_run(tmp_path / "run <i>", [[5, 0, 3], [4, 2]], {"residual.0": 4, "residual.10": 4, "mlp.1": 6})


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A run with a direction, whose path and column are markup."""
    data = [{"text": f"text {i}", "group": EVIL if i % 2 else "no"} for i in range(24)]
    job = {
        "run": {"path": str(tmp_path / "<b>run"), "threads": 1},
        "model": {"name": EVIL},
        "store": {"shard_documents": 8},
        "directions": [
            {"name": "sentiment", "column": "group", "positive": [EVIL], "negative": ["no"], "read": "last"}
        ],
    }
    return harvest.run(job, model=tiny_llama(vocab=300), tokenizer=byte_tokenizer(), data=data)


def test_a_run_shows_what_it_is_of_and_what_it_holds_and_names_stay_text(run: Any) -> None:
    shown = page(run)
    assert run.path in shown.text
    assert shown.cells[shown.cells.index("model") + 1] == EVIL
    assert f"{len(run):,} of each name, float32" in shown.cells
    assert shown.cells[shown.cells.index("names") + 1] == "residual.0, residual.1, residual.2"
    assert shown.cells[shown.cells.index("directions") + 1] == "sentiment"
    assert shown.cells[shown.cells.index("state") + 1] == "complete"
    assert len(repr(run)) < 200 + len(run.path)


def test_an_unfinished_run_says_that_it_is(fake: Fake) -> None:
    (Path(fake.path) / "complete.json").unlink(missing_ok=True)
    shown = page(harvest.open(fake.path))
    assert shown.cells[shown.cells.index("state") + 1].startswith("unfinished")
    assert shown.cells[shown.cells.index("rows") + 1] == "14 of each name, float32"


def test_several_runs_and_joined_ones_show_theirs(fake: Fake, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", [[5, 0, 3], [4, 2]], {"residual.0": 4, "residual.10": 4, "mlp.1": 6})
    several = page(harvest.open([fake.path, other.path]))
    assert "28" in several.cells
    joined = page(harvest.join({"<a>": fake.path, "b": other.path}))
    assert "<a>/residual.0" in joined.text


def test_activations_show_rows_width_and_dtype(fake: Fake) -> None:
    shown = page(harvest.open(fake.path)["mlp.1"])
    assert "Activations mlp.1" in shown.text
    assert shown.cells == ["rows", "14", "width", "6", "dtype", "float32", "size", "336 B before compression"]


def test_a_direction_shows_its_mode_norm_examples_and_figures(run: Any) -> None:
    directions = run.directions()
    direction = directions["sentiment"]["residual.1"]
    shown = page(direction)
    assert f"{direction.norm:.4g}" in shown.cells[shown.cells.index("norm") + 1]
    assert shown.cells[shown.cells.index("examples") + 1] == "A {}, B {}".format(*direction.counts.rows)
    assert "Direction sentiment" in shown.text
    assert page(directions["sentiment"]).cells[1] == repr(directions["sentiment"]["residual.0"])
    assert page(directions).cells == ["sentiment", "residual.0, residual.1, residual.2"]
    undefined = harvest.concept_direction(torch.ones(4, 3), [0, 0, 1, 1])
    assert undefined.status in page(undefined).cells
    assert len(repr(undefined).splitlines()) == 1


def test_statistics_print_a_line_for_each_name_and_show_a_table_of_one(run: Any) -> None:
    statistics = run.statistics()
    lines = repr(statistics).splitlines()
    assert lines[0] == "statistics, 3:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == run.names
    assert all(len(line) < 150 for line in lines)
    one = statistics["residual.2"]
    assert len(repr(one)) < 150
    shown = page(one)
    at = shown.cells.index("mean norm")
    assert shown.cells[at + 1] == glance.figure(one.mean_norm)
    assert shown.cells[at + 2] == glance.figure(one.ordinary.mean_norm)
    assert shown.cells[: shown.cells.index("rows")] == ["", "all rows", "without special tokens"]
    page(one.ordinary)
    page(statistics)
    with pytest.raises(RequestError, match=r"no 'residual\.9' here"):
        statistics["residual.9"]


def test_batches_show_where_they_are(fake: Fake) -> None:
    batches = harvest.open(fake.path).batches("residual.0", batch_size=4, world=2, rank=1, where=[1, 2, 3, 4, 5, 9])
    next(batches)
    shown = page(batches)
    assert shown.cells[shown.cells.index("next") + 1] == f"batch 1 of {len(batches)}, from epoch 0 on"
    assert shown.cells[shown.cells.index("rows") + 1] == "6, selected"
    assert shown.cells[shown.cells.index("rank") + 1] == "1 of 2"


def test_what_holds_tensors_prints_shapes_and_no_numbers() -> None:
    model = tiny_llama(vocab=300)
    captured = harvest.capture_activations(model, [1, 2, 3], harvest.CaptureSpec(layers=(1,)))
    assert repr(captured) == "[CapturedSite(layer=1, site='residual', tensor=float32 [3, 16])]"
    cache = harvest.ActivationCache()
    record = harvest.ActivationRecord("user", 0, 1, "residual", captured[0].tensor, (1, 3), {"answer": (2, 3)})
    cache.add(record)
    text = "ActivationRecord('user', message 0, layer 1, residual: float32 [3, 16], tokens [1, 3], answer)"
    assert repr(record) == text
    assert repr(cache) == "ActivationCache(1 record, 1 message, residual, 192 B, offload='cpu')"
    assert captured[0].tensor.shape == (3, 16), "a NamedTuple still: layer, site, tensor"
    assert tuple(captured[0])[:2] == (1, "residual")


@pytest.mark.parametrize("count", [0, 1, 40, 41, 300])
def test_long_tables_and_lists_show_the_first_and_count_the_rest(count: int) -> None:
    rows = [(f"residual.{i}", EVIL) for i in range(count)]
    shown = Page(glance.html(EVIL, rows, note=EVIL))
    assert len(shown.cells) == 2 * (count if count <= 40 else 39)
    assert set(shown.cells[1::2]) <= {EVIL}
    assert (f"and {count - 39} more" in shown.text) == (count > 40)
    assert EVIL in shown.text
    lines = repr(Named(dict(rows), "names")).splitlines()
    assert len(lines) == {0: 1, 1: 2, 40: 41}.get(count, 41)


@pytest.mark.parametrize(
    ("function", "given", "text"),
    [
        (glance.size, 999, "999 B"),
        (glance.size, 2.88e9, "2.88 GB"),
        (glance.size, 1.5e15, "1,500.00 TB"),
        (glance.figure, None, "-"),
        (glance.figure, float("nan"), "-"),
        (glance.figure, 0.0123456, "0.01235"),
        (glance.figure, 12345.6, "12,346"),
        (glance.few, [], "none"),
        (glance.few, [str(i) for i in range(9)], "0, 1, 2, 3, 4 ... 8 (9)"),
    ],
)
def test_numbers_are_short(function: Callable[[Any], str], given: Any, text: str) -> None:
    assert function(given) == text


def test_no_public_repr_is_an_address(run: Any) -> None:
    shown = [run, run["residual.0"], run.statistics(), run.batches("residual.0"), run.directions()]
    assert not [one for one in shown if re.search(r"object at 0x", repr(one))]
