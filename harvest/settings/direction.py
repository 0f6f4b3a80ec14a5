"""`[[directions]]`: one concept; its groups are documents, whose states are read somewhere, or tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from harvest.records import Read
from harvest.settings.base import MOST, Settings, shown

DIRECTION_NAME = r"^[A-Za-z0-9_.-]+$"
EMBEDDINGS = ("input", "output")


def _check_read(value: Any) -> Any:
    if value in ("last", "first", "mean", "all") or (type(value) is int and abs(value) < 2**31):
        return value
    if isinstance(value, dict) and "span" in value and set(value) <= {"span", "pool"}:
        return _check_span_read(**value)
    if isinstance(value, dict) and set(value) == {"at", "on"}:
        return _check_along(value)
    told = f"{shown(value)}: " if isinstance(value, dict) else ""  # what else is wrong is shown by the caller
    raise ValueError(
        f"{told}allowed are 'last', 'first', 'mean', 'all', a whole number (negative from the end), "
        "{span = 'answer', pool = 'mean'}, {at = -1, on = 0} (the state at one token along that at another), and a "
        "list of these"
    )


def _check_span_read(span: Any, pool: Any = "mean") -> dict[str, str]:
    if not isinstance(span, str) or not span:
        raise ValueError(f"span = {shown(span)}: allowed is the name of a span, such as 'answer'")
    if pool not in ("mean", "last", "max"):
        raise ValueError(f"pool = {shown(pool)}: allowed are 'mean', 'last' and 'max'")
    return {"span": span, "pool": pool}


def _check_along(value: dict[str, Any]) -> dict[str, int]:
    places = {key: -1 if place == "last" else 0 if place == "first" else place for key, place in value.items()}
    for key, place in places.items():
        if type(place) is not int or abs(place) >= 2**31:
            raise ValueError(f"{key} = {shown(place)}: allowed are 'last', 'first' and whole numbers")
    if places["at"] == places["on"]:
        raise ValueError(f"{shown(value)}: at and on are one token; allowed are two")
    return places


def _check_reads(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return _check_read(value)
    reads = tuple(_check_read(one) for one in value)
    if not reads or any(one in reads[:i] for i, one in enumerate(reads)):
        raise ValueError("allowed is a list of different places to read at, at least one")
    return reads


def _check_values(value: Any) -> Any:
    """Group values as text; a whole number or a boolean of the job file means its text. Or a group of tokens."""
    if isinstance(value, dict):
        return _check_tokens(value)
    if value is None:
        return value
    if not isinstance(value, list | tuple) or not value or not all(isinstance(one, str | int) for one in value):
        such = f", such as [{shown(value)}]" if isinstance(value, str | int) else ""
        raise ValueError(f"allowed is a list of values of the column{such}; they compare as text")
    return tuple(dict.fromkeys(plain_text(one) for one in value))


def _check_others(value: Any) -> Any:
    try:
        return value if value == "rest" else _check_values(value)
    except ValueError as error:
        raise ValueError(str(error).replace("allowed is", "allowed are 'rest' and", 1)) from None


def _check_tokens(value: dict[str, Any]) -> dict[str, Any]:
    """Texts or ids of single tokens, and the table whose rows they are."""
    unknown = [key for key in value if key not in ("tokens", "embedding")]
    if unknown:
        raise ValueError(f"{unknown[0]}: unknown setting; a group of tokens has tokens and embedding")
    tokens, embedding = value.get("tokens"), value.get("embedding", "input")
    one_each = isinstance(tokens, list | tuple) and all(
        (one and isinstance(one, str)) or type(one) is int for one in tokens
    )
    if not tokens or not one_each:
        raise ValueError(
            f"tokens = {shown(tokens) if tokens is not None else 'none'}: allowed is a list of texts of one token "
            "each, or of token ids, such as [' good', ' great']"
        )
    if embedding not in EMBEDDINGS:
        raise ValueError(f"embedding = {shown(embedding)}: allowed are 'input' and 'output'")
    return {"tokens": tuple(tokens), "embedding": embedding}


def plain_text(value: Any) -> str:
    """What a cell compares as; a boolean as `true` or `false`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_holdout(value: Any) -> Any:
    if (type(value) in (int, float) and 0 <= value < 1) or _column_of(value) is not None:
        return value
    raise ValueError("allowed are a share of at least 0 and below 1, and 'column:NAME'")


