"""The other tables: `[data]`, `[chat]`, `[tokens]`, `[capture]`, `[store]`, `[statistics]`, `[run]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from harvest.settings.base import MOST, Amount, Auto, Count, Names, Settings, Threads, shown

SECRETS = ("secret", "token", "password", "credential", "key")
"""Words that no setting of `run.storage` may carry: secrets come from the environment only."""


class DataSettings(Settings):
    """The dataset, as `datasets.load_dataset` takes it, or local files by path or glob."""

    path: str = Field(min_length=1)
    """Hub id, folder, file, glob, URL or `package:NAME/inside/path`."""
    name: str | None = None
    """Configuration of a dataset on the hub."""
    files: str | Annotated[list[str], Field(strict=False)] | dict[str, Any] | None = None
    """Names and globs within `path`; or split -> these."""
    split: str | None = None
    """Needed where there are several."""
    revision: str | None = None
    """Branch, tag or commit of a dataset on the hub; the commit that it stands for is recorded."""
    text: str | None = Field(default=None, min_length=1)
    """Column with text (dotted for nested fields); `text` where no other kind of column is given."""
    messages: str | None = Field(default=None, min_length=1)
    """Column with chat messages, or a plain string for one user turn."""
    ids: str | None = Field(default=None, min_length=1)
    """Column with token ids."""
    contrast: Annotated[tuple[str, str], Field(strict=False)] | None = None
    """Two columns with text, A and B: each row is one document of two sequences, variant 0 and 1."""
    spans: str | None = Field(default=None, min_length=1)
    """Column of `{name, start, end}`: characters of the text, tokens of ids; null for none."""
    keep: Names | None = None
    """Columns that `documents()` keeps beside each document; `@file` is the name of the source file. By default those
    that directions name."""
    limit: int | None = Field(default=None, ge=1, le=MOST)
    """At most so many documents, of those that `sample` keeps; may grow on resume."""
    max_tokens: int | None = Field(default=None, ge=1, le=MOST)
    """At most so many tokens, in dataset order, cut between documents; may grow on resume."""
    sample: float | None = Field(default=None, gt=0, le=1)
    """Share of the documents, by hash of (document id, seed)."""
    seed: int = 0
    """Of `sample`."""
    on_bad: Literal["fail", "skip"] = "fail"
    """A document that cannot be used stops the run, or is left out, counted and listed with the reason. A run that was
    stopped goes on with `skip`."""

    @field_validator("keep")
    @classmethod
    def _each_once(cls, keep: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if keep is None else tuple(dict.fromkeys(keep))

    @model_validator(mode="after")
    def _one_kind_of_input(self) -> DataSettings:
        given = [k for k in ("text", "messages", "ids", "contrast") if getattr(self, k) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of text, messages, ids and contrast, not {' and '.join(given)}")
        if self.spans is not None and self.messages is not None:
            raise ValueError("spans: allowed with text and ids; chat messages get spans by role by themselves")
        if self.contrast is not None and self.spans is not None:
            raise ValueError("spans: allowed with text and ids; of two texts of a contrast they cannot tell which")
        if self.contrast is not None and (self.contrast[0] == self.contrast[1] or "" in self.contrast):
            raise ValueError(f"contrast = {shown(self.contrast)}: allowed are two columns, each with a text of its own")
        return self

    @property
    def kind(self) -> Literal["text", "messages", "ids"]:
        """What the column holds."""
        return "messages" if self.messages is not None else "ids" if self.ids is not None else "text"

    @property
    def columns(self) -> tuple[str, ...]:
        """The column that the documents come from, or the two of a contrast."""
        return self.contrast or (self.messages or self.ids or self.text or "text",)


class ChatSettings(Settings):
    """How chat messages become text."""

    generation_prompt: bool | Auto = "auto"
    """Whether a chat ends with the header of the assistant's turn; `auto`: when the last turn is the user's."""
    system: str | None = None
    """A system message in front of chats that have none of their own."""
    kwargs: dict[str, Any] = Field(default={})
    """Further variables of the chat template."""


class TokenSettings(Settings):
    """From documents to the windows that the model reads."""

    context: Count = "auto"
    """Tokens of the longest window; `auto`: the model's own limit, at most 2,048."""
    long: Literal["chunk", "truncate", "fail"] = "chunk"
    """Longer documents are cut into windows, cut off, or an error, after which a run goes on with either of these."""
    tokenizer: str | None = None
    """Hub id, folder or `package:` of another tokenizer than the model's."""
    bos: Literal["auto", "always", "window", "never"] = "auto"
    """`auto`: what the tokenizer does by itself; `always`: exactly one a document; `window`: every window begins with
    one, which is no row after the first window."""
    separator: Literal["eos", "bos", "none"] = "eos"
    """What joins documents where they are `concatenated`; its row belongs to the document that it closes."""
    special_in_text: Literal["literal", "parse"] = "literal"
    """Whether text that spells a special token is text, or that token."""
    batch: Count = "auto"
    """Tokens of one forward, padding included; 1 runs every window alone."""
    batching: Literal["auto", "sorted", "packed", "concatenated"] = "auto"
    """`sorted`: windows of like length together, which `auto` stands for; `packed`: several in a row, kept apart;
    `concatenated`: the stream, in which documents see each other."""


