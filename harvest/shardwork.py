"""One try at a shard, from its first captured row to its record: sums here, arrays and tables in its folder."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, wait
from typing import Any

import numpy as np
import torch

from harvest.buffers import Rows
from harvest.concepts.examples import KeptExamples, ShardReads
from harvest.concepts.logits import ShardLogits
from harvest.environment import environment
from harvest.plan import Plan
from harvest.records import (
    FORMAT_VERSION,
    Assignment,
    Batch,
    DocumentRow,
    ShardRecord,
    ShardText,
    SortWindow,
)
from harvest.reduce.base import Block, Reduction, Saved, save_states
from harvest.reduce.concepts import Concepts
from harvest.reduce.pool import DocumentPool, Pooled
from harvest.shardarrays import array_specs, as_numpy
from harvest.stages import Clock
from harvest.store.attempt import AttemptWriter
from harvest.store.examples import examples_bytes
from harvest.store.files import Files
from harvest.store.int8 import codes_of, quantise
from harvest.store.layout import DOCUMENTS, STATES, TOKENS, examples_name, pooled_name, scale_name
from harvest.store.tables import LOGIT_DIFF, documents_table, keys_digest, sequence_numbers, tokens_table
from harvest.text.reasons import NON_FINITE

Sums = Sequence[Mapping[str, Any]]
"""For every reduction: name -> state."""


class ShardWork:
    """One try at a shard: its attempt's folder, its sums and its clocks."""

    def __init__(
        self,
        plan: Plan,
        assignment: Assignment,
        text: ShardText,
        *,
        reductions: Sequence[Reduction[Any]],
        files: Files,
        attempt: str,
        still_mine: Callable[[], None],
        embedded: Mapping[str, KeptExamples],
        team: Executor,
        writers: Executor | None = None,
    ) -> None:
        """`embedded`: directions between tokens that this shard holds. `still_mine` is asked before each object that is
        written, and raises when it must not be. `team`: reduces names side by side. `writers`: writes them so; without
        any, one after the other."""
        self._plan, self._reductions, self._team, self._writers = plan, reductions, team, writers
        self._text, self.shard, self.attempt = text, assignment.shard, attempt
        self._embedded = embedded
        self._states: Sums = [{str(name): part.zero() for name in plan.names} for part in reductions]
        self._sequences = sequence_numbers(text.tokens.document, text.tokens.variant)
        self._non_finite: set[tuple[int, int]] = set()
        """(Document, variant) of sequences with a value that is no finite number."""
        self._error: Exception | None = None
        self.self_check: dict[str, float] = {}
        """Name -> largest error of the replica's self-check, where it was made before this shard."""
        self.seconds: dict[str, float] = {"forward": 0.0, "copy": 0.0, "reduce": 0.0, "write": 0.0}
        self.logits: ShardLogits | None = None
        """Of the answers, where the job asks for them."""
        if text.answers is not None:
            captured = len(text.tokens if text.stored is None else text.stored)
            self.logits = ShardLogits(text.answers, rows=captured, answers=len(plan.answers))
        self._odd_logits = 0
        """Sequences whose logit difference is no finite number."""
        self._reads = ShardReads(
            plan.job.read_directions,
            text,
            assignment.before,
            {str(name): name.width for name in plan.names},
            self.logits,
            stores_rows=plan.job.capture.store,
        )
        self._stored_before = None if text.stored is None else np.concatenate([[0], np.cumsum(text.stored)])
        """Stored rows before each captured one; None where they are the same."""
        pools = plan.job.capture.pool or ()
        self._scales: dict[int, dict[str, torch.Tensor]] = {}
        """First row of a window that is not yet written -> name -> float32 [rows], where rows are stored as int8."""
        self._pools = {str(name): DocumentPool(pools, name.width) for name in plan.names} if pools else {}
        self.stores_rows = plan.job.capture.store
        self._writer = AttemptWriter(
            files,
            attempt,
            array_specs(plan, text),
            chunk_bytes=plan.resolved.chunk_bytes,
            before_object=still_mine,
        )

    def clock(self, stage: str) -> Clock:
        """A context that adds its busy seconds to the stage's."""
        return Clock(self.seconds, stage)

    def take(
        self, window: SortWindow, rows: Rows, again: Callable[[np.ndarray], Iterable[Batch]], stage: str = "reduce"
    ) -> None:
        """Adds a window's rows, as stored and in dataset order, to every sum; on the clock of `stage`.

        Where a value is no finite number, its window runs once more in a line of its own: attention weighs what it
        must not see with zero, and zero times NaN is NaN, so it may come from a neighbour or from the padding. `again`
        is given those rows, bool [n], and the batches that it has run. After an error, which `finish` will raise,
        nothing happens.
        """
        if self._error is not None:
            return
        try:
            with self.clock(stage):
                self._round(window, rows)
                sums = self._reduced(window, rows)
                if not self._all_finite(sums, window, rows):
                    for batch in again(self._odd_rows(window, rows)):
                        self._round(window, rows, batch.rows)
                    sums = self._reduced(window, rows)
                self._add(sums, window, rows)
        except Exception as error:
            self._error = error

    def _round(self, window: SortWindow, rows: Rows, at: np.ndarray | None = None) -> None:
        """Makes of a window's rows, in place, what the store will give back; of those at int64 [k], or of all.

        int8 rounds, and what is reduced and read are rows as stored; every other dtype they have already.
        """
        if self._plan.resolved.store_dtype != "int8":
            return
        if at is None:
            self._scales[window.first_row] = {name: quantise(block) for name, block in rows.items()}
            return
        index = torch.from_numpy(at)
        for name, block in rows.items():
            some = block.index_select(0, index)
            self._scales[window.first_row][name].index_copy_(0, index, quantise(some))
            block.index_copy_(0, index, some)

    def _reduced(self, window: SortWindow, rows: Rows) -> Sums:
        """Every sum with a window's rows, as stored and in dataset order, on top; `_add` makes it count."""
        at, rows = self._stored(window, rows)
        tokens = self._text.tokens
        special, document, position = tokens.special[at], tokens.document[at], tokens.position[at]
        blocks = {
            name: Block(rows=block, special=special, document=document, position=position)
            for name, block in rows.items()
        }

        def add(reduction: Reduction[Any], states: Mapping[str, Any]) -> dict[str, Any]:
            names = self._team.map(lambda name: reduction.update(states[name], blocks[name]), blocks)
            return dict(zip(blocks, names))

        return [add(reduction, states) for reduction, states in zip(self._reductions, self._states)]

    def _stored(self, window: SortWindow, rows: Rows) -> tuple[slice, Rows]:
        """Where the window's stored rows lie in the shard, and themselves; a copy only where not all are stored."""
        at = slice(window.first_row, window.first_row + window.rows)
        if self._text.stored is None or self._stored_before is None:
            return at, rows
        index = torch.from_numpy(np.flatnonzero(self._text.stored[at]))
        stored = slice(int(self._stored_before[at.start]), int(self._stored_before[at.stop]))
        return stored, {name: block.index_select(0, index) for name, block in rows.items()}

    def _odd_rows(self, window: SortWindow, rows: Rows) -> np.ndarray:
        """bool [n]: the window's row of some name, or a logit there, is no finite number."""
        odd = non_finite_rows(rows)
        return odd if self.logits is None else odd | self.logits.odd_rows(window)

    def _all_finite(self, sums: Sums, window: SortWindow, rows: Rows) -> bool:
        """Whether the window's rows, which are in these sums or only read, hold finite numbers only, and its logits."""
        if self.logits is not None and self.logits.odd_rows(window).any():
            return False
        if self._text.stored is not None:
            return not non_finite_rows(rows).any()
        return self._sums_finite(sums)

    def _sums_finite(self, sums: Sums) -> bool:
        return all(
            state.non_finite_values == self._states[0][name].non_finite_values for name, state in sums[0].items()
        )

    def _add(self, sums: Sums, window: SortWindow, rows: Rows) -> None:
        """What `_reduced` made of the window counts from now on, and so do its documents with odd values."""
        if not self._sums_finite(sums):
            at, stored = self._stored(window, rows)
            odd, tokens = np.flatnonzero(non_finite_rows(stored)) + at.start, self._text.tokens
            variant = np.zeros(len(odd), np.int8) if tokens.variant is None else tokens.variant[odd]
            self._non_finite.update(zip(tokens.document[odd].tolist(), variant.tolist()))
        self._states = sums
        self._reads.update(window, rows)

    def write(self, window: SortWindow, rows: Rows, give_back: Callable[[Rows], None]) -> None:
        """Appends a window to every array, and the documents that end in it to the pooled ones.

        After an error, which `finish` will raise, only gives the buffers back.
        """
        try:
            at, stored = self._stored(window, rows)
            scales = self._stored(window, self._scales.pop(window.first_row, {}))[1]
            if self._error is None and self.stores_rows:
                with self.clock("write"):
                    self._each(lambda name: self._append(name, stored[name], scales.get(name)), stored)
            if self._error is None and self._pools:
                with self.clock("pool"):
                    for name, pool in self._pools.items():
                        self._append_pooled(name, pool.update(stored[name], self._sequences[at]))
        except Exception as error:
            self._error = error
        finally:
            give_back(rows)

    def _each(self, write: Callable[[str], None], names: Iterable[str]) -> None:
        """Writes all names, whatever one of them meets: nothing is to be on its way once an attempt is dropped."""
        if self._writers is None:
            for name in names:
                write(name)
            return
        tries = [self._writers.submit(write, name) for name in names]
        wait(tries)
        for one in tries:
            one.result()

    def _append(self, name: str, rows: torch.Tensor, scales: torch.Tensor | None) -> None:
        if scales is None:
            self._writer.append(name, as_numpy(rows))
        else:
            self._writer.append(name, codes_of(rows, scales).numpy())
            self._writer.append(scale_name(name), scales[:, None].numpy())

    def _append_pooled(self, name: str, found: Iterable[Pooled]) -> None:
        for pooled in found:
            for kind, values in pooled.items():
                self._writer.append(pooled_name(kind, name), values)

    def raise_error(self) -> None:
        """Raises what has gone wrong behind, so that no forward runs in vain."""
        if self._error is not None:
            raise self._error

    def give_up(self, error: Exception) -> ShardRecord:
        """Drops the attempt, and raises the error."""
        self._writer.abort()
        raise error

    def finish(self) -> ShardRecord:
        """Writes tables and sums, makes everything durable, and says what is there."""
        try:
            self.raise_error()
            with self.clock("finish"):
                for name, pool in self._pools.items():
                    self._append_pooled(name, pool.finish())
                if self.stores_rows:
                    self._writer.table(TOKENS, tokens_table(self._text.tokens))
                self._count_odd_logits()
                documents = documents_table(
                    self._documents(),
                    self._plan.job.kept,
                    variants=self._plan.job.data.contrast is not None,
                    logit_diffs=self.logits is not None,
                )
                self._writer.table(DOCUMENTS, documents)
                self._reads.finish()
                states: list[tuple[Saved[Any], Mapping[str, Any]]] = [*zip(self._reductions, self._states)]
                if self._plan.job.read_directions:
                    states.append((Concepts(), self._reads.states()))
                self._writer.blob(STATES, save_states(states))
                for direction, kept in {**self._reads.kept(), **self._embedded}.items():
                    self._writer.blob(examples_name(direction), examples_bytes(kept.keys, kept.states))
                objects = self._writer.close()
        except Exception as error:
            return self.give_up(error)
        return self._record(objects)

    def _count_odd_logits(self) -> None:
        """A sequence whose difference is no finite number counts like one with such a row."""
        if self.logits is None or self._text.answers is None:
            return
        stored = [row for row in self._text.documents if row.status == "stored"]
        odd = np.flatnonzero((self._text.answers.right >= 0) & ~np.isfinite(self.logits.differences)).tolist()
        self._non_finite.update((stored[number].document, stored[number].variant) for number in odd)
        self._odd_logits = len(odd)

    def _documents(self) -> Sequence[DocumentRow]:
        """The documents, with what their rows have shown."""
        rows = [
            dataclasses.replace(row, reason=f"{row.reason}, {NON_FINITE}" if row.reason else NON_FINITE)
            if (row.document, row.variant) in self._non_finite
            else row
            for row in self._text.documents
        ]
        if self.logits is None or self._text.answers is None:
            return rows
        asked = zip(self.logits.differences.tolist(), self._text.answers.right.tolist())
        found = (difference if right >= 0 else None for difference, right in asked)
        return [dataclasses.replace(row, logit_diff=next(found)) if row.status == "stored" else row for row in rows]

    def _record(self, objects: Mapping[str, Any]) -> ShardRecord:
        text, health = self._text, self._states[0]
        non_finite = {name: n for name, state in health.items() if (n := state.non_finite_values)}
        return ShardRecord(
            format=FORMAT_VERSION,
            shard=self.shard,
            attempt=self.attempt,
            rows=len(text.tokens),
            documents=text.listed,
            skipped=Counter(row.reason or "" for row in text.documents if row.status == "skipped" and not row.variant),
            tokens=text.tokens_run,
            dropped_tokens=text.dropped_tokens,
            forward_tokens=text.forward_tokens,
            non_finite_documents=len({document for document, _ in self._non_finite}),
            span_documents=text.span_documents,
            non_finite=non_finite | ({LOGIT_DIFF.name: self._odd_logits} if self._odd_logits else {}),
            zero_rows={name: n for name, state in health.items() if (n := state.zero_rows)},
            objects=objects,
            keys_digest=keys_digest(text.tokens.document, text.tokens.position, text.tokens.token, text.tokens.variant),
            source_digest=text.source_digest,
            ended=text.ended,
            cut=text.cut,
            cursor=text.cursor,
            self_check=self.self_check,
            environment=environment(self._plan.resolved.device, self._plan.resolved.threads, self._plan.job.model),
            seconds={stage: round(seconds, 6) for stage, seconds in self.seconds.items()},
        )


def non_finite_rows(rows: Rows) -> np.ndarray:
    """bool [n]: the row of some name has a value that is no finite number."""
    odd = [~torch.isfinite(block).all(dim=1) for block in rows.values()]
    found: np.ndarray = torch.stack(odd).any(dim=0).numpy()
    return found