def _column_of(value: Any) -> str | None:
    """NAME of `column:NAME`; None for anything else."""
    column = value.removeprefix("column:") if isinstance(value, str) and value.startswith("column:") else ""
    return column or None


Values = Annotated[tuple[str, ...] | dict[str, Any] | None, BeforeValidator(_check_values)]
OthersToo = Annotated[tuple[str, ...] | Literal["rest"] | dict[str, Any] | None, BeforeValidator(_check_others)]
Mode = Literal["mean_difference", "paired_rejection", "single_group", "whitened", "pca", "leace", "logistic"]


class DirectionSettings(Settings):
    """One concept, whose directions are accumulated while the data streams by."""

    name: str = Field(pattern=DIRECTION_NAME)
    """Of the concept; its files are called so."""
    column: str | None = Field(default=None, min_length=1)
    """Says which group a document is in."""
    positive: Values = None
    """Its values in group A, which the direction points to, as text; or tokens, and no document is read."""
    negative: OthersToo = None
    """Those of group B; `rest` for all others."""
    read: Annotated[Any, BeforeValidator(_check_reads)] = "last"
    """Where a document's state is read; `all`: every token is an example. A list reads at each."""
    modes: Annotated[tuple[Mode, ...], Field(strict=False, min_length=1)] = ("mean_difference",)
    """Formulas, each made from the same examples."""
    pair: str | None = None
    """By what an example of A and one of B belong together: k-th with k-th in dataset order, or a key."""
    weight: str | None = None
    """Of an example; `logit_diff`: how clearly the model itself answers right, which needs [answers]."""
    correct_only: bool = False
    """Leaves out what the model gets wrong; needs [answers]."""
    holdout: Annotated[Any, BeforeValidator(_check_holdout)] = 0.2
    """Share kept for evaluation and never in a sum, or the column whose value `test` says so."""
    examples: int = Field(default=4096, ge=1, le=MOST)
    """Kept at most, of each group and part, for figures and for the modes that are no plain sums."""
    check: int = Field(default=0, ge=0, le=MOST)
    """Documents, held-out ones where any are, on which adding the direction is tried; needs [answers]."""

    @field_validator("modes")
    @classmethod
    def _each_once(cls, modes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(modes))

    @field_validator("pair")
    @classmethod
    def _known_pairs(cls, pair: str | None) -> str | None:
        if pair is not None and pair != "order" and _column_of(pair) is None:
            raise ValueError("allowed are 'order' and 'column:NAME'")
        return pair

    @field_validator("weight")
    @classmethod
    def _known_weight(cls, weight: str | None) -> str | None:
        if weight is not None and weight != "logit_diff" and _column_of(weight) is None:
            raise ValueError("allowed are 'column:NAME' and 'logit_diff'")
        return weight

    @model_validator(mode="after")
    def _whole(self) -> DirectionSettings:
        where = f"direction {self.name!r}: "
        if isinstance(self.positive, dict) or isinstance(self.negative, dict):
            self._refuse_mixed(where)
            return self
        if self.by_variant:
            self._refuse_pair(where)
        elif self.column is None or self.positive is None:
            raise ValueError(f"{where}column and positive say which documents are in group A; give both")
        elif self.negative is None and self.modes != ("single_group",):
            raise ValueError(f"{where}negative: values of group B, or 'rest'; only mode 'single_group' goes without")
        both = [value for value in self.positive or () if isinstance(self.negative, tuple) and value in self.negative]
        if both:
            raise ValueError(f"{where}{both[0]!r} is in positive and in negative; allowed is one of them")
        if "paired_rejection" in self.modes and self.pair is None and not self.by_variant:
            raise ValueError(f"{where}mode 'paired_rejection' needs pair; allowed are 'order' and 'column:NAME'")
        if (self.pair is not None or "paired_rejection" in self.modes) and self._reads_all:
            asked = "paired_rejection" if self.pair is None else f"pair = {self.pair!r}"
            raise ValueError(f"{where}{asked} with read = 'all': a pair has one state of each document")
        return self

    def _refuse_mixed(self, where: str) -> None:
        """What has no meaning where the groups are tokens."""
        groups = [group for group in (self.positive, self.negative) if group is not None]
        if not all(isinstance(group, dict) for group in groups) or self.positive is None:
            raise ValueError(f"{where}positive and negative are both groups of tokens, or neither is")
        if len({group["embedding"] for group in groups if isinstance(group, dict)}) > 1:
            raise ValueError(
                f"{where}positive.embedding and negative.embedding: allowed is one embedding for both groups"
            )
        for setting in ("column", "read", "weight", "correct_only", "holdout", "examples", "check"):
            if getattr(self, setting) != type(self).model_fields[setting].default:
                value = f"{setting} = {getattr(self, setting)!r}"
                raise ValueError(
                    f"{where}{value}: says something of documents, and groups of tokens read none; leave it out"
                )
        if self.negative is None and self.modes != ("single_group",):
            raise ValueError(f"{where}negative: tokens of group B; only mode 'single_group' goes without")
        if self.pair not in (None, "order"):
            raise ValueError(f"{where}pair = {self.pair!r}: tokens have no columns; allowed is 'order'")
        if "paired_rejection" in self.modes and self.pair is None:
            raise ValueError(f"{where}mode 'paired_rejection' needs pair; allowed is 'order'")

    @property
    def embedding(self) -> str | None:
        """`input` or `output`: the table whose rows the groups are; None where the groups are documents."""
        return self.positive["embedding"] if isinstance(self.positive, dict) else None

    @property
    def tokens(self) -> tuple[tuple[str | int, ...], tuple[str | int, ...]]:
        """Of A and B, where there is an `embedding`."""
        a, b = (group["tokens"] if isinstance(group, dict) else () for group in (self.positive, self.negative))
        return a, b

    def _refuse_pair(self, where: str) -> None:
        """What has no meaning where the two sequences of a document are the groups."""
        if self.pair is not None:
            raise ValueError(f"{where}pair = {self.pair!r}: the two texts of a row are the pair; leave it out")

    @property
    def needs_answers(self) -> bool:
        """What its examples weigh, or whether they count, depends on what the model would answer."""
        return self.correct_only or self.weight == "logit_diff"

    @property
    def by_variant(self) -> bool:
        """The two sequences of a document, which `data.contrast` makes, are in group A and B, and a pair."""
        return self.column is None and self.positive is None and self.negative is None

    @property
    def paired(self) -> bool:
        """Every example is one of a pair."""
        return self.pair is not None or (self.by_variant and not self._reads_all)

    @property
    def _reads_all(self) -> bool:
        return any(read.kind == "all" for read in self.reads)

    @property
    def reads(self) -> tuple[Read, ...]:
        """Where states are read; those of a list have labels."""
        if not isinstance(self.read, tuple):
            return (_read(self.read, ""),)
        return tuple(_read(one, _label(one)) for one in self.read)

    @property
    def pair_column(self) -> str | None:
        """That holds pair keys; None without one."""
        return _column_of(self.pair)

    @property
    def weight_column(self) -> str | None:
        """That holds weights; None without one."""
        return _column_of(self.weight)

    @property
    def holdout_column(self) -> str | None:
        """That says `test` of what is held out; None without one."""
        return _column_of(self.holdout)

    @property
    def columns(self) -> dict[str, str]:
        """Every column that it needs -> the setting that names it, first."""
        given = {
            "column": self.column,
            "pair": self.pair_column,
            "weight": self.weight_column,
            "holdout": self.holdout_column,
        }
        found: dict[str, str] = {}
        for setting, column in given.items():
            if column is not None:
                found.setdefault(column, setting)
        return found


def _label(read: Any) -> str:
    """What follows `@` where it is one of several."""
    if isinstance(read, dict):
        return f"{read['at']}.on.{read['on']}" if "at" in read else f"{read['span']}.{read['pool']}"
    return str(read)


def _read(read: Any, label: str) -> Read:
    if isinstance(read, dict) and "at" in read:
        return Read(kind="on", index=read["at"], on=read["on"], label=label)
    if isinstance(read, dict):
        return Read(kind="span", span=read["span"], pool=read["pool"], label=label)
    if read in ("mean", "all"):
        return Read(kind=read, pool="mean" if read == "mean" else None, label=label)
    return Read(kind="at", index={"first": 0, "last": -1}.get(read, read), label=label)
