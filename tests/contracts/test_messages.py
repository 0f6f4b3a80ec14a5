"""Every message that a user can meet is in messages.txt, and has the form that the others have.

A message is what an error of `harvest.errors` is made with, and what a validator of the job file raises; of a document
that cannot be used, the reason (its words are those of `harvest.text.reasons`) and what was seen. Who adds or changes
one reads it as a user would (what is wrong, where, what is allowed), and puts it into the list:

    python tests/contracts/test_messages.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script it has only its own folder

from messages import PACKAGE, REASONS, VALIDATORS, every_message

LIST = Path(__file__).with_name("messages.txt")
LONGEST = 330
"""Characters of a message, what it fills in not counted."""
TABLES = "model|data|tokens|chat|capture|store|statistics|run|answers|directions"
NAMES = re.compile(rf"\{{|--\w|\b({TABLES})\b|[`']|^[\w.]+(\(.*?\))?: ")
FOREIGN = re.compile(r"(?i)input should|pydantic|pyarrow|valid (integer|string|dictionary|list|tuple)|traceback")
PROPER = ("Ray", "Zarr", "GPU", "CUDA", "TransformerLens")


def messages() -> list[str]:
    """`file: Error: text` of every message in the package, sorted; what is filled in stands in braces."""
    return sorted({str(message) for message in every_message()})


def said(line: str) -> str:
    return line.split(": ", 2)[2]


def test_every_message_is_in_the_list() -> None:
    new = sorted({*messages()} - {*LIST.read_text(encoding="utf-8").splitlines()})
    assert new == [], "read them as a user would, then: python tests/contracts/test_messages.py"


def faults(line: str) -> list[str]:
    """What is wrong with the form of a message."""
    text = said(line)
    plain = re.sub(r"\{.*?\}", "", text)
    # who adds setting and value, or file and line, or the document
    by_caller = line.startswith(VALIDATORS) or ": RowError: " in line or ": DocumentError: " in line
    found = {
        "more than one line": "\n" in text,
        "spaces at its ends": text != text.strip(),
        "a full stop, where it may stand among others": text.endswith("."),
        f"longer than {LONGEST}": len(plain) > LONGEST,
        "names no setting, file or value": not (by_caller or NAMES.search(text)),
        "words of another library": bool(FOREIGN.search(plain)),
        "a capital, where it goes on after `harvest: `": text[0].isupper() and not text.startswith(PROPER),
    }
    return [fault for fault, there in found.items() if there]


def test_every_message_has_the_form_of_the_house() -> None:
    assert {line: found for line in messages() if (found := faults(line))} == {}


def test_the_checks_find_what_they_look_for() -> None:
    assert len(faults("x.py: WorkError: Input should be a valid integer. ")) == 4
    assert faults("x.py: WorkError: a\nb {c}") == ["more than one line"]
    assert len(messages()) > 400


NOTED = """
import pytest
from harvest.config import load_job
from harvest.errors import DocumentError, RequestError

def test_three_messages():
    for wrong in ({"data": {"limit": float("nan")}}, {"model": {"name": "m", "options": {"tp_size": 2}}}):
        with pytest.raises(RequestError):
            load_job({**wrong, "run": {"path": "r"}})
    with pytest.raises(DocumentError):
        raise DocumentError(3, "made by a test")
"""


def test_the_record_of_messages_knows_those_that_were_made_also_by_validators_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "test_noted.py").write_text(NOTED)
    tests = str(Path(__file__).parents[1])
    importable = os.pathsep.join([tests, str(PACKAGE.parent)])
    environment = {**os.environ, "HARVEST_RAISED": str(tmp_path / "raised"), "PYTHONPATH": importable}
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "raised", "-q"]
    done = subprocess.run(
        [*command, "test_noted.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    told = subprocess.run(
        [sys.executable, f"{tests}/raised.py", str(tmp_path / "raised")], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    left, total = "\n".join(told[:-1]), sum(message.file != REASONS for message in every_message())
    assert told[-1] == f"{len(told) - 1} of {total} messages are made by no test"
    for made in ("{where} = {value}: allowed are finite numbers", "{key}: not for a job; leave it out"):
        assert any(message.text == made for message in every_message())
        assert made not in left
    for never in ("{key}: secrets are read", "--set {override}: allowed is", "not a JSON object but a"):
        assert never in left


if __name__ == "__main__":
    LIST.write_text("".join(f"{line}\n" for line in messages()), encoding="utf-8")
