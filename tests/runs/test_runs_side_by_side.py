"""Names written side by side, as to an object store: the same objects, and nothing on its way once a try is dropped."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from runcase import job
from tiny import byte_tokenizer, tiny_llama

import harvest
from harvest.errors import WorkError
from harvest.store.attempt import AttemptWriter

TEXTS = ["a first text", "another", "", "the last of them, and the longest"]


def harvested(path: str, **tables: Any) -> Any:
    capture = {"sites": ["residual", "mlp"], "pool": ["mean"]}
    return harvest.run(
        job(path, capture=capture, **tables), model=tiny_llama(vocab=300), tokenizer=byte_tokenizer(), data=TEXTS
    )


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_an_object_store_holds_what_a_folder_does(tmp_path: Path, dtype: str) -> None:
    folder = harvested(str(tmp_path / "run"), store={"dtype": dtype})
    remote = harvested(f"memory://side-by-side-{dtype}", store={"dtype": dtype})
    objects = [{path: (o.bytes, o.crc32c) for path, o in run.shards[0].objects.items()} for run in (folder, remote)]
    assert objects[0] == objects[1]
    assert len(objects[0]) > 6 * 2


def test_several_names_are_on_their_way_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for another one: one after the other they would wait for ever."""
    append, met = AttemptWriter.append, threading.Barrier(2)

    def meeting(self: AttemptWriter, name: str, rows: Any) -> None:
        if not name.startswith("pooled"):
            met.wait(timeout=30)
        append(self, name, rows)

    monkeypatch.setattr(AttemptWriter, "append", meeting)
    assert len(harvested("memory://side-by-side-meeting").names) == 6  # three pairs


def test_a_name_that_cannot_be_written_waits_for_the_others_before_the_try_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else one that is late would write into what has just been removed."""
    append, late = AttemptWriter.append, []

    def troubled(self: AttemptWriter, name: str, rows: Any) -> None:
        if name == "residual.0":
            raise OSError("no more of this")
        if name == "residual.1":
            time.sleep(0.3)
        append(self, name, rows)
        late.append(name)

    monkeypatch.setattr(AttemptWriter, "append", troubled)
    with pytest.raises(WorkError, match=r"no more of this"):
        harvested("memory://side-by-side-troubled", run={"attempts": 1})
    assert "residual.1" in late
    assert fsspec.filesystem("memory").find("/side-by-side-troubled/shards") == []
