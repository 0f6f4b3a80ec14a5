"""A try that is dropped leaves nothing behind, whatever some of it meets on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harvest.errors import RequestError
from harvest.records import ArraySpec
from harvest.store.attempt import AttemptWriter
from harvest.store.opening import open_files

ATTEMPT = "f00000-s000000.00000000-1"


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), RequestError("credentials have expired")])
def test_an_object_that_cannot_be_dropped_leaves_the_others_to_be_and_hides_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    files, dropped = open_files(str(tmp_path)), []
    opened = files.open_write

    def open_write(path: str) -> Any:
        sink = opened(path)
        abort = sink.abort

        def stubborn() -> None:
            dropped.append(path)
            abort()
            if len(dropped) == 1:
                raise error

        monkeypatch.setattr(sink, "abort", stubborn)
        return sink

    monkeypatch.setattr(files, "open_write", open_write)
    specs = {name: ArraySpec(rows=8, width=4, dtype="float32") for name in ("residual.0", "residual.1", "mlp.0")}

    def write() -> None:
        with AttemptWriter(files, ATTEMPT, specs, chunk_bytes=1 << 10) as writer:
            for name in specs:
                writer.append(name, np.zeros((4, 4), np.float32))
            raise KeyError("what led here")

    with pytest.raises(KeyError, match="what led here"):
        write()
    assert len(dropped) == 3
    assert [path for path, _ in files.list("shards")] == []
