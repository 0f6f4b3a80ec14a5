"""A PyTorch DataLoader over batches whose place is that of what it gave, whatever its workers have read ahead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from harvest.errors import RequestError

DECIDED = ("dataset", "batch_size", "num_workers", "persistent_workers", "in_order")
"""Options of DataLoader that `loader` decides by itself: batches come as they are, in their order."""


class Loader(DataLoader[Any]):
    """Each loop goes on where the last one stopped, or behind its end with the next epochs, as loops over `Batches` do.

    Each has workers of its own: those of a loop that was left have gone further than what it gave.
    """

    def __init__(self, batches: IterableDataset[Any], workers: int, options: Mapping[str, Any]) -> None:
        """`batches`: `Batches` that nothing else iterates. Raises RequestError for an option that is decided."""
        for key in DECIDED:
            if key in options:
                raise RequestError(f"loader: {key} = {options[key]!r}: decided by loader() itself; leave it out")
        super().__init__(batches, batch_size=None, num_workers=workers, **options)
        self._batches: Any = batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # DataLoader promises an iterator of its own kind
        state = iter(self._batches).state_dict()
        for given in super().__iter__():
            state["done"] += 1
            self._batches.load_state_dict(state)
            yield given
        next(self._batches, None)  # finds that it is at its end

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is; JSON. Of a global order it also fits `Batches` and any number of workers."""
        return dict(self._batches.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on exactly where the state was taken. Raises RequestError naming what differs."""
        self._batches.load_state_dict(state)
