"""Hub ids: what is wrong costs one question, what is cached needs no network. The hub here is the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from tiny import tiny_llama

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ASK = """
import json, sys
from harvest.settings.model import ModelSettings
from harvest.errors import RequestError
from harvest.model.fingerprint import of_checkpoint
from harvest.model.load import load_config, load_tokenizer

def told(ask, name):
    try:
        return ask(ModelSettings(name=name))
    except RequestError as error:
        return str(error)

def fingerprint(settings):
    load_config(settings)
    return of_checkpoint(settings)

print(json.dumps({
    "mute": told(load_config, "some/mute"),
    "mute tokenizer": told(lambda settings: load_tokenizer(settings, "some/mutetok"), "some/cached"),
    "absent": told(load_config, "some/absent"),
    "misspelt": told(load_config, "some/cachd"),
    "folder": told(load_config, "harvst"),
    "cached": told(fingerprint, "some/cached"),
}))
"""


class Hub(BaseHTTPRequestHandler):
    """Hangs up on every question, but for one repository that it knows not to exist."""

    asked: ClassVar[Counter[str]] = Counter()

    def do_HEAD(self) -> None:
        repository = self.path.split("/")[2]
        self.asked[repository] += 1
        if repository != "absent":
            self.connection.close()
            return
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("hub")
    cached = home / "hub" / "models--some--cached"
    tiny_llama().config.save_pretrained(cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    there = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK],
            env={**os.environ, **there},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_hub_out_of_reach_is_told_after_one_question(answers: dict[str, str]) -> None:
    assert answers["mute"].startswith("model.name = 'some/mute': no such folder or file, not in the hub's cache")
    assert "cannot be reached" in answers["mute"]
    assert answers["mute tokenizer"].startswith("tokens.tokenizer = 'some/mutetok'")
    assert Hub.asked["mute"] == Hub.asked["mutetok"] == 1


def test_a_repository_that_the_hub_does_not_know_is_told_in_its_words(answers: dict[str, str]) -> None:
    assert answers["absent"].startswith("model.name = 'some/absent': cannot be loaded")
    assert "\n" not in answers["absent"]
    assert 1 <= Hub.asked["absent"] <= 8


def test_what_is_cached_is_found_and_locked_without_a_network(answers: dict[str, str]) -> None:
    assert answers["cached"] == f"commit:{COMMIT}"


def test_a_misspelt_name_is_told_the_one_that_is_here(answers: dict[str, str]) -> None:
    assert answers["misspelt"].endswith("; did you mean some/cached?")
    assert answers["folder"].endswith("; did you mean harvest?")
    assert "did you mean" not in answers["mute"] + answers["absent"]
