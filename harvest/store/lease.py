"""One coordinator at a time: who holds `coordinator.json` may commit, and finds out in time when another took over.

A holder renews the file every few seconds. A lease is free when it was released, when its process is gone from
this same machine, or when it has been silent for a minute; it changes hands by compare-and-swap, so of two takers
exactly one wins.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from harvest.errors import DamageError, HarvestError, LostLeaseError, RequestError
from harvest.records import FORMAT_VERSION
from harvest.store import layout
from harvest.store.files import Files, naming_full_disk

INTERVAL_SECONDS = 5.0
"""Between renewals."""
SILENT_SECONDS = 60.0
"""A lease not renewed for this long may be taken over."""
REMOTE_SECONDS = 1.0
TRIES = 10
"""How often a taker starts over when others keep changing the file under it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """`coordinator.json`: who coordinates the run and what is under way."""

    format: int = FORMAT_VERSION
    """Version of the run folder."""
    life: str
    """8 random hex digits, new at each start; part of the names of its attempts."""
    host: str
    """Host name, for messages."""
    pid: int
    """Process id on that host."""
    machine: str
    """Boot and pid namespace in which `pid` means something; empty where the system does not tell."""
    started: int
    """When the process started, in the kernel's ticks since boot: a reused pid differs. 0 where unknown."""
    heartbeat: float
    """Unix seconds of the last renewal, by the holder's clock."""
    released: bool = False
    """Given back; anyone may take it."""
    doing: str = ""
    """What the run is about, in words: `loading the model`; empty where nobody has said."""
    since: float = 0.0
    """Unix seconds when that began."""
    running: tuple[str, ...] = ()
    """Keys of the shards under way."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Shard key -> the last failure, for shards that are not committed."""

    def gone(self) -> bool:
        """Certainly not running any more: its process was on this machine and is no longer."""
        if self.released:
            return True
        if not self.machine or self.machine != this_machine():
            return False
        return process_start(self.pid) != self.started


_HOLDER = TypeAdapter(Holder)


