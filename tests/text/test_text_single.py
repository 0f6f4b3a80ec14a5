"""`single`: every window in a batch of its own and unpadded, for models in which whatever shares a forward is seen."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harvest.records import Window
from harvest.text.batch import batching_of


@given(lengths=st.lists(st.integers(1, 40), max_size=12), rows_per_window=st.integers(1, 60))
def test_each_window_runs_by_itself_and_every_row_comes_once(lengths: list[int], rows_per_window: int) -> None:
    windows, row = [], 0
    for number, length in enumerate(lengths):
        ids = np.full(length, 7 + number, dtype=np.int32)
        windows.append(Window(ids=ids, keep=np.arange(0, length, 2, dtype=np.int32), row=row, document=number))
        row += len(windows[-1].keep)
    seen: dict[int, int] = {}
    for stretch in batching_of("single")(windows, tokens_per_batch=1000, rows_per_window=rows_per_window):
        for batch in stretch.batches:
            (document,) = set(batch.documents.tolist())
            assert batch.position_ids is None
            assert batch.input_ids.tolist() == [windows[document].ids.tolist()]
            assert batch.lengths.tolist() == [len(windows[document].ids)]
            assert batch.source.tolist() == windows[document].keep.tolist()
            seen |= {stretch.first_row + int(place): document for place in batch.rows}
    assert [seen[at] for at in range(row)] == [w.document for w in windows for _ in w.keep]
