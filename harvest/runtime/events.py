"""What a run tells other programs: one JSON object a line, the last of which says how it ended.

`schemas/events.schema.json` is made from the records below. A version gains events and fields, and readers skip those
that they do not know; what is there changes its meaning or goes with another version only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

VERSION = 1
"""Of the events below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What all have in common."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    version: Literal[1] = 1
    """Of these events."""
    time: str
    """When it was told, UTC: `2026-12-01T09:30:00Z`."""
    run: str | None
    """The run's folder or URL; null where the job could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """The job is read and not wrong by itself; model and data are still to be looked at."""

    event: Literal["run_started"] = "run_started"
    harvest: str
    """Version of Harvest."""
    host: str
    pid: int
    """Of the coordinator, which is the process that tells this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyComplete(Event):
    """The run was complete before: nothing is done."""

    event: Literal["already_complete"] = "already_complete"
    rows: int
    """In each name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayStarting(Event):
    """Ray is about to start on this machine, or to be asked at an address."""

    event: Literal["ray_starting"] = "ray_starting"
    address: str | None
    """Null on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMade(Event):
    """The plan stands, and the run is this process's; the model is still to be loaded."""

    event: Literal["plan"] = "plan"
    names: list[str]
    """Of the activations."""
    documents: int | None
    """Expected, as far as the plan can tell."""
    tokens: int | None
    rows: int | None
    shards: int | None
    committed_shards: int
    """Of earlier lives, on which this one goes on."""
    committed_tokens: int
    """In them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStarting(Event):
    """Processes of a crew are asked for; each makes the plan again, and loads the model."""

    event: Literal["workers_starting"] = "workers_starting"
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoading(Event):
    """The first worker, or this process, has begun to load the model."""

    event: Literal["model_loading"] = "model_loading"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoaded(Event):
    """The first worker, or this process, is about to run the model."""

    event: Literal["model_loaded"] = "model_loaded"
    seconds: float
    """Since the command began."""
    load_seconds: float
    """Of them, in loading the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstForward(Event):
    """A first batch is through the model."""

    event: Literal["first_forward"] = "first_forward"
    seconds: float
    """Since the command began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined(Event):
    """A worker of a crew is ready: its model is loaded."""

    event: Literal["worker_joined"] = "worker_joined"
    worker: str
    where: str
    """Its machine and process."""
    workers: int
    """Ready, with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost(Event):
    """A worker died, hung or fell silent; its shards go to others."""

    event: Literal["worker_lost"] = "worker_lost"
    worker: str
    why: str
    """Where it was, and what is known of its end."""
    workers: int
    """Still ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Event):
    """Nothing happens for a while."""

    event: Literal["waiting"] = "waiting"
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressMade(Event):
    """How far it is: every five seconds of work, and once when all shards are committed. Each token counts once."""

    event: Literal["progress"] = "progress"
    documents: int
    """In committed shards, skipped ones included."""
    expected_documents: int | None
    skipped: int
    """Of the documents."""
    tokens: int
    """Committed, or read by the try at a shard that has come furthest; of earlier lives, too."""
    expected_tokens: int | None
    """Judged from the committed shards, at first by the plan."""
    rows: int
    """In each name; as the tokens."""
    expected_rows: int | None
    bytes: int
    """In the store, or on the way there."""
    shards: int
    """Committed."""
    expected_shards: int | None
    retries: int
    """Tries that failed and were repeated, in this life."""
    failed: int
    """Shards that were given up."""
    workers: int
    """Ready."""
    tokens_per_second: float
    """In the last minute."""
    bytes_per_second: float
    """In the last minute."""
    forward_share: float
    """Of the workers' time in this life: that in the forward."""
    seconds: float
    """Since the model was loaded."""
    seconds_left: float | None
    """At the speed of the last minute; null where nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCommitted(Event):
    """A shard exists from now on."""

    event: Literal["shard_committed"] = "shard_committed"
    shard: str
    attempt: str
    """Its folder below `shards/`."""
    documents: int
    skipped: dict[str, int]
    """Reason -> documents skipped for it."""
    tokens: int
    rows: int
    bytes: int
    non_finite: dict[str, int]
    """Name -> values that are NaN or infinite."""
    forward_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck(Event):
    """A worker has compared a batch with its documents alone, before its first shard."""

    event: Literal["self_check"] = "self_check"
    shard: str
    errors: dict[str, float]
    """Name -> largest error of a row, relative to the name's typical row norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRetried(Event):
    """A try failed, and the shard will be tried again."""

    event: Literal["shard_retried"] = "shard_retried"
    shard: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFailed(Event):
    """A shard is given up; the run will fail, with its other shards committed."""

    event: Literal["shard_failed"] = "shard_failed"
    shard: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned(Event):
    """Something that does not end the run."""

    event: Literal["warning"] = "warning"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping(Event):
    """An interrupt was heard: committed shards are kept, those in work are dropped. The last event is still to come."""

    event: Literal["stopping"] = "stopping"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCompleted(Event):
    """The last event of a run that is complete, also of one that was so before."""

    event: Literal["run_completed"] = "run_completed"
    names: list[str]
    shards: int
    documents: int
    """Skipped ones included."""
    skipped: dict[str, int]
    """Reason -> documents skipped for it."""
    rows: int
    """In each name."""
    tokens: int
    dropped_tokens: int
    """Cut off by `tokens.long = "truncate"`."""
    forward_tokens: int
    """That the model read."""
    bytes: int
    non_finite: dict[str, int]
    """Name -> values that are NaN or infinite."""
    non_finite_documents: int
    zero_rows: dict[str, int]
    """Name -> rows that are zero throughout."""
    span_documents: dict[str, int]
    """Span that `capture.positions` names -> documents with a token in it."""
    seconds: dict[str, float]
    """Stage -> busy seconds, and what was waited for -> seconds, over all workers and lives."""
    self_check: dict[str, float]
    """Name -> largest error."""
    environments: list[dict[str, str]]
    """Hardware, libraries and threads that shards were made with; more than one where they differ."""
    stages: dict[str, Any] | None
    """What each stage took and what limited; null where no shard tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailed(Event):
    """The last event of a run that is not complete: failed, refused, or interrupted."""

    event: Literal["run_failed"] = "run_failed"
    status: int
    """Exit status: 1 the work failed, 2 the request is wrong, 130 interrupted."""
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(Event):
    """How a run stands, as `harvest status` reads it."""

    event: Literal["status"] = "status"
    state: Literal["complete", "running", "unfinished"]
    committed: int
    """Shards."""
    running: list[str]
    """Shards under way."""
    failed: dict[str, str]
    """Shard that is not committed -> its last failure."""
    missing: int | None
    """Shards, as far as the plan can tell."""
    expected_documents: int | None
    expected_tokens: int | None
    documents: int
    skipped: dict[str, int]
    rows: int
    tokens: int
    bytes: int
    non_finite: dict[str, int]
    non_finite_documents: int
    tokens_per_forward_second: float | None
    stages: dict[str, Any] | None
    worker: dict[str, Any] | None
    """Who coordinates it: `host`, `pid`, `seconds_since_heartbeat`, what it is `doing` and for how many
    `doing_seconds`; null where nobody does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEnded(Event):
    """The last event of `harvest status --watch`."""

    event: Literal["watch_ended"] = "watch_ended"
    status: int
    """Exit status: 0 the run is complete, 1 nobody is at work on it, 2 there is none, 130 interrupted."""
    error: str | None
    """Null where the run is complete."""


ANY = Annotated[
    RunStarted
    | AlreadyComplete
    | RayStarting
    | PlanMade
    | WorkersStarting
    | ModelLoading
    | ModelLoaded
    | FirstForward
    | WorkerJoined
    | WorkerLost
    | Waiting
    | ProgressMade
    | ShardCommitted
    | SelfCheck
    | ShardRetried
    | ShardFailed
    | Warned
    | Stopping
    | RunCompleted
    | RunFailed
    | Status
    | WatchEnded,
    Field(discriminator="event"),
]
"""Every line is one of these."""
