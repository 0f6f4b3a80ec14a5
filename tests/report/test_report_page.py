"""The page itself, taken apart by html.parser: whole for every kind of run, self-contained, and safe with any data."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reportcase import DIRECTION, HOSTILE, outside, parse, records, run
from tiny import byte_tokenizer, tiny_llama
from transformers import LlamaConfig, LlamaForCausalLM

import harvest
from harvest.__main__ import app
from harvest.errors import RequestError
from harvest.report.charts import Charts
from harvest.report.health import NameHealth
from harvest.report.positions import PositionNorms, _edges
from harvest.report.write import write_report
from harvest.store.ledger import Ledger
from harvest.store.opening import open_files


def check(page: Path) -> Any:
    """What holds for every page."""
    found = parse(page)
    assert outside(found) == []
    assert found.of("script") == []
    assert all(not key.startswith("on") for _, attributes in found.tags for key in attributes)
    assert len(found.ids) == len(set(found.ids)), "two elements of one id"
    assert {at["content"] for at in found.of("meta") if at.get("http-equiv") == "Content-Security-Policy"}
    inside = {at["href"][1:] for at in found.of("a")}
    assert inside <= set(found.ids)
    raw = page.read_text(encoding="utf-8")
    used = set(re.findall(r"(?:href=\"#|url\(#)([^\")]+)", raw))
    assert used <= set(found.ids), "a chart refers to what is not there"
    assert not re.search(r"\bnan\b|#0a0b|Undefined", found.text + found.styles)
    return found


def test_a_whole_run_has_every_section_and_its_charts(tmp_path: Path) -> None:
    run(tmp_path / "run", directions=[DIRECTION])
    found = check(tmp_path / "run/report.html")
    assert {"holds", "health", "directions", "work", "what", "next"} <= set(found.ids)
    titles = [at["aria-label"] for at in found.of("svg")]
    assert titles[:2] == ["Norms of residual by layer", "Norms by position"]
    assert "AUROC of residual by layer" in titles
    assert re.fullmatch(r"Projections on (mean_difference|whitened) at residual\.\d", titles[-1])
    assert "Furthest towards A" in found.text


@pytest.mark.parametrize("modes", [["mean_difference", "whitened"], ["whitened", "mean_difference"]])
def test_projections_and_texts_are_of_the_mode_that_is_best_in_folds_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modes: list[str]
) -> None:
    monkeypatch.setattr("reportcase.RANDOM", np.random.default_rng(5))
    run(tmp_path / "run", records(90), directions=[{**DIRECTION, "modes": modes}])
    card = json.loads((tmp_path / "run/directions/tone.json").read_text())
    scores = {(one["mode"], one["at"]): one["cross_validated_auroc"] for one in card["directions"]}
    of_best = {mode: scores[mode, card["best"][mode]] for mode in modes}
    assert len({*of_best.values()}) == 2, "no tie, or the order of the modes would decide"
    mode = max(of_best, key=lambda one: of_best[one])
    along = f"{mode} at {card['best'][mode]}"
    found = check(tmp_path / "run/report.html")
    assert [at["aria-label"] for at in found.of("svg")][-1] == f"Projections on {along}"
    assert (
        f"Projections are on {along}: of the 2 modes' best layers the one with the highest AUROC in folds."
        in found.text
    )
    assert f"coloured by where its row lies along {along}: towards A" in found.text


def test_one_mode_is_named_and_not_said_to_be_chosen(tmp_path: Path) -> None:
    run(tmp_path / "run", directions=[{**DIRECTION, "modes": ["whitened"]}])
    found = check(tmp_path / "run/report.html")
    assert "lies along whitened at residual." in found.text
    assert "Projections are on" not in found.text


def test_a_single_line_of_norms_is_named_too() -> None:
    names = [
        NameHealth(name=f"residual.{i}", site="residual", layer=i, mean_norm=2.0 + i, quantiles={0.5: 2.0}, rows=9)
        for i in range(3)
    ]
    drawn = parse(Charts().norms_by_layer("residual", names).svg)
    assert re.search(r"\bmean\b", drawn.text)
    assert "without special" not in drawn.text


def test_a_list_of_self_check_errors_that_is_cut_says_so(tmp_path: Path) -> None:
    run(tmp_path / "nine", capture={"sites": ["residual", "attn", "mlp"]})
    text = check(tmp_path / "nine/report.html").text
    assert "The 8 largest errors among 9 names, relative to a row's norm:" in text
    run(tmp_path / "three")
    assert "The largest error of 3 names, relative to a row's norm:" in check(tmp_path / "three/report.html").text


def test_what_comes_from_the_data_stays_text_wherever_it_lands(tmp_path: Path) -> None:
    rows = [{"text": f"{HOSTILE} {number}", "label": HOSTILE if number % 2 else "0"} for number in range(40)]
    source = tmp_path / "<img src=x onerror=alert(1)>.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    direction = {**DIRECTION, "positive": [HOSTILE]}
    harvest.run(
        {
            "model": {"name": f"m{HOSTILE}"},
            "data": {"path": str(source)},
            "run": {"path": str(tmp_path / "a<b>&run"), "threads": 1},
            "directions": [direction],
        },
        model=tiny_llama(vocab=300, max_position_embeddings=256),
        tokenizer=byte_tokenizer(),
    )
    page = tmp_path / "a<b>&run/report.html"
    found = check(page)
    assert found.of("img") == []
    assert "<script" not in page.read_text()
    assert f"A against B: label {HOSTILE} against 0" in found.text
    assert HOSTILE in found.text.replace("·", ""), "the document itself, token by token"
    assert f"m{HOSTILE}" in found.text, "the model's name"


def test_a_run_that_stores_no_rows_shows_its_sums_and_says_what_is_left_out(tmp_path: Path) -> None:
    run(tmp_path / "run", capture={"store": False}, directions=[{**DIRECTION, "modes": ["mean_difference"]}])
    found = check(tmp_path / "run/report.html")
    assert [at["aria-label"] for at in found.of("svg")] == ["Norms of residual by layer"]
    assert "Norms by position are left out: the run stores no rows." in found.text
    assert "Projections are left out" in found.text


def test_a_run_without_moments_still_says_what_is_not_finite(tmp_path: Path) -> None:
    run(tmp_path / "run", statistics={"moments": False})
    found = check(tmp_path / "run/report.html")
    assert "Every value of every name is a finite number." in found.text
    assert "keeps no moments" in found.text
    assert [at["aria-label"] for at in found.of("svg")] == ["Norms by position"]
    assert "directions" not in found.ids


def test_an_unfinished_run_has_a_page_of_what_is_committed(tmp_path: Path) -> None:
    run(tmp_path / "run", directions=[DIRECTION], store={"shard_documents": 20})
    ledger = Ledger(open_files(str(tmp_path / "run")))
    ledger.reopen()
    ledger.remove("f00000-s000002")
    told = write_report(harvest.open(tmp_path / "run"), tmp_path / "page.html", byte_pieces)
    assert told == {"report": str(tmp_path / "page.html"), "bytes": (tmp_path / "page.html").stat().st_size}
    found = check(tmp_path / "page.html")
    assert "unfinished: what is committed so far" in found.text
    assert "of about 60" in found.text
    for key in ("f00000-s000000", "f00000-s000001"):
        ledger.remove(key)
    write_report(harvest.open(tmp_path / "run"), tmp_path / "empty.html")
    found = check(tmp_path / "empty.html")
    assert "No shard is committed yet." in found.text


def byte_pieces() -> list[bytes]:
    """Of the byte tokenizer, near enough."""
    return [b"\xff", b"\xff", *(bytes([value]) for value in range(256))]


def test_one_name_and_one_layer_are_enough(tmp_path: Path) -> None:
    run(tmp_path / "run", capture={"layers": [1]}, directions=[DIRECTION])
    found = check(tmp_path / "run/report.html")
    assert len(found.of("svg")) == 4


def test_too_few_held_out_examples_are_said_and_not_drawn(tmp_path: Path) -> None:
    run(tmp_path / "run", records(20), directions=[{**DIRECTION, "holdout": 0.2}])
    found = check(tmp_path / "run/report.html")
    assert "There are no held-out figures: too few held out" in found.text
    assert not any("AUROC" in at["aria-label"] for at in found.of("svg"))


def test_what_adding_a_direction_does_is_told(tmp_path: Path) -> None:
    direction = {**DIRECTION, "modes": ["mean_difference"], "check": 6}
    run(tmp_path / "run", answers={"1": "p", "0": "q"}, directions=[direction])
    found = check(tmp_path / "run/report.html")
    card = json.loads((tmp_path / "run/directions/tone.json").read_text())["check"]["mean_difference"]
    told = f"mean_difference added at {card['at']}: logits of A's answers {card['A']['before']:.2f} -> "
    assert told in found.text


def test_names_outside_all_layers_are_in_the_table(tmp_path: Path) -> None:
    run(tmp_path / "run", capture={"sites": ["embedding", "final_norm", "module:model.layers.0.mlp"]})
    found = check(tmp_path / "run/report.html")
    assert [at["aria-label"] for at in found.of("svg")] == ["Norms by position"]
    assert all(name in found.text for name in ("embedding", "final_norm", "module:model.layers.0.mlp"))


def test_three_hundred_names_make_a_page_of_bounded_size(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=100,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    direction = {**DIRECTION, "modes": ["mean_difference"]}
    run(
        tmp_path / "run",
        records(24),
        model=model,
        capture={"sites": ["residual", "attn", "mlp"]},
        directions=[direction],
    )
    found = check(tmp_path / "run/report.html")
    assert len(harvest.open(tmp_path / "run").names) == 300
    assert len(found.of("svg")) <= 8
    assert (tmp_path / "run/report.html").stat().st_size < 1_500_000
    assert "residual.99" in found.text


def test_pairs_of_texts_are_told_apart(tmp_path: Path) -> None:
    rows = [{"good": "abc" * (number % 5 + 1) + "x", "bad": "bca" * (number % 4 + 1) + "y"} for number in range(40)]
    direction = {"name": "tone", "modes": ["paired_rejection"], "holdout": 0.5}
    run(tmp_path / "run", rows, data={"contrast": ["good", "bad"]}, directions=[direction])
    found = check(tmp_path / "run/report.html")
    assert "A against B: good against bad of each row" in found.text
    assert re.search(r"document \d+, variant 0, group A", found.text)


def test_compressed_rows_are_not_unpacked_for_a_page(tmp_path: Path) -> None:
    run(tmp_path / "run", store={"compression": "zstd"}, directions=[DIRECTION])
    found = check(tmp_path / "run/report.html")
    assert "Norms by position are left out: the rows are compressed." in found.text
    assert "Documents are left out: the rows are compressed." in found.text
    assert any(at["aria-label"].startswith("Projections") for at in found.of("svg"))


def test_a_run_of_token_ids_without_a_tokenizer_shows_them(tmp_path: Path) -> None:
    rows = [{"ids": [5 + number % 7, 9, 17, 30 + number % 2], "label": str(number % 2)} for number in range(40)]
    run(tmp_path / "run", rows, tokenizer=None, data={"ids": "ids"}, directions=[DIRECTION])
    found = check(tmp_path / "run/report.html")
    assert "Tokens are shown by their ids: the run has no tokenizer." in found.text
    assert "⟨9⟩⟨17⟩⟨3" in found.text
    assert write_report(harvest.open(tmp_path / "run"), tmp_path / "again.html")["bytes"]
    assert "Tokens are shown by their ids: the run's tokenizer cannot be loaded" in parse(tmp_path / "again.html").text


def test_a_run_elsewhere_has_its_page_there(tmp_path: Path) -> None:
    made = run(tmp_path, run={"path": "memory://report-of-a-run"}, directions=[DIRECTION])
    (tmp_path / "page.html").write_bytes(made.files.read("report.html"))
    found = check(tmp_path / "page.html")
    assert "the rows are not on this machine" in found.text
    assert [at["aria-label"] for at in found.of("svg")] == ["Norms of residual by layer", "AUROC of residual by layer"]


def test_damaged_rows_cost_a_section_and_not_the_page(tmp_path: Path) -> None:
    run(tmp_path / "run", [*records(), {"text": None, "label": "0"}], data={"on_bad": "skip"}, directions=[DIRECTION])
    for path in (tmp_path / "run/shards").glob("*/*.parquet"):
        path.unlink()
    (tmp_path / "run/coordinator.json").write_text("torn")
    (tmp_path / "run/statistics.parquet").write_bytes(b"torn")
    write_report(harvest.open(tmp_path / "run"), tmp_path / "page.html")
    found = check(tmp_path / "page.html")
    assert "tokens.parquet: missing" in found.text
    assert "statistics.parquet" in found.text
    assert "Skipped documents" in found.text


def test_a_table_of_very_many_directions_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harvest.report.page.MOST_ENTRIES", 4)
    run(tmp_path / "run", directions=[DIRECTION])
    found = check(tmp_path / "run/report.html")
    assert "The first 4 of 6 directions" in found.text


def test_everything_beside_the_code_is_in_the_wheel() -> None:
    root = Path(__file__).parents[2]
    told = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    beside = {
        path.relative_to(root).as_posix()
        for path in (root / "harvest").rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert beside == {f"{package.replace('.', '/')}/{name}" for package, names in told.items() for name in names}


def test_the_command_writes_the_page_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "run")
    (tmp_path / "run/report.html").unlink()
    app(["report", str(tmp_path / "run")], standalone_mode=False)
    assert capsys.readouterr().out.strip() == str(tmp_path / "run/report.html")
    app(["report", str(tmp_path / "run"), "--out", str(tmp_path / "x.html"), "--json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert told == {"report": str(tmp_path / "x.html"), "bytes": (tmp_path / "x.html").stat().st_size}
    check(tmp_path / "x.html")


def test_the_next_command_lets_a_limit_grow_and_offers_none_without_one(tmp_path: Path) -> None:
    run(tmp_path / "limited", data={"limit": 20})
    assert "harvest run JOB --set data.limit=40" in check(tmp_path / "limited/report.html").text
    run(tmp_path / "whole")
    assert "harvest run" not in check(tmp_path / "whole/report.html").text


def test_a_place_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    found = run(tmp_path / "run")
    with pytest.raises(RequestError, match=r"--out '.*/no/page.html': .*/no is no folder"):
        write_report(found, tmp_path / "no/page.html")
    with pytest.raises(RequestError, match="cannot be written"):
        write_report(found, tmp_path)
    with pytest.raises(RequestError, match="is not a run"):
        app(["report", str(tmp_path)], standalone_mode=False)


@pytest.mark.parametrize("last", [0, 5, 100, 5_000, 1_000_000])
def test_labels_of_positions_leave_room_between_them(last: int) -> None:
    edges = _edges(last)
    ranges = tuple((int(a), int(b) - 1) for a, b in itertools.pairwise(edges))
    norms = PositionNorms(ranges=ranges, norms={"residual.0": tuple(range(1, len(ranges) + 1))}, rows=9, shards=1)
    svg = Charts().norms_by_position(norms).svg
    labels = re.findall(r'id="c1-xtick_\d+">.*?<text[^>]*>([^<]+)</text>', svg, flags=re.DOTALL)
    assert labels[0] == "0"
    assert {*labels} <= {str(first) for first, _ in ranges}
    assert len(labels) >= min(len(ranges), 4)
    assert sum(map(len, labels)) + 2 * len(labels) <= 42


def test_a_long_name_is_shown_by_its_ends_and_does_not_leave_the_chart() -> None:
    name = f"module:model.layers.7.{'deep.' * 20}proj"
    norms = PositionNorms(ranges=((0, 0), (1, 1)), norms={name: (1.0, 2.0)}, rows=2, shards=1)
    svg = Charts().norms_by_position(norms).svg
    (shown,) = re.findall(r"<text[^>]*>(module:[^<]+)</text>", svg)
    assert len(shown) <= 52
    assert shown.startswith("module:model.layers.7.")
    assert shown.endswith("deep.proj")
