"""A long export says on stderr how far it is; where it cannot write it says so in one line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from fakes import Fake, write_run

from harvest.__main__ import _status
from harvest.export.export import Request, export_run
from harvest.export.known import format_names
from harvest.runtime import terminal
from harvest.store.remote import RemoteFiles


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    return write_run(tmp_path_factory.mktemp("run") / "r", [[30] * 8], {"residual.0": 64, "residual.1": 64})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("format", format_names())
def test_the_bytes_told_rise_to_what_was_written_and_were_expected_about_right(
    fake: Fake, tmp_path: Path, format: str
) -> None:
    told: list[tuple[int, int]] = []
    request = Request(format=format, run=fake.path, out=str(tmp_path / "out"))
    card = export_run(request, lambda done, expected: told.append((done, expected)))
    written = [done for done, _ in told]
    assert written == sorted(written)
    assert written[-1] == sum(file["bytes"] for file in card["files"].values())
    assert {expected for _, expected in told} == {240 * (2 * 64 * 4 + 24)}


def test_a_log_gets_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with terminal.writing("exporting npy", stream) as advanced:
        for done in range(1, 26):
            now[0] += 1
            advanced(done * 10**7, 25 * 10**7)
    assert stream.getvalue().splitlines() == [
        "harvest: exporting npy: 100 MB  40 % done  10 MB/s",
        "harvest: exporting npy: 200 MB  80 % done  10 MB/s",
    ]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "BAR_SECONDS", 0.0)
    stream = Terminal()
    with terminal.writing("exporting npy", stream) as advanced:
        advanced(5 * 10**6, 10**7)
    assert "exporting npy" in stream.getvalue()
    assert "50%" in stream.getvalue()


def test_stdout_holds_the_card_alone(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(["export", "npy", fake.path, str(tmp_path / "a"), "--json"]) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)["rows"] == 240
    assert found.err == ""
    assert _status(["export", "npy", fake.path, str(tmp_path / "b")]) == 0
    assert "exporting" not in capsys.readouterr().out


@pytest.mark.parametrize("call", ["list", "create"])
def test_a_store_that_refuses_or_does_not_answer_is_one_line(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def broken(*_: object) -> None:
        raise PermissionError(13, "Access Denied\nby policy")

    monkeypatch.setattr(RemoteFiles, call, broken)
    out = f"memory://exports/{tmp_path.name}"
    assert _status(["export", "npy", fake.path, out]) == 2
    assert capsys.readouterr().err == f"harvest: out = '{out}': Access Denied by policy\n"