def this_machine() -> str:
    """Boot id and pid namespace, within which a pid and its start time name one process; empty without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_start(pid: int) -> int | None:
    """Start time of a living process in ticks since boot; None when there is none (a zombie does not live)."""
    try:
        # The command name, in brackets, may itself hold spaces and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X", "x") else int(fields[19])


def read_holder(files: Files) -> Holder | None:
    """Who holds or last held the run; None where nobody ever did. For `status`: changes nothing."""
    data = _read(files)
    return None if data is None else _decode(files, data)


def _decode(files: Files, data: bytes) -> Holder:
    where = f"{files.url}/{layout.COORDINATOR}"
    try:
        version = json.loads(data).get("format")
        if version != FORMAT_VERSION:
            raise RequestError(f"{where}: format {version!r}; this version of Harvest reads format {FORMAT_VERSION}")
        return _HOLDER.validate_json(data)
    except (ValidationError, ValueError, AttributeError) as error:
        if isinstance(error, RequestError):
            raise
        reason = " ".join(str(error).split())[:120]
        raise DamageError(f"{where}: not a lease of ours ({reason}); remove it if no run is at work here") from None


def _encode(holder: Holder) -> bytes:
    return json.dumps(json.loads(_HOLDER.dump_json(holder)), indent=1, sort_keys=True).encode() + b"\n"


class Lease:
    """The right to commit to a run, renewed by a thread of its own until released or lost."""

    def __init__(self, files: Files, holder: Holder, data: bytes, interval: float, silent: float) -> None:
        self._files, self._holder, self._data = files, holder, data
        self._interval, self._silent = interval, silent
        self._lost: str | None = None
        self._renewed = self._seen = _now()
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="harvest-lease", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls, files: Files, *, interval: float = INTERVAL_SECONDS, silent: float = SILENT_SECONDS) -> Lease:
        """Takes the lease. Raises RequestError naming host and pid while another coordinator is alive."""
        for _ in range(TRIES):
            mine = _new_holder()
            data = _encode(mine)
            held = _read(files)
            if held is not None:
                _require_free(files, held, interval, silent)
                mine = replace(mine, heartbeat=time.time())  # the look may have taken seconds
                data = _encode(mine)
            with naming_full_disk(f"{files.url}/{layout.COORDINATOR}", len(data)):
                if held is None:
                    won = files.create(layout.COORDINATOR, data)
                else:
                    won = files.swap(layout.COORDINATOR, held, data)
            if won:
                return cls(files, mine, data, interval, silent)
        raise RequestError(f"run.path = {files.url!r}: other coordinators keep taking this run; one at a time")

    @property
    def life(self) -> str:
        """8 hex digits that name this coordinator's attempts."""
        return self._holder.life

    def heartbeat(self, running: Iterable[str] = (), failed: Mapping[str, str] | None = None) -> None:
        """What the next renewal will say about the run: keys of shards under way, and key -> failure."""
        with self._mutex:
            self._holder = replace(self._holder, running=tuple(running), failed=dict(failed or {}))

    def tell(self, doing: str) -> None:
        """What the run is about from now on, for whoever looks; written at once: it changes a few times in a life."""
        with self._mutex:
            self._holder = replace(self._holder, doing=doing, since=time.time())
            if self._lost is None:
                with contextlib.suppress(OSError, HarvestError):  # the next beat tries again
                    self._renew()

    def check(self) -> None:
        """Raises LostLeaseError unless the lease is still this coordinator's own, as the store says right now.

        A lease that is no longer fresh is renewed on the way: what is committed next lies well within its term. A
        remote store is asked once a second at most: nobody takes over a lease that was renewed so lately.
        """
        with self._mutex:
            if self._lost is None:
                if _now() - self._renewed > self._silent / 4:
                    self._renew()
                elif self._files.local or _now() - self._seen > REMOTE_SECONDS:
                    self._compare()
            if self._lost is not None:
                raise LostLeaseError(self._lost)

    def release(self) -> None:
        """Gives the lease back if it is still ours; harmless when it is lost or was released."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self._mutex:
            if self._lost is None:
                self._holder = replace(self._holder, released=True, doing="", running=())
                self._renew()
                self._lost = f"run {self._files.url}: the lease was released"

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._stop.wait(self._interval):
            with self._mutex:
                if self._lost is not None:
                    return
                # A store that cannot be reached now, or takes no credentials, may at the next beat; `check` meets the
                # error itself.
                with contextlib.suppress(OSError, HarvestError):
                    self._renew()

    def _renew(self) -> None:
        """Swaps in a new heartbeat; notices when the file is no longer what this holder wrote last."""
        for _ in range(2):  # again where an interrupt fell between an earlier swap and the note of it
            fresh = replace(self._holder, heartbeat=time.time())
            data = _encode(fresh)
            if self._files.swap(layout.COORDINATOR, self._data, data):
                self._holder, self._data = fresh, data
                self._renewed = self._seen = _now()
                return
            self._compare()
            if self._lost is not None:
                return

    def _compare(self) -> None:
        held = _read(self._files)
        self._seen = _now()
        if held is None:
            self._lost = f"run {self._files.url}: {layout.COORDINATOR} was removed; start the run again"
        elif held != self._data:
            try:
                other = _decode(self._files, held)
                if other.life == self._holder.life:
                    self._data = held
                    return
                self._lost = f"run {self._files.url}: taken over by pid {other.pid} on {other.host}"
            except HarvestError as error:
                self._lost = f"run {self._files.url}: the lease was overwritten: {error}"


class LeaseWatch:
    """What a writer asks that works for the holder from another process: is the life that sent me still in charge?"""

    def __init__(self, files: Files, life: str) -> None:
        self._files, self._life = files, life
        self._seen = float("-inf")

    def check(self) -> None:
        """Raises LostLeaseError unless that life holds the lease; a remote store is asked once a second at most."""
        if not self._files.local and _now() - self._seen <= REMOTE_SECONDS:
            return
        held = _read(self._files)
        holder = None if held is None else _decode(self._files, held)
        self._seen = _now()
        if holder is None:
            raise LostLeaseError(
                f"run {self._files.url}: no {layout.COORDINATOR} is to be seen from {socket.gethostname()}; "
                "run.path must be a folder that all workers share, or a URL"
            )
        if holder.life != self._life or holder.released:
            raise LostLeaseError(
                f"run {self._files.url}: life {self._life} is over; pid {holder.pid} on {holder.host} has it"
            )


def _new_holder() -> Holder:
    return Holder(
        life=secrets.token_hex(4),
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=this_machine(),
        started=process_start(os.getpid()) or 0,
        heartbeat=time.time(),
    )


def _require_free(files: Files, held: bytes, interval: float, silent: float) -> None:
    """Raises RequestError unless the holder of these bytes is done or dead.

    Clocks of two machines may differ by more than the term, so a silent holder is watched for two renewals before
    it counts as dead.
    """
    holder = _decode(files, held)
    if holder.gone():
        return
    age = time.time() - holder.heartbeat
    if abs(age) > silent:
        watch_until = time.monotonic() + 2 * interval
        while _read(files) == held:
            if time.monotonic() > watch_until:
                return
            time.sleep(interval / 4)
    raise RequestError(
        f"run.path = {files.url!r}: pid {holder.pid} on {holder.host} is at work on this run "
        f"(last sign of life {max(0.0, age):.0f} s ago); wait for it, or {silent:.0f} s after it died"
    )


def _now() -> float:
    """Seconds that pass while the process is stopped, and where the system tells also while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _read(files: Files) -> bytes | None:
    try:
        return files.read(layout.COORDINATOR)
    except FileNotFoundError:
        return None
