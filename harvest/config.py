"""The job file: every setting with its default, validated before anything heavy is imported.

A `Job` holds what the user asked for and nothing else: no counters, no clients, no tensors; printing
it is enough to run it again. What `auto` stands for is decided once, by `harvest.plan`.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator, model_validator

from harvest.errors import RequestError
from harvest.settings.base import Settings
from harvest.settings.direction import DirectionSettings
from harvest.settings.jobfile import read_toml
from harvest.settings.model import ModelSettings
from harvest.settings.refusals import one_line
from harvest.settings.tables import (
    CaptureSettings,
    ChatSettings,
    DataSettings,
    RunSettings,
    StatisticsSettings,
    StoreSettings,
    TokenSettings,
)


class Job(Settings):
    """What the user asks for."""

    model: ModelSettings
    """Which checkpoint, and how it is loaded."""
    data: DataSettings
    """Which documents."""
    run: RunSettings
    """Where results go and what works on them."""
    chat: ChatSettings = ChatSettings()
    """How chat messages become text."""
    tokens: TokenSettings = TokenSettings()
    """How documents become the windows that the model reads."""
    capture: CaptureSettings = CaptureSettings()
    """Which vectors are taken."""
    store: StoreSettings = StoreSettings()
    """How rows are kept."""
    statistics: StatisticsSettings = StatisticsSettings()
    """Sums over the rows of every name."""
    directions: Annotated[tuple[DirectionSettings, ...], Field(strict=False)] = ()
    """Concepts, a table each."""
    answers: dict[str, str] = Field(default={})
    """What the model should say: value of the directions' column, or column of `data.contrast` -> text."""

    @field_validator("directions")
    @classmethod
    def _names_of_their_own(cls, directions: tuple[DirectionSettings, ...]) -> tuple[DirectionSettings, ...]:
        names = [direction.name.lower() for direction in directions]
        for number, name in enumerate(names):
            if name in names[:number]:  # each has a file, and some disks do not tell capitals apart
                raise ValueError(f"direction {directions[number].name!r}: the name is taken; allowed is one for each")
        return directions

    @model_validator(mode="after")
    def _groups_of_their_own(self) -> Job:
        for direction in self.directions:
            where = f"direction {direction.name!r}: "
            if direction.by_variant and self.data.contrast is None:
                raise ValueError(
                    f"{where}column and positive say which documents are in group A; give both, or data.contrast, "
                    "whose two texts are the groups"
                )
            if direction.column is not None and self.data.contrast is not None:
                raise ValueError(
                    f"{where}column = {direction.column!r}: the two texts of data.contrast are the groups; leave it, "
                    "positive and negative out"
                )
        return self

    @model_validator(mode="after")
    def _answers_to_all(self) -> Job:
        asking = self._asking
        if not self.answers:
            for direction in asking:
                asked = "correct_only" if direction.correct_only else "weight = 'logit_diff'"
                asked = asked if direction.needs_answers else f"check = {direction.check}"
                raise ValueError(f"direction {direction.name!r}: {asked} needs [answers]: what to say for each group")
            return self
        columns = list(dict.fromkeys(direction.column for direction in self.answered_directions))
        if len(columns) != 1:
            found = f"name {', '.join(map(str, columns))}" if columns else "are none"
            raise ValueError(
                f"answers: say what is right for each value of one column, and the directions {found}; allowed are "
                "directions of one column, or of data.contrast"
            )
        for value, text in self.answers.items():
            if not text:
                raise ValueError(f"answers.{value} = '': allowed is the text that the model should go on with")
        if len(set(self.answers.values())) < 2:
            raise ValueError("answers: all are the same; a logit difference needs at least two")
        values = {v for d in asking for group in (d.positive, d.negative) if isinstance(group, tuple) for v in group}
        for value in sorted({*values, *(self.data.contrast or ())}):
            if value not in self.answers:
                raise ValueError(f"answers: none for {value!r}; allowed is a text for each group value, as text")
        return self

    @property
    def _asking(self) -> tuple[DirectionSettings, ...]:
        return tuple(one for one in self.read_directions if one.needs_answers or one.check)

    @property
    def answered_directions(self) -> tuple[DirectionSettings, ...]:
        """Whose one column says which answer is right: those that must know, or else all that read documents."""
        return self._asking or self.read_directions

    @property
    def kept(self) -> tuple[str, ...]:
        """Columns of the data that `documents()` keeps: `data.keep`, else what directions name."""
        if self.data.keep is not None:
            return self.data.keep
        return self.direction_columns

    @property
    def read_directions(self) -> tuple[DirectionSettings, ...]:
        """Those that read documents; the others compare tokens."""
        return tuple(direction for direction in self.directions if direction.embedding is None)

    @property
    def columns(self) -> dict[str, str]:
        """Every column of the data that is read -> who asks for it, first: a setting and its value."""
        data = self.data
        asked = dict.fromkeys(data.columns, f"data.{data.kind if data.contrast is None else 'contrast'}")
        if data.spans is not None:
            asked.setdefault(data.spans, "data.spans")
        for column in data.keep or ():
            asked.setdefault(column, "data.keep")
        asked = {column: f"{setting} = {column!r}" for column, setting in asked.items()}
        for number, direction in enumerate(self.directions):
            for column, setting in direction.columns.items():
                asked.setdefault(column, f"directions.{number}.{setting} = {getattr(direction, setting)!r}")
        return asked

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
        settings = read_toml(Path(source))
    for override in overrides:
        _override(settings, override)
    _refuse_unwritable(settings)
    try:
        return Job.model_validate(settings)
    except ValidationError as error:
        raise RequestError(one_line(error.errors(include_url=False), Job, settings)) from None


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
    raise TypeError(f"{type(value).__name__} is none of them")


def _override(settings: dict[str, Any], override: str) -> None:
    """Lays `key.sub=value` over the settings; the value parses as TOML, else it is text."""
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise RequestError(f"--set {override}: allowed is key.sub=value, for example data.limit=100")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    except RecursionError:
        raise RequestError(f"--set {key}: nested too deeply; allowed are values of a TOML file") from None
    table = settings
    for depth, part in enumerate(parts[:-1], 1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise RequestError(f"--set {override}: {'.'.join(parts[:depth])} is no table, so nothing is inside it")
    table[parts[-1]] = value


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
