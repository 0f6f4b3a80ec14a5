"""Exports that cannot be: names that meet, directions that a format cannot hold, a store or a folder that gets lost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from commandcase import jsonl
from fakes import Fake, write_run

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
from runcase import run  # the runs' own helpers

from harvest.errors import RequestError, WorkError
from harvest.export.directions import export_directions
from harvest.export.export import Request, export_run
from harvest.store.local import LocalFiles

ROWS = [{"text": "abcdef"[: 2 + i % 4] + "xy"[i % 2], "label": str(i % 2)} for i in range(12)]


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return write_run(tmp_path / "r")


def export(fake: Fake, out: Path, **options: Any) -> dict[str, Any]:
    return export_run(Request(format="npy", run=fake.path, out=str(out), **options))


def test_directions_that_a_format_cannot_hold_are_refused_with_the_reason(tmp_path: Path) -> None:
    direction = {"name": "s", "column": "label", "positive": ["1"], "negative": ["0"], "holdout": 0}
    run(tmp_path / "run", jsonl(tmp_path / "a.jsonl", ROWS), directions=[direction], capture={"layers": [0]})
    with pytest.raises(RequestError, match=r"run: no direction that gguf can hold: direction\.k belongs to the output"):
        export_directions("gguf", str(tmp_path / "run"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_names_that_would_be_called_the_same_are_refused_together(tmp_path: Path) -> None:
    fake = write_run(tmp_path / "r", names={"embedding": 6, "residual_pre.0": 6})
    told = "^--naming: embedding and residual_pre.0 would both be called blocks.0.hook_resid_pre; choose one$"
    with pytest.raises(RequestError, match=told):
        export(fake, tmp_path / "out", naming="tl")
    assert not (tmp_path / "out").exists()


def test_of_two_exports_that_begin_at_once_one_is_told_of_the_other(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalFiles, "create", lambda *_: False)  # the other was there first
    with pytest.raises(RequestError, match=r"^out = '.*out': another export has just begun there$"):
        export(fake, tmp_path / "out")


def test_a_store_that_lost_what_it_took_ends_the_export_by_file_and_leaves_nothing(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = LocalFiles.list

    def short(self: LocalFiles, *prefix: str) -> list[tuple[str, int]]:
        return [(path, size - path.endswith(".npy")) for path, size in listed(self, *prefix)]

    monkeypatch.setattr(LocalFiles, "list", short)
    with pytest.raises(WorkError, match=r"/\S+\.npy: (\d+) bytes were written, the store holds \d+$"):
        export(fake, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["r"]


def test_a_whole_export_whose_folder_cannot_get_its_name_is_kept_and_says_where_it_is(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("harvest.export.folder.os.rename", refuse)
    with pytest.raises(
        WorkError, match=r"out\.unfinished is complete, but cannot become \S+out: Permission denied; rename it$"
    ):
        export(fake, tmp_path / "out")
    assert (tmp_path / "out.unfinished/export.json").exists()
    assert not (tmp_path / "out").exists()
