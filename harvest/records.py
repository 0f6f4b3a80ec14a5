"""The records that travel between the stages; each one explains itself, none of them does anything.

Shapes in comments: n rows, T tokens of a sequence, B sequences of a batch, d width of a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DOCUMENTS_PER_FILE = 2**40
"""A document's id is `file number * 2**40 + row in file`: known without counting, never moving."""

FORMAT_VERSION = 1
"""Of the run folder; a reader refuses a version that it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of the dataset (or one object of the caller's, which counts as one file)."""

    number: int
    """Position in the sorted list of files; the upper part of every document id in it."""
    name: str
    """What `@file` shows and messages name: the path relative to the dataset, or a label."""
    path: str
    """What is opened: a local path or URL; empty for objects of the caller's."""
    format: str
    """jsonl, json, csv, txt, parquet, arrow, stream (rows that only `datasets` can read) or objects."""
    rows: int | None
    """Rows in the file; None where only reading to the end can tell."""
    fingerprint: str
    """Changes when the content does (size and both ends, ETag, or commit)."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shard:
    """A slice of consecutive rows of one source file: the unit of work, retry and commit."""

    file: int
    """Number of the source file."""
    index: int
    """Position among the shards of its file."""
    start: int
    """First row of the slice."""
    stop: int
    """One past the last row of the slice; may lie beyond the end of a file of unknown length."""

    @property
    def key(self) -> str:
        """The name in the ledger, sortable as text: `f00000-s000017`."""
        return f"f{self.file:05d}-s{self.index:06d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One try at a shard, as it is handed to a worker."""

    shard: Shard
    documents: int | None
    """What is left of `data.limit` at the shard's start; None without a limit."""
    tokens: int | None
    """What is left of `data.max_tokens`; None without a limit."""
    cursor: Mapping[str, Any] | None
    """Where the file's reader may go on."""
    before: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Direction that pairs by order -> examples of A and of B in the dataset before the shard."""
    attempt: int = 0
    """Number of the try, different for every one of a coordinator's life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    """One row of a source file, projected to the columns that the job uses."""

    row: int
    """Row number in the file."""
    values: Mapping[str, Any]
    """Requested column -> value; empty where the row could not be parsed."""
    error: str | None = None
    """Why the row could not be parsed, naming file and line; None for a good row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRow:
    """What `documents()` says about one document, or about one of its two sequences."""

    document: int
    """The id."""
    variant: int = 0
    """Which sequence of the document, where `data.contrast` makes two of each; every one has a row of its own."""
    tokens: int
    """Tokens of the whole sequence, before truncation; 0 where it could not be tokenised."""
    rows: int
    """Rows stored of it."""
    status: str
    """`stored` or `skipped`."""
    reason: str | None
    """Why it was skipped, or what was left out of it (`truncated`)."""
    logit_diff: float | None = None
    """Logit of the right answer minus that of the best other one, where the job asks; None where none is right."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """The columns of `data.keep`, as read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What one forward sequence is: a slice of a document's tokens, or of a stream of them, and where its rows go."""

    ids: np.ndarray
    """int32 [T]: what the model reads, a window's own BOS included."""
    keep: np.ndarray
    """int32 [k], rising: the positions within `ids` whose rows are captured."""
    row: int
    """Captured row within the shard of the first kept position; the others follow without gaps."""
    document: int
    """The document's id, for messages; of a stream the id of the first one with a row here."""
    documents: np.ndarray | None = None
    """int64 [k]: the document of each kept position in a window of a stream; None where `document` is that of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumns:
    """The token table of a shard, row by row with its arrays."""

    document: np.ndarray
    """int64 [n]"""
    position: np.ndarray
    """int32 [n]: position in the document's full token sequence."""
    token: np.ndarray
    """int32 [n]"""
    chunk: np.ndarray
    """int32 [n]: which window of the document."""
    special: np.ndarray
    """bool [n]: a special token of the tokenizer."""
    variant: np.ndarray | None = None
    """int8 [n]: which sequence of the document; None without `data.contrast`."""
    span: np.ndarray | None = None
    """int32 [n]: the innermost span around the token, counted in `span_names`, -1 outside all; None without spans."""
    span_names: tuple[str, ...] = ()
    """Sorted; those that some row is in."""

    def __len__(self) -> int:
        return len(self.document)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Where a direction reads the state of a document."""

    kind: str
    """`at` one token, `on` (at one token, along the state at another), `all` (each is an example), `mean` over the
    document, or `span`."""
    index: int = 0
    """Of the token, for `at` and `on`; negative from the end."""
    on: int = 0
    """Of the token whose state is the context, for `on`."""
    span: str = ""
    """Its name, for `span`."""
    pool: str | None = None
    """`mean`, `last` or `max`, where several rows make one state."""
    label: str = ""
    """What follows `@` in the name where there are several reads: `-3`, `last`, `answer.mean`, `-1.on.5`; empty for a
    single one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardExamples:
    """The examples of one direction at one read in a shard, known before the forward; n of them in dataset order."""

    read: Read
    document: np.ndarray
    """int64 [n]"""
    variant: np.ndarray
    """int8 [n]: which sequence of the document."""
    position: np.ndarray
    """int32 [n]: where the state is read, the last place of several; -1 where there is none."""
    group: np.ndarray
    """int8 [n]: 0 is A (positive), 1 is B."""
    weight: np.ndarray
    """float64 [n]"""
    pair: tuple[str, ...] | None
    """Key of each example's pair; None without pairs, and where they go by order."""
    held_out: np.ndarray | None
    """bool [n] where a column says it; None where a hash does."""
    sequence: np.ndarray
    """int64 [n]: which of the shard's sequences that run it is from; -1 for a skipped one."""
    rows: np.ndarray
    """int64 [m], rising: the captured rows that the states are made of."""
    owner: np.ndarray
    """int64 [m], rising: the example that each of them belongs to. One without a row has no state: NaN."""
    context_first: np.ndarray | None = None
    """bool [n], of a read `on` another token: that one, the context, comes before the state. None for other reads."""
    unknown: int = 0
    """Documents of neither group."""

    def __len__(self) -> int:
        return len(self.document)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardAnswers:
    """Where a shard's model is asked for answers, known before the forward; S sequences that run, in dataset order."""

    row: np.ndarray
    """int64 [S]: captured row of the last token, whose logits tell what would follow; -1 where no answer is right."""
    right: np.ndarray
    """int64 [S]: which of the job's answers is right; -1 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardText:
    """A shard, tokenised whole: every row's place is known before the first forward."""

    documents: Sequence[DocumentRow]
    """Every wanted document of the shard in dataset order, skipped ones too; of a contrast both sequences of each."""
    windows: Sequence[Window]
    """In dataset order; windows without a kept position are left out (nothing to run them for)."""
    tokens: TokenColumns
    """Of the stored rows, in row order."""
    stored: np.ndarray | None = None
    """bool [captured rows]: the others are read for directions only. None where all are stored."""
    examples: Mapping[str, Sequence[ShardExamples]] = field(default_factory=dict)
    """Direction -> its examples, read by read."""
    answers: ShardAnswers | None = None
    """None where the job asks for none."""
    forward_tokens: int
    """Tokens that the windows feed to the model, padding not counted."""
    tokens_run: int
    """Tokens of the stored documents after truncation: what `data.max_tokens` counts (windows' own BOS is not)."""
    dropped_tokens: int
    """Tokens of the stored documents cut off by `tokens.long = "truncate"`."""
    source_digest: str
    """Hash of the rows read, in the columns used: compared when the shard is harvested again."""
    ended: bool
    """The source file ended before the slice did, or exactly with it."""
    cursor: Mapping[str, Any] | None
    """Where a reader of the next slice may go on (JSON); None where it seeks by itself."""
    cut: bool
    """`data.limit` or `data.max_tokens` ended the shard early."""
    span_documents: Mapping[str, int] = field(default_factory=dict)
    """Span that `capture.positions` names -> documents with a token in it."""

    @property
    def listed(self) -> int:
        """Documents, however many sequences each has."""
        return sum(row.variant == 0 for row in self.documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One forward: B rows of one window, or of several packed behind one another, padded on the right to T tokens."""

    input_ids: np.ndarray
    """int64 [B, T]"""
    lengths: np.ndarray
    """int64 [B]: real tokens of each row."""
    source: np.ndarray
    """int64 [n], flat indices b * T + t of the kept tokens."""
    rows: np.ndarray
    """int64 [n]: the row of each kept token within the sort window."""
    spans: Sequence[tuple[int, int, int]]
    """(first source, first row, count): the same as runs without gaps, so that a copy can be one slice."""
    documents: np.ndarray
    """int64 [n]: the document of each kept token, for messages."""
    position_ids: np.ndarray | None = None
    """int64 [B, T]: from 0 in every packed window, and in the padding; None where each row holds one window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SortWindow:
    """Consecutive windows of a shard that are sorted by length among themselves and written together."""

    first_row: int
    """Captured row within the shard of the window's first row."""
    rows: int
    """Rows in it."""
    batches: Sequence[Batch]
    """In the order in which they run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """One array of a shard before it is written."""

    rows: int
    """Rows of the shard."""
    width: int
    """Values of a row."""
    dtype: str
    """float32, float16, bfloat16, or int8 with a scale per row in an array of its own."""
    compression: str = "none"
    """`none`: raw rows, that can be mapped; `zstd`: each inner chunk is a frame."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Zarr attributes: model, site, layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One file of a committed attempt, as the ledger vouches for it."""

    bytes: int
    """Exact size."""
    crc32c: str
    """Castagnoli checksum of the whole object, 8 hex digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """A shard's commit record. A shard without one does not exist."""

    format: int
    """Version of the run folder."""
    shard: Shard
    """The slice."""
    attempt: str
    """Folder of the attempt that counts: `<key>.<life>-<number>`."""
    rows: int
    """Rows of every name and of the token table; a pooled array has one per document that has rows."""
    documents: int
    """Documents listed, skipped ones included."""
    skipped: Mapping[str, int]
    """Reason -> documents skipped for it."""
    tokens: int
    """Tokens of the stored documents that ran through the model (windows' own BOS not counted)."""
    dropped_tokens: int
    """Tokens cut off by `tokens.long = "truncate"`."""
    forward_tokens: int
    """Tokens that the model read."""
    non_finite: Mapping[str, int]
    """Name -> values that are NaN or infinite; names without any are left out."""
    non_finite_documents: int = 0
    """Documents with such a value in some name; the documents table says which."""
    span_documents: Mapping[str, int] = field(default_factory=dict)
    """Span that `capture.positions` names -> documents with a token in it; empty for other positions."""
    zero_rows: Mapping[str, int]
    """Name -> rows that are zero throughout; names without any are left out."""
    objects: Mapping[str, StoredObject]
    """Path within the attempt -> what must be there."""
    keys_digest: str
    """Hash of the (document, variant, position, token) keys in row order: equal for runs over the same tokens."""
    source_digest: str
    """Hash of the source rows read."""
    ended: bool
    """The source file ends with this shard."""
    cut: bool
    """`data.limit` or `data.max_tokens` ended this shard early; it is harvested again when they grow."""
    cursor: Mapping[str, Any] | None
    """Where the next slice of the file goes on, for files that cannot be sought."""
    self_check: Mapping[str, float]
    """Name -> largest error of a row between a batch and its document alone, relative to the name's typical row norm;
    empty but for the first shard of each worker's life."""
    environment: Mapping[str, str]
    """Hardware, libraries and threads that the bits depend on."""
    seconds: Mapping[str, float]
    """Stage -> busy seconds, and what was waited for -> seconds; `harvest.stages` says which there are."""
