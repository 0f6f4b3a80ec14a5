"""Captured tensors by participant, message, layer and site, in memory and in one file that says when it is damaged."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from harvest import glance
from harvest.errors import DamageError, RequestError, WorkError
from harvest.model.placing import checked_offload, in_words, is_own, own_copy, place_of
from harvest.model.pooling import checked_span

FORMAT = "harvest.ActivationCache"
VERSION = 1
"""Of the file; a version that this program does not know is refused."""
Span = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class ActivationRecord:
    """What one site computed for one message; spans are half-open and lie within the tensor, else RequestError."""

    participant: str
    """Who spoke."""
    message_idx: int
    """Which message of the conversation; -1 where there is none."""
    layer: int | None
    """True index of the block; None for what lies outside the blocks."""
    site: str
    """As CapturedSite names it."""
    tensor: torch.Tensor
    """[seq, d] of floats: every token of the text that was run."""
    token_span: Span
    """The tokens of the message itself, such as (prompt length, seq) for an answer; may be empty."""
    phases: Mapping[str, Span] = field(default_factory=dict)
    """Phase (`prompt`, `reasoning`, `answer`, or names of your own) -> its tokens."""

    def __post_init__(self) -> None:
        for setting, kind in (("participant", str), ("message_idx", int), ("site", str)):
            if not isinstance(getattr(self, setting), kind) or isinstance(getattr(self, setting), bool):
                raise RequestError(f"{setting} = {getattr(self, setting)!r}: allowed is {kind.__name__}")
        if self.layer is not None and (type(self.layer) is not int or self.layer < 0):
            raise RequestError(f"layer = {self.layer!r}: allowed is a true layer index from 0, or None")
        shape = getattr(self.tensor, "shape", None)
        if shape is None or len(shape) != 2 or not self.tensor.is_floating_point():
            raise RequestError(
                f"tensor: {type(self.tensor).__name__} of shape {shape and tuple(shape)}; allowed is [seq, d] of floats"
            )
        phases = {str(name): checked_span(span, shape[0], f"phases[{name!r}]") for name, span in self.phases.items()}
        object.__setattr__(self, "token_span", checked_span(self.token_span, shape[0], "token_span"))
        object.__setattr__(self, "phases", phases)

    def __repr__(self) -> str:
        at = f"{self.participant!r}, message {self.message_idx}, layer {self.layer}, {self.site}"
        phases = f", {', '.join(self.phases)}" if self.phases else ""
        return f"ActivationRecord({at}: {in_words(self.tensor)}, tokens {list(self.token_span)}{phases})"

    def rows(self, phase: str | None = None) -> torch.Tensor:
        """[k, d]: the rows of a phase, or of the message (`token_span`); KeyError for a phase that it lacks."""
        if phase is not None and phase not in self.phases:
            raise KeyError(f"no phase {phase!r}; the record has {', '.join(self.phases) or 'none'}")
        start, stop = self.token_span if phase is None else self.phases[phase]
        return self.tensor[start:stop]


class ActivationCache:
    """Records in the order in which they were added.

    `offload` says where their tensors are kept: `cpu`, a device, or `none`: where they were. A tensor that shares its
    memory with others, or comes from inference mode, is copied, so that the cache holds just what it shows.
    """

    def __init__(self, offload: str = "cpu") -> None:
        self.offload = checked_offload(offload, "offload")
        self._place = place_of(self.offload, "offload")
        self._records: list[ActivationRecord] = []

    def __repr__(self) -> str:
        size = sum(record.tensor.nbytes for record in self._records)
        sites = sorted({record.site for record in self._records})
        messages = len({(record.participant, record.message_idx) for record in self._records})
        counts = f"{glance.plural(len(self), 'record')}, {glance.plural(messages, 'message')}"
        about = f"{counts}, {glance.few(sites)}, {glance.size(size)}"
        return f"ActivationCache({about}, offload={self.offload!r})"

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[ActivationRecord]:
        return iter(self._records)

    def add(self, record: ActivationRecord) -> None:
        """Appends one record, its tensor moved to where `offload` says."""
        self._records.append(self._placed(record))

    def add_batch(self, records: Iterable[ActivationRecord]) -> None:
        """Appends all records, or none where one of them cannot be."""
        self._records += [self._placed(record) for record in records]

    def _placed(self, record: ActivationRecord) -> ActivationRecord:
        if not isinstance(record, ActivationRecord):
            raise RequestError(f"record: {type(record).__name__} given; allowed is ActivationRecord")
        if is_own(record.tensor, self._place):
            return record
        return replace(record, tensor=own_copy(record.tensor, self._place))

    def query(
        self,
        participant: str | None = None,
        message_idx: int | None = None,
        layer: int | None = None,
        site: str | None = None,
        phase: str | None = None,
    ) -> list[ActivationRecord]:
        """The records that fit everything given, in their order; None fits any. Layers are true indices.

        `phase` fits the records that have tokens of it; `record.rows(phase)` are they.
        """
        asked = {"participant": participant, "message_idx": message_idx, "layer": layer, "site": site}
        wanted = {key: value for key, value in asked.items() if value is not None}
        return [
            record
            for record in self._records
            if all(getattr(record, key) == value for key, value in wanted.items())
            and (phase is None or (phase in record.phases and len(record.rows(phase)) > 0))
        ]

    def at(
        self,
        participant: str | None = None,
        message_idx: int | None = None,
        layer: int | None = None,
        site: str | None = "residual",
        phase: str | None = None,
    ) -> torch.Tensor:
        """The tensor [seq, d] of the one record that fits, or its rows of `phase`; KeyError unless one does."""
        found = self.query(participant, message_idx, layer, site, phase)
        if len(found) != 1:
            asked = f"{participant=}, {message_idx=}, {layer=}, {site=}, {phase=}"
            raise KeyError(f"expected is one record, {len(found)} of {len(self)} fit {asked}")
        return found[0].tensor if phase is None else found[0].rows(phase)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all records to one safetensors file, whole or not at all; an older cache there is replaced.

        Raises RequestError, with nothing written, where there is anything but a cache, or no folder to write to.
        """
        target = Path(path)
        if target.exists() or target.is_symlink():
            _header(target)
        if not target.parent.is_dir():
            raise RequestError(f"{target}: there is no folder {str(target.parent)!r}")
        tensors = _apart(record.tensor for record in self._records)
        listed = json.dumps([_listed(r, tensors[str(n)]) for n, r in enumerate(self._records)])
        metadata = {"format": FORMAT, "version": str(VERSION), "records": listed, "crc32": _crc32(listed.encode())}
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            save_file(tensors, partial, metadata)
            with open(partial, "rb+") as file:
                os.fsync(file.fileno())
            partial.replace(target)
        except (SafetensorError, OSError) as error:
            raise WorkError(f"{target}: cannot be written: {' '.join(str(error).split())}") from None
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str], offload: str = "cpu") -> ActivationCache:
        """The records of a saved cache, bit by bit as they were.

        Raises RequestError for a missing or foreign file and DamageError for a damaged one, both by its name.
        """
        cache, source = cls(offload), Path(path)
        listed = _header(source)
        with safe_open(source, framework="pt") as file:
            if {*file.keys()} != {str(n) for n in range(len(listed))}:
                raise DamageError(f"{source}: damaged: the tensors are not those of its {len(listed)} records")
            for n, entry in enumerate(listed):
                cache.add(_record(source, n, entry, file.get_tensor(str(n))))
        return cache


