"""The job file: every setting with its default, validated before anything heavy is imported.

A `Job` holds what the user asked for and nothing else: no counters, no clients, no tensors; printing
it is enough to run it again. What `auto` stands for is decided once, by `harvest.plan`.
"""

from __future__ import annotations

import datetime
import difflib
import functools
import importlib.util
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from harvest.errors import RequestError
from harvest.records import Read

Auto = Literal["auto"]
Names = Annotated[tuple[str, ...], Field(strict=False)]
DIRECTION_NAME = r"^[A-Za-z0-9_.-]+$"
SECRETS = ("secret", "token", "password", "credential", "key")
"""Words that no setting of `run.storage` may carry: secrets come from the environment only."""
_SHOWN = 200
MOST = 2**53
"""Counts beyond it are typing errors, and what counts rows and bytes does not hold them."""
MOST_THREADS = 1024
OF_OURS = {
    "adapter_kwargs": "model.adapter",
    "adapter_name": "model.adapter",
    "attn_implementation": "model.attention",
    "config": "model.name",
    "device_map": "model.device_map",
    "dtype": "model.dtype",
    "gguf_file": "model.name",
    "load_in_4bit": "model.quantization",
    "load_in_8bit": "model.quantization",
    "quantization_config": "model.quantization",
    "revision": "model.revision",
    "subfolder": "model.name",
    "torch_dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
}
"""Options of `from_pretrained` that a setting decides, so that the plan knows it."""
NO_OPTIONS = (
    "device_mesh",
    "distributed_config",
    "ignore_mismatched_sizes",
    "output_attentions",
    "output_hidden_states",
    "output_loading_info",
    "return_dict",
    "state_dict",
    "tp_plan",
    "tp_size",
    "use_cache",
    "weights_only",
)
"""Options that change what a forward gives, what is loaded behind the fingerprint's back, or what a pickle may do."""
SPREADINGS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Ways in which accelerate spreads a replica by itself."""
OF_SPREADING = ("max_memory", "offload_folder", "offload_buffers")
"""Options of `from_pretrained` that `model.device_map` is needed for."""


class Settings(BaseModel):
    """One table of the job file. Unknown keys are errors; TOML types are taken as they are."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class ModelSettings(Settings):
    """The checkpoint; everything as in transformers."""

    name: str = Field(min_length=1)
    """Hub id, folder, `.gguf` file or `package:NAME/inside/path`."""
    revision: str = "main"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: the checkpoint's own."""
    device: str = "auto"
    attention: str = "auto"
    device_map: str | dict[str, int | str] | None = None
    """How accelerate spreads a replica: a way of its own, or module -> device, `cpu` or `disk`."""
    trust_remote_code: bool = False
    adapter: str | None = Field(default=None, min_length=1)
    """PEFT adapter on top of the checkpoint: a folder, a hub id or `package:NAME/inside/path`."""
    quantization: Literal["nf4", "int8"] | None = None
    """By bitsandbytes, while the weights are loaded."""
    options: dict[str, Any] = {}

    @field_validator("device_map")
    @classmethod
    def _known_spreading(cls, spreading: str | dict[str, int | str] | None) -> str | dict[str, int | str] | None:
        if isinstance(spreading, str) and spreading not in SPREADINGS:
            raise ValueError(f"allowed are {', '.join(map(repr, SPREADINGS))} and a table of module = device")
        return spreading

    @model_validator(mode="after")
    def _one_say_about_devices(self) -> ModelSettings:
        if self.device_map is not None and self.device != "auto":
            raise ValueError(f"device = {self.device!r}: decided by model.device_map; leave one of them out")
        without = [key for key in OF_SPREADING if key in self.options and self.device_map is None]
        if without:
            raise ValueError(f"options: {without[0]}: needs model.device_map, such as 'auto'")
        return self

    @field_validator("options")
    @classmethod
    def _options_of_no_setting(cls, options: dict[str, Any]) -> dict[str, Any]:
        for key in options:
            if key in OF_OURS:
                raise ValueError(f"{key}: decided by {OF_OURS[key]}; leave it out")
            if key in NO_OPTIONS or (key == "use_safetensors" and options[key] is not True):
                raise ValueError(f"{key}: not for a job; leave it out")
            if key == "token" or any(word in key.lower() for word in ("auth", "secret", "password")):
                raise ValueError(f"{key}: secrets are read from the environment only; leave it out")
        return options