def _check_layers(value: Any) -> Any:
    if value == "all":
        return value
    if not isinstance(value, list | tuple) or not value or not all(type(v) is int for v in value):
        raise ValueError("allowed are 'all' or a list of whole numbers, negative from the end")
    return tuple(value)


def _check_positions(value: Any) -> Any:
    if value in ("all", "last", "first"):
        return value
    if isinstance(value, list | tuple) and value and all(type(v) is int and abs(v) < 2**31 for v in value):
        return tuple(value)
    if isinstance(value, dict) and len(value) == 1 and (key := next(iter(value))) in SOME:
        good, allowed = SOME[key]
        if not good(value[key]):
            raise ValueError(f"{key} = {shown(value[key])}: allowed is {allowed}")
        return {"span": tuple(value[key])} if key == "span" else value
    told = f"{shown(value)}: " if isinstance(value, dict) else ""  # what else is wrong is shown by the caller
    raise ValueError(
        f"{told}allowed are 'all', 'last', 'first', a list of whole numbers, {{every = 4}}, {{sample = 0.1}} and "
        "{span = ['answer']}"
    )


SOME: dict[str, tuple[Callable[[Any], bool], str]] = {
    "every": (lambda n: type(n) is int and 1 <= n < 2**31, "a whole number of at least 1 and below 2**31"),
    "sample": (lambda share: type(share) in (int, float) and 0 < share <= 1, "a number above 0 and at most 1"),
    "span": (
        lambda names: isinstance(names, list | tuple) and bool(names) and all(isinstance(n, str) for n in names),
        "a list of names of spans, such as ['answer']",
    ),
}
"""Positions as a table of one setting: whether its value will do, and what is allowed."""


def _check_exclude(value: Any) -> Any:
    if isinstance(value, list | tuple) and all(v in ("bos", "special") or type(v) is int for v in value):
        return tuple(value)
    raise ValueError("allowed is a list of 'bos', 'special' and token ids")


Layers = Annotated[Any, BeforeValidator(_check_layers)]
Positions = Annotated[Any, BeforeValidator(_check_positions)]
Exclude = Annotated[Any, BeforeValidator(_check_exclude)]