def _header(path: Path) -> list[dict[str, Any]]:
    """What a saved cache says about its records; RequestError where it is none, DamageError where it is damaged."""
    if not path.is_file():
        raise RequestError(f"{path}: {'not a file' if path.exists() else 'no such file'}; allowed is a saved cache")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise DamageError(f"{path}: damaged, or no activation cache: {' '.join(str(error).split())}") from None
    if metadata.get("format") != FORMAT:
        raise RequestError(f"{path}: not an activation cache; allowed is a file that ActivationCache.save wrote")
    if metadata.get("version") != str(VERSION):
        raise RequestError(f"{path}: cache version {metadata.get('version')}; this program reads version {VERSION}")
    text = metadata.get("records", "")
    if metadata.get("crc32") != _crc32(text.encode()):
        raise DamageError(f"{path}: damaged: the list of records does not match its checksum")
    listed: list[dict[str, Any]] = json.loads(text)
    return listed


def _listed(record: ActivationRecord, tensor: torch.Tensor) -> dict[str, Any]:
    """Everything of a record but its numbers, as JSON."""
    return {
        "participant": record.participant,
        "message_idx": record.message_idx,
        "layer": record.layer,
        "site": record.site,
        "token_span": record.token_span,
        "phases": record.phases,
        "crc32": _tensor_crc32(tensor),
    }


def _record(path: Path, number: int, entry: dict[str, Any], tensor: torch.Tensor) -> ActivationRecord:
    told = {key: value for key, value in entry.items() if key != "crc32"}
    if _tensor_crc32(tensor) == entry["crc32"]:
        return ActivationRecord(tensor=tensor, **told)
    raise DamageError(f"{path}: damaged: tensor {number} does not match its checksum")


def _apart(tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Number -> tensor on the CPU, in memory that no other of them shares: safetensors refuses tensors that do."""
    apart: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for number, tensor in enumerate(tensors):
        shared = tensor.data_ptr() in seen
        apart[str(number)] = own_copy(tensor, torch.device("cpu")) if shared or tensor.device.type != "cpu" else tensor
        seen.add(tensor.data_ptr())
    return apart


def _tensor_crc32(tensor: torch.Tensor) -> str:
    """Of the bytes, and of the dtype and shape by which they are read."""
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return _crc32(tensor.view(torch.uint8).numpy().reshape(-1).data, zlib.crc32(head))


def _crc32(data: bytes | memoryview, before: int = 0) -> str:
    return f"{zlib.crc32(data, before):08x}"