class DataSettings(Settings):
    """The dataset, as `datasets.load_dataset` takes it, or local files by path or glob."""

    path: str = Field(min_length=1)
    name: str | None = None
    files: str | Annotated[list[str], Field(strict=False)] | dict[str, Any] | None = None
    split: str | None = None
    revision: str | None = None
    text: str | None = Field(default=None, min_length=1)
    """Column with text (dotted for nested fields); `text` where none of the three is given."""
    messages: str | None = Field(default=None, min_length=1)
    """Column with chat messages, or a plain string for one user turn."""
    ids: str | None = Field(default=None, min_length=1)
    """Column with token ids."""
    contrast: Annotated[tuple[str, str], Field(strict=False)] | None = None
    spans: str | None = Field(default=None, min_length=1)
    """Column of `{name, start, end}`: characters of the text, tokens of ids; null for none."""
    keep: Names | None = None
    limit: int | None = Field(default=None, ge=1, le=MOST)
    max_tokens: int | None = Field(default=None, ge=1, le=MOST)
    sample: float | None = Field(default=None, gt=0, le=1)
    """Share of the documents, by hash of (document id, seed)."""
    seed: int = 0
    on_bad: Literal["fail", "skip"] = "fail"

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
        return self

    @property
    def kind(self) -> Literal["text", "messages", "ids"]:
        """What the column holds."""
        return "messages" if self.messages is not None else "ids" if self.ids is not None else "text"

    @property
    def column(self) -> str:
        """The column that the documents come from."""
        return self.messages or self.ids or self.text or "text"


class ChatSettings(Settings):
    """How chat messages become text."""

    generation_prompt: bool | Auto = "auto"
    """`auto`: when the last turn is the user's."""
    system: str | None = None
    kwargs: dict[str, Any] = {}


def _check_count(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= MOST):
        return value
    raise ValueError("allowed are 'auto' or a whole number of at least 1" + _bound(value, MOST))


def _check_threads(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 1 <= value <= MOST_THREADS):
        return value
    raise ValueError("allowed are 'auto' or a whole number of at least 1" + _bound(value, MOST_THREADS))


def _bound(value: Any, most: int) -> str:
    return f" and at most {most}" if type(value) is int and value > most else ""


def _check_amount(value: Any) -> Any:
    if value == "auto" or (type(value) in (int, float) and 0 <= value <= MOST):
        return value
    raise ValueError("allowed are 'auto' or a number of at least 0")


Count = Annotated[int | Literal["auto"], BeforeValidator(_check_count)]
Threads = Annotated[int | Literal["auto"], BeforeValidator(_check_threads)]
Amount = Annotated[int | float | Literal["auto"], BeforeValidator(_check_amount)]


