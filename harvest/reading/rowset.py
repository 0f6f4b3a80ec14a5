"""Rows of several names and the table that says which token each is: what a run, several and a join have in common.

Row i of every name and row i of `tokens()` are the same token.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from harvest import glance
from harvest.errors import RequestError
from harvest.reading.activations import Activations, row_numbers
from harvest.reading.batches import Batches
from harvest.reading.quote import Quote, quoted, whole
from harvest.reading.textsearch import rows_of_text
from harvest.reading.tokens import TokenRows
from harvest.store.storedrows import TORCH_DTYPES


class RowSet(ABC):
    """Reads without a lock, and never changes anything on disk."""

    def __init__(self, path: str, names: Sequence[str], rows: int, tokens: TokenRows) -> None:
        self.path = path
        """Folder or URL; of several runs all of them."""
        self.names = list(names)
        """Of the activations: `residual.12`."""
        self._rows, self._tokens = rows, tokens
        self._activations: dict[str, Activations] = {}

    def _repr_html_(self) -> str:
        return glance.html(f"{type(self).__name__} {self.path}", self._about())

    def _about(self) -> list[tuple[str, str]]:
        """What a notebook shows, line by line."""
        return [("rows", f"{len(self):,}"), ("names", glance.few(self.names))]

    def __len__(self) -> int:
        """Rows of every name."""
        return self._rows

    def __getitem__(self, name: str) -> Activations:
        """The rows of a name. Raises RequestError with the nearest names where there is no such name."""
        if not self._knows(name):
            raise RequestError(f"name {name!r}: this run has {glance.few(self.names)}{glance.meant(name, self.names)}")
        if name not in self._activations:
            self._refuse_unstored(name)
            self._activations[name] = self._open(name)
        return self._activations[name]

    def _knows(self, name: str) -> bool:
        return name in self.names

    @abstractmethod
    def _open(self, name: str) -> Activations:
        """The rows of a name that there is."""

    @abstractmethod
    def _refuse_unstored(self, what: str) -> None:
        """Raises RequestError where sums alone are kept."""

    @abstractmethod
    def _pieces(self) -> Sequence[bytes]:
        """Token id -> its bytes. Raises RequestError where the tokenizer is not to be had."""

    # ---- of one run ----------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Totals. Raises RequestError where several runs have none in common."""
        raise RequestError("summary: each run has its own; ask each of .runs")

    def directions(self, mode: str | None = None) -> Any:
        """Concept directions. Raises RequestError for several runs."""
        raise RequestError("directions: each run has its own; ask each of .runs")

    def best(self, direction: str | None = None, mode: str | None = None) -> Any:
        """Where a direction is best. Raises RequestError for several runs."""
        raise RequestError("best: each run has its own directions; ask each of .runs")

    # ---- tables --------------------------------------------------------------------------------------------------

    def tokens(
        self, rows: Any = None, columns: Sequence[str] | None = None, documents: int | Iterable[int] | None = None
    ) -> pa.Table:
        """Which token each row is: document int64, position int32, token int32, chunk int32, special bool; with
        `data.contrast` also `variant` int8, the sequence of the document that the position counts in; where the job
        uses spans (`data.spans`, chat messages, positions by span) also `span`, the innermost one or null.

        `rows`: a slice, a row number, indices in any order or a mask; `documents`: only rows of this id, or
        of these, in row order. Shards and columns that are not asked for are not read.
        """
        self._refuse_unstored("tokens")
        known = self._tokens.schema.names
        wanted = list(known if columns is None else columns)
        for column in wanted:
            if column not in known:
                raise RequestError(f"columns: {column!r} is not in the token table: {', '.join(known)}")
        if documents is not None:
            if rows is not None:
                raise RequestError("tokens: give rows or documents, not both")
            return self._tokens.take(wanted, self._tokens.rows_of_documents(documents))
        if rows is None or (isinstance(rows, slice) and rows.step in (None, 1)):
            start, stop, _ = (rows or slice(None)).indices(len(self))
            return self._tokens.between(wanted, start, max(start, stop))
        return self._tokens.take(wanted, row_numbers(rows, len(self)))

    # ---- finding -------------------------------------------------------------------------------------------------

    def find(self, token: int | None = None, document: int | None = None, text: str | None = None) -> np.ndarray:
        """Row numbers int64, rising, where all that is given holds: the token's id, the document's id, and that the
        token is part of this text, which may begin and end within tokens but must be stored without a gap.
        """
        if token is None and document is None and text is None:
            raise RequestError("find: give token, document, text, or several of them")
        for what, value in (("token", token), ("document", document)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer)):
                raise RequestError(f"find({what}={value!r:.100}): allowed is a whole number, the {what}'s id")
        if text is not None and (not isinstance(text, str) or not text):
            raise RequestError(f"find(text={text!r:.100}): allowed is some text")
        self._refuse_unstored("find")
        found = None if document is None else self._tokens.rows_of_documents([document])
        if text is not None:
            found = rows_of_text(self._tokens, text, self._pieces(), found)
        if token is None:
            assert found is not None
            return found
        if found is None:
            return self._tokens.where(pc.field("token") == int(token))
        rows: np.ndarray = found[self._tokens.take(["token"], found).column("token").to_numpy() == token]
        return rows

    def rows_where(self, expression: pc.Expression) -> np.ndarray:
        """Row numbers int64, rising, where a pyarrow expression over the token table holds."""
        self._refuse_unstored("rows_where")
        return self._tokens.where(expression)

    def context(self, row: int, before: int = 10, after: int = 10) -> pa.Table:
        """The token table around a row, within its document (of a contrast, within its sequence)."""
        return self._around(row, before, after)[0]

    def quote(self, row: int, before: int = 10, after: int = 10) -> Quote:
        """A row as text: what its token spells, and what so many stored tokens of its document spell around it. `str()`
        of it has the token in brackets.

        Before, token and after joined are the text, as the run's tokenizer spells it. A token that spells no text is
        its id, `⟨2⟩`; `…` stands where tokens are not stored.
        """
        table, at = self._around(row, before, after)
        document = table.column("document")[at].as_py()
        return quoted(document, *_places(table), self._pieces(), at)

    def text(self, document: int, variant: int = 0) -> str:
        """What the stored tokens of a document spell (of a contrast, those of one of its sequences), as in `quote`.

        Raises RequestError where none of its tokens is stored.
        """
        if "run" in self._tokens.schema.names:
            raise RequestError(f"text({document!r}): each run has its own documents; ask each of .runs")
        rows = self.find(document=document)
        variants = ["variant"] if "variant" in self._tokens.schema.names else []
        table = self._tokens.take(["position", "token", *variants], rows)
        told = table.column("variant").to_numpy() if variants else np.zeros(len(rows), np.int8)
        table = table.filter(pa.array(told == variant))
        if not len(table):
            which = f"{document}, variant={variant!r}" if len(rows) or variants else f"{document}"
            raise RequestError(f"text({which}): no token of it is stored; documents() says what became of each")
        return whole(*_places(table), self._pieces())

    def _around(self, row: int, before: int, after: int) -> tuple[pa.Table, int]:
        """The token table around a row, and which line of it the row is."""
        for what, count in (("before", before), ("after", after)):
            if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 0:
                raise RequestError(f"{what} = {count!r}: allowed are whole numbers of at least 0")
        (at,) = row_numbers(row, len(self), "row").tolist()
        first = max(0, at - before)
        table = self.tokens(slice(first, at + after + 1))
        keys = [table.column(key) for key in ("run", "document", "variant") if key in table.column_names]
        same = functools.reduce(pc.and_, [pc.equal(key, key[at - first]) for key in keys])
        return table.filter(same), pc.sum(same.slice(0, at - first)).as_py() or 0

    # ---- training ------------------------------------------------------------------------------------------------

    def batches(
        self,
        names: str | Sequence[str],
        batch_size: int = 4096,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int = 1,
        with_rows: bool = False,
        stack: bool = False,
        where: Any = None,
        rank: int = 0,
        world: int = 1,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        mixing: str = "auto",
    ) -> Batches:
        """Every row once an epoch, the last batch as short as it comes: tensors [B, d], {name: tensor} for a list of
        names, [B, names, d] with `stack`; (that, row numbers int64 [B]) with `with_rows`.

        The order depends on the number of rows, `seed` and the epoch alone (of "blocks" also on the bytes of a row);
        the object may be looped over again, and goes on with the next epoch. `where`: indices, a mask or a pyarrow
        expression over the token table. `mixing`: "global" shuffles over all rows, "blocks" mixes blocks of rows a pool
        at a time (`.mixing` of the result says how many) and reads them whole; "auto" is "global" for uncompressed
        rows on this machine's disk and "blocks" elsewhere, where "global" costs a request or a chunk for every row.
        """
        single = isinstance(names, str)
        arrays = [self[name] for name in ([names] if isinstance(names, str) else names)]
        if not arrays:
            raise RequestError("names: [] is empty; give at least one name")
        if stack and len({(array.shape[1], array.dtype if dtype is None else dtype) for array in arrays}) > 1:
            raise RequestError(f"stack: {', '.join(map(repr, arrays))} differ; give dtype, or leave it out for a dict")
        for setting, value, least in (("batch_size", batch_size, 1), ("epochs", epochs, 1), ("world", world, 1)):
            if type(value) is not int or value < least:
                raise RequestError(f"{setting} = {value!r}: allowed are whole numbers of at least {least}")
        if type(rank) is not int or not 0 <= rank < world:
            raise RequestError(f"rank = {rank!r}: allowed are 0 to {world - 1}, world being {world}")
        if mixing not in ("auto", "global", "blocks"):
            raise RequestError(f"mixing = {mixing!r}: allowed are 'auto', 'global' and 'blocks'")
        return Batches(
            arrays,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            epochs=epochs,
            with_rows=with_rows,
            stack=stack,
            single=single,
            rows=self._selected(where),
            rank=rank,
            world=world,
            dtype=_torch_dtype(dtype),
            device=device,
            blocks=mixing == "blocks" or (mixing == "auto" and not all(array.mapped for array in arrays)),
        )

    def _selected(self, where: Any) -> np.ndarray | None:
        if where is None:
            return None
        if isinstance(where, pc.Expression):
            return self.rows_where(where)
        if isinstance(where, pa.Array | pa.ChunkedArray):
            where = where.to_numpy(zero_copy_only=False) if isinstance(where, pa.Array) else where.to_numpy()
        rows = row_numbers(where, len(self), "where")
        if len(np.unique(rows)) != len(rows):
            raise RequestError("where: a row is named twice; every row comes once an epoch")
        return rows


def _places(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Positions and ids of the tokens."""
    return table.column("position").to_numpy(), table.column("token").to_numpy()


def _torch_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in TORCH_DTYPES:
        raise RequestError(f"dtype = {dtype!r}: allowed are {', '.join(TORCH_DTYPES)}")
    return TORCH_DTYPES[dtype]