class CaptureSettings(Settings):
    """Which vectors are taken."""

    sites: Names = Field(default=("residual",), min_length=1)
    """Places in the model, `attn.15` for one at a single layer; `harvest sites MODEL` lists a model's."""
    layers: Layers = "all"
    """Of the sites that are given without one; negative counts from the end."""
    positions: Positions = "all"
    """Which tokens get a row; numbers count in the whole document, negative from its end."""
    pool: Annotated[tuple[Literal["mean", "last", "max"], ...], Field(strict=False, min_length=1)] | None = None
    """One more row per document and name, over its stored rows; float32."""
    exclude: Exclude = ()
    """`bos`, `special` and token ids that are left out, never shifting the rest."""
    store: bool = True
    """`false`: sums alone are kept, no rows."""

    @field_validator("pool")
    @classmethod
    def _each_once(cls, pool: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if pool is None else tuple(dict.fromkeys(pool))


class StoreSettings(Settings):
    """How rows are kept."""

    dtype: Literal["auto", "float32", "float16", "bfloat16", "int8"] = "auto"
    """`auto`: as captured; `int8` with a float32 scale a row. A value that does not fit is an error."""
    compression: Literal["none", "zstd"] = "none"
    """`none`: raw rows that can be mapped; `zstd`: each inner chunk is compressed."""
    chunk_mb: float = Field(default=8, gt=0, le=1024)
    """MiB of an inner chunk, at most: compressed, those of all names together are at most 16."""
    shard_documents: Count = "auto"
    """Source rows of a shard, the unit of work and retry."""
    memory_gb: Amount = "auto"
    """What one worker may need; the plan refuses a job beyond it."""


class StatisticsSettings(Settings):
    """Reductions that every run can keep beside or instead of its rows."""

    moments: bool = True
    """Count, mean, variance, norms and extremes of every name."""
    covariance: bool = False
    """Of every name, float64, over all rows: `run.statistics()[NAME].covariance`. Its sums are in every shard; a job is
    refused where they come to more than a tenth of the shard's rows."""
    also: Names = ()
    """Further reductions, by the names of their files; `run.reduced(NAME)` reads one."""


class RunSettings(Settings):
    """Where results go and what works on them."""

    path: str = Field(min_length=1)
    """A folder, or a URL that fsspec knows (`s3://`, `gs://`)."""
    storage: dict[str, Any] = Field(default={})
    """Options of the store, such as `endpoint_url` and `profile`; secrets come from the environment only."""
    workers: Count = "auto"
    """Replicas of the model; `auto`: one for each GPU, or one. More than one means Ray."""
    executor: Literal["auto", "inline", "ray"] = "auto"
    """This process, or Ray; `auto`: Ray for several workers and where there is a cluster."""
    address: str | None = None
    """Of a Ray cluster that is there already; without one, Ray is started on this machine."""
    gpus_per_worker: Amount = "auto"
    """What a worker takes of a node; `auto`: one on CUDA, else none."""
    cpus_per_worker: Amount = "auto"
    """What a worker takes of a node; `auto`: one."""
    resources: dict[str, float] = Field(default={})
    """Custom resources of the cluster's nodes that a worker takes: name -> amount."""
    threads: Threads = "auto"
    """Of PyTorch in each worker; `auto`: this machine's cores. The last bits depend on it; a resumed run keeps it."""
    attempts: int = Field(default=3, ge=1, le=MOST)
    """Tries at a shard before the run fails."""
    overwrite: bool = False
    """`true` removes the files of an earlier run here, and only those, and begins anew."""

    @field_validator("resources")
    @classmethod
    def _custom_ones(cls, resources: dict[str, float]) -> dict[str, float]:
        settings = {"cpu": "run.cpus_per_worker", "gpu": "run.gpus_per_worker", "memory": "the plan"}
        for kind, amount in resources.items():
            if decided := settings.get(kind.lower()):
                raise ValueError(f"{kind}: decided by {decided}; leave it out")
            if not 0 < amount <= MOST or (amount > 1 and amount != int(amount)):
                raise ValueError(f"{kind} = {amount:g}: allowed are shares of at most 1 and whole numbers")
        return resources

    @field_validator("storage")
    @classmethod
    def _no_secrets(cls, storage: dict[str, Any]) -> dict[str, Any]:
        for key in storage:
            if any(word in key.lower() for word in SECRETS):
                raise ValueError(f"{key}: secrets are read from the environment only; leave it out")
        return storage