class TokenSettings(Settings):
    """From documents to the windows that the model reads."""

    context: Count = "auto"
    long: Literal["chunk", "truncate", "fail"] = "chunk"
    tokenizer: str | None = None
    bos: Literal["auto", "always", "window", "never"] = "auto"
    separator: Literal["eos", "bos", "none"] = "eos"
    special_in_text: Literal["literal", "parse"] = "literal"
    batch: Count = "auto"
    """Tokens of one forward, padding included."""
    batching: Literal["auto", "sorted", "packed", "concatenated"] = "auto"


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
    if isinstance(value, dict) and len(value) == 1:
        (key, inner), *_ = value.items()
        if key == "every" and type(inner) is int and 1 <= inner < 2**31:
            return value
        if key == "sample" and type(inner) in (int, float) and 0 < inner <= 1:
            return value
        if key == "span" and isinstance(inner, list | tuple) and inner and all(isinstance(v, str) for v in inner):
            return {"span": tuple(inner)}
    raise ValueError(
        "allowed are 'all', 'last', 'first', a list of whole numbers, {every = 4}, {sample = 0.1} and {span = [...]}"
    )


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
    layers: Layers = "all"
    """`all`, or a tuple of ints; negative counts from the end."""
    positions: Positions = "all"
    """`all`, `last`, `first`, a tuple of ints, {every}, {sample} or {span}."""
    pool: Annotated[tuple[Literal["mean", "last", "max"], ...], Field(strict=False, min_length=1)] | None = None
    """One more row per document and name, over its stored rows; float32."""
    exclude: Exclude = ()
    """`bos`, `special` and token ids that are left out, never shifting the rest."""
    store: bool = True

    @field_validator("pool")
    @classmethod
    def _each_once(cls, pool: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if pool is None else tuple(dict.fromkeys(pool))


class StoreSettings(Settings):
    """How rows are kept."""

    dtype: Literal["auto", "float32", "float16", "bfloat16", "int8"] = "auto"
    compression: Literal["none", "zstd"] = "none"
    chunk_mb: float = Field(default=8, gt=0, le=1024)
    """MiB of an inner chunk."""
    shard_documents: Count = "auto"
    memory_gb: Amount = "auto"


class StatisticsSettings(Settings):
    """Reductions that every run can keep beside or instead of its rows."""

    moments: bool = True
    covariance: bool = False


def _check_read(value: Any) -> Any:
    if value in ("last", "first", "mean", "all") or (type(value) is int and abs(value) < 2**31):
        return value
    if isinstance(value, dict) and set(value) <= {"span", "pool"} and isinstance(value.get("span"), str):
        read = {"span": value["span"], "pool": value.get("pool", "mean")}
        if read["span"] and read["pool"] in ("mean", "last", "max"):
            return read
    raise ValueError(
        "allowed are 'last', 'first', 'mean', 'all', a whole number (negative from the end), "
        "{span = 'answer', pool = 'mean'} (or 'last', 'max'), and a list of these"
    )


def _check_reads(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return _check_read(value)
    reads = tuple(_check_read(one) for one in value)
    if not reads or any(one in reads[:i] for i, one in enumerate(reads)):
        raise ValueError("allowed is a list of different places to read at, at least one")
    return reads


def _check_values(value: Any) -> Any:
    """Group values as text; a whole number or a boolean of the job file means its text."""
    if not isinstance(value, list | tuple):
        return value
    if not value or not all(isinstance(one, str | int) for one in value):
        raise ValueError("allowed is a list of values, at least one; they compare as text")
    return tuple(dict.fromkeys(plain_text(one) for one in value))


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
OthersToo = Annotated[tuple[str, ...] | Literal["rest"] | dict[str, Any] | None, BeforeValidator(_check_values)]
Mode = Literal["mean_difference", "paired_rejection", "single_group", "whitened", "pca", "leace", "logistic"]


class DirectionSettings(Settings):
    """One concept, whose directions are accumulated while the data streams by."""

    name: str = Field(pattern=DIRECTION_NAME)
    column: str | None = Field(default=None, min_length=1)
    """Says which group a document is in."""
    positive: Values = None
    """Its values in group A, as text."""
    negative: OthersToo = None
    """Those of group B; `rest` for all others."""
    read: Annotated[Any, BeforeValidator(_check_reads)] = "last"
    """`last`, `first`, `mean`, `all`, an int, {span, pool}, or a tuple of these."""
    modes: Annotated[tuple[Mode, ...], Field(strict=False, min_length=1)] = ("mean_difference",)
    pair: str | None = None
    """`order`, or `column:NAME`."""
    weight: str | None = None
    """`column:NAME`, or `logit_diff`."""
    correct_only: bool = False
    holdout: Annotated[Any, BeforeValidator(_check_holdout)] = 0.2
    """Share kept for evaluation, or `column:NAME` (rows whose value is `test`)."""
    examples: int = Field(default=4096, ge=1, le=MOST)
    """Kept at most, of each group and part."""

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
        if isinstance(self.positive, dict) or isinstance(self.negative, dict):
            return self
        where = f"direction {self.name!r}: "
        if self.column is None or self.positive is None:
            raise ValueError(f"{where}column and positive say which documents are in group A; give both")
        if self.negative is None and self.modes != ("single_group",):
            raise ValueError(f"{where}negative: values of group B, or 'rest'; only mode 'single_group' goes without")
        both = [value for value in self.positive if isinstance(self.negative, tuple) and value in self.negative]
        if both:
            raise ValueError(f"{where}{both[0]!r} is in positive and in negative; allowed is one of them")
        if "paired_rejection" in self.modes and self.pair is None:
            raise ValueError(f"{where}mode 'paired_rejection' needs pair; allowed are 'order' and 'column:NAME'")
        if self.pair is not None and any(read.kind == "all" for read in self.reads):
            raise ValueError(f"{where}pair = {self.pair!r} with read = 'all': a pair has one state of each document")
        return self

    @property
    def reads(self) -> tuple[Read, ...]:
        """Where states are read; those of a list have labels."""
        if not isinstance(self.read, tuple):
            return (_read(self.read, ""),)
        return tuple(
            _read(one, f"{one['span']}.{one['pool']}" if isinstance(one, dict) else str(one)) for one in self.read
        )

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
    def columns(self) -> tuple[str, ...]:
        """Every column that it needs."""
        given = (self.column, self.pair_column, self.weight_column, self.holdout_column)
        return tuple(dict.fromkeys(column for column in given if column is not None))


def _read(read: Any, label: str) -> Read:
    if isinstance(read, dict):
        return Read(kind="span", span=read["span"], pool=read["pool"], label=label)
    if read in ("mean", "all"):
        return Read(kind=read, pool="mean" if read == "mean" else None, label=label)
    return Read(kind="at", index={"first": 0, "last": -1}.get(read, read), label=label)


class RunSettings(Settings):
    """Where results go and what works on them; nothing here changes a value that is stored."""

    path: str = Field(min_length=1)
    storage: dict[str, Any] = {}
    workers: Count = "auto"
    executor: Literal["auto", "inline", "ray"] = "auto"
    address: str | None = None
    gpus_per_worker: Amount = "auto"
    cpus_per_worker: Amount = "auto"
    threads: Threads = "auto"
    attempts: int = Field(default=3, ge=1, le=MOST)
    overwrite: bool = False

    @field_validator("storage")
    @classmethod
    def _no_secrets(cls, storage: dict[str, Any]) -> dict[str, Any]:
        for key in storage:
            if any(word in key.lower() for word in SECRETS):
                raise ValueError(f"{key}: secrets are read from the environment only; leave it out")
        return storage


class Job(Settings):
    """What the user asks for."""

    model: ModelSettings
    data: DataSettings
    run: RunSettings
    chat: ChatSettings = ChatSettings()
    tokens: TokenSettings = TokenSettings()
    capture: CaptureSettings = CaptureSettings()
    store: StoreSettings = StoreSettings()
    statistics: StatisticsSettings = StatisticsSettings()
    directions: Annotated[tuple[DirectionSettings, ...], Field(strict=False)] = ()
    answers: dict[str, str] = {}

    @field_validator("directions")
    @classmethod
    def _names_of_their_own(cls, directions: tuple[DirectionSettings, ...]) -> tuple[DirectionSettings, ...]:
        names = [direction.name.lower() for direction in directions]
        for number, name in enumerate(names):
            if name in names[:number]:  # each has a file, and some disks do not tell capitals apart
                raise ValueError(f"direction {directions[number].name!r}: the name is taken; allowed is one for each")
        return directions

    @property
    def kept(self) -> tuple[str, ...]:
        """Columns of the data that `documents()` keeps: `data.keep`, else what directions name."""
        if self.data.keep is not None:
            return self.data.keep
        return self.direction_columns

    @property
    def direction_columns(self) -> tuple[str, ...]:
        """What directions name."""
        return tuple(dict.fromkeys(column for direction in self.directions for column in direction.columns))


def load_job(source: Job | Mapping[str, Any] | str | Path, overrides: Iterable[str] = ()) -> Job:
    """The job in a TOML file, a mapping or as it is, with `key.sub=value` overrides laid over it.

    Raises RequestError with one line that names the setting, its value and what is allowed.
    """
    if isinstance(source, Job):
        settings: dict[str, Any] = source.model_dump(mode="json", exclude_unset=True)
    elif isinstance(source, Mapping):
        settings = _as_settings(source)
    else:
        settings = _read_toml(Path(source))
    for override in overrides:
        _override(settings, override)
    _refuse_unwritable(settings)
    try:
        return Job.model_validate(settings)
    except ValidationError as error:
        raise RequestError(_one_line(error)) from None


def _as_settings(source: Mapping[str, Any]) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads(json.dumps(source, default=_plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"a job holds text, numbers, lists and tables: {error}") from None
    return settings


def _refuse_unwritable(value: Any, where: str = "") -> None:
    """Refuses what a job file can say and the run's own records cannot: NaN, infinities, dates, broken unicode."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_unwritable(inner, f"{where}.{key}" if where else key)
    elif isinstance(value, list):
        for inner in value:
            _refuse_unwritable(inner, where)
    elif isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"{where} = {value}: allowed are finite numbers")
    elif isinstance(value, str) and any("\ud800" <= sign <= "\udfff" for sign in value):
        raise RequestError(f"{where} = {value!a}: broken unicode; allowed is valid UTF-8")
    elif isinstance(value, datetime.date | datetime.time):
        raise RequestError(f"{where} = {value}: dates and times are written as text, in quotes")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise RequestError(f"a job holds text, numbers, lists and tables; {type(value).__name__} is none of them")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"job file {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"job file {path}: {error}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RequestError(f"job file {path}: not valid TOML: {error}") from None


def _override(settings: dict[str, Any], override: str) -> None:
    """Lays `key.sub=value` over the settings; the value parses as TOML, else it is text."""
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise RequestError(f"--set {override}: expected key.sub=value, for example data.limit=100")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    except RecursionError as error:
        raise RequestError(f"--set {key}: {error}") from None
    table = settings
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise RequestError(f"--set {override}: {part} is not a table")
    table[parts[-1]] = value


def _one_line(error: ValidationError) -> str:
    """The first thing that is wrong, as `setting = value: what is allowed`."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"] if _is_setting(part))
    if first["type"] == "extra_forbidden":
        where = ".".join(str(part) for part in first["loc"])
        known = _settings_at(first["loc"][:-1])
        close = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return f"{where}: unknown setting; {hint}known here: {', '.join(known)}"
    if first["type"] == "missing":
        where = {"model": "model.name", "data": "data.path", "run": "run.path"}.get(where, where)
        return f"{where}: missing; it has no default"
    message = first["msg"].removeprefix("Value error, ").replace("tuple", "list").replace("string", "text")
    value = first["input"]
    shown = "" if isinstance(value, dict) and first["type"] == "value_error" else f" = {_short(value)}"
    return f"{where}{shown}: {message[0].lower()}{message[1:]}".removeprefix(": ")


def _short(value: Any) -> str:
    """The value as a line can show it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_setting(part: Any) -> bool:
    """False for the labels that pydantic puts in for the members of a union."""
    return isinstance(part, int) or part in _setting_names()


def _tables() -> dict[str, type[BaseModel]]:
    """Table of the job file -> its settings."""
    tables: dict[str, Any] = {key: field.annotation for key, field in Job.model_fields.items()}
    return {key: table for key, table in tables.items() if hasattr(table, "model_fields")} | {
        "directions": DirectionSettings
    }


@functools.cache
def _setting_names() -> frozenset[str]:
    return frozenset(Job.model_fields).union(*(table.model_fields for table in _tables().values()))


def _settings_at(location: Iterable[Any]) -> list[str]:
    """The settings of the table at this place of the job."""
    tables = [part for part in location if not isinstance(part, int)]
    return list(_tables()[tables[0]].model_fields if tables else Job.model_fields)


def resolve_package(name: str, setting: str) -> str:
    """`package:NAME/inside/path` as a path of the installed package, found without importing it; else `name`."""
    if not name.startswith("package:"):
        return name
    package, _, inside = name.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise RequestError(f"{setting} = {name!r}: no installed Python package is called {package!r}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    path = folder / inside
    if not path.exists() or folder.resolve() not in (path.resolve(), *path.resolve().parents):
        raise RequestError(f"{setting} = {name!r}: the package has no {inside!r}")
    return str(path)
