"""What a reduction is: four short functions over an immutable state that can be saved, loaded and merged.

A state never knows where its rows came from, so sums of any blocks merge in any grouping. Merged in shard order
they have the same bits for any number of workers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from safetensors.numpy import save

from harvest.errors import DamageError

State = TypeVar("State")

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
}
"""What states are made of, by their safetensors names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Consecutive rows of one name, on whatever device they were captured."""

    rows: torch.Tensor
    """[n, d] in the stored dtype: float32, float16 or bfloat16."""
    special: np.ndarray
    """bool [n]: rows of special tokens."""
    document: np.ndarray
    """int64 [n]"""
    position: np.ndarray
    """int32 [n]"""


class Saved(Protocol[State]):
    """What a state file needs to know of a reduction."""

    kind: str
    """Its name in a state file."""
    version: int
    """Of the arrays that it saves; another version is refused."""

    def arrays(self, state: State) -> dict[str, np.ndarray]:
        """The state as named arrays of the dtypes in DTYPES."""
        ...

    def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> State:
        """The inverse of `arrays`, bit for bit."""
        ...


class Reduction(Saved[State], Protocol[State]):
    """An associative running sum over rows; `zero` is its identity, bit for bit."""

    def zero(self) -> State:
        """The state of no rows."""
        ...

    def update(self, state: State, block: Block) -> State:
        """A new state with the block's rows added; equals merge(state, update(zero(), block))."""
        ...

    def merge(self, first: State, second: State) -> State:
        """The state of both; associative and commutative up to float64 rounding, the same bits for the same order."""
        ...

    def finalise(self, state: State) -> Any:
        """The result. Pure: the state can go on afterwards."""
        ...


def save_states(parts: Iterable[tuple[Saved[Any], Mapping[str, Any]]]) -> bytes:
    """One safetensors blob with the states of every (reduction, {name: state}); keys are `kind/name/field`."""
    arrays, versions = {}, {}
    for reduction, states in parts:
        versions[reduction.kind] = str(reduction.version)
        for name, state in states.items():
            for field, array in reduction.arrays(state).items():
                arrays[f"{reduction.kind}/{name}/{field}"] = np.ascontiguousarray(array).reshape(array.shape)
    # One entry: the library writes several in a random order, and the same states should be the same bytes.
    blob: bytes = save(arrays, metadata={"versions": json.dumps(versions, sort_keys=True)})
    return blob


class StateFile:
    """Saved states, read by name: only the header and the arrays asked for are touched.

    `read(start, length)` returns bytes of the file; `where` is what messages call it. Raises DamageError.
    """

    def __init__(self, read: Callable[[int, int], bytes | memoryview], where: str) -> None:
        self._read, self.where = read, where
        head = self._bytes(0, 8)
        length = struct.unpack("<Q", head)[0]
        if length > 100_000_000:  # the limit of the safetensors format itself
            raise DamageError(f"{where}: not a state file")
        try:
            header = json.loads(bytes(self._bytes(8, length)))
            self._versions: dict[str, str] = json.loads(header.pop("__metadata__")["versions"])
        except (ValueError, LookupError, AttributeError):
            raise DamageError(f"{where}: the header of the state file is not ours") from None
        self._start = 8 + length
        self._fields: dict[tuple[str, str], dict[str, Any]] = {}
        for key, entry in header.items():
            kind, _, rest = key.partition("/")
            name, _, field = rest.rpartition("/")  # a name may hold slashes, a field does not
            self._fields.setdefault((kind, name), {})[field] = entry

    def names(self, kind: str) -> list[str]:
        """The names that have a state of this kind, sorted as text."""
        return sorted(name for k, name in self._fields if k == kind)

    def load(self, reduction: Saved[State], name: str) -> State:
        """The state of one name; KeyError where it has none."""
        fields = self._fields[reduction.kind, name]
        version = self._versions.get(reduction.kind)
        if version != str(reduction.version):
            raise DamageError(
                f"{self.where}: {reduction.kind} states have version {version}; this program reads {reduction.version}"
            )
        arrays = {field: self._array(entry) for field, entry in fields.items()}
        try:
            return reduction.from_arrays(arrays)
        except (ValueError, LookupError, TypeError) as error:
            raise DamageError(f"{self.where}: {reduction.kind} of {name!r} cannot be read: {error}") from None

    def _array(self, entry: Mapping[str, Any]) -> np.ndarray:
        try:
            (start, stop), stored, shape = entry["data_offsets"], entry["dtype"], entry["shape"]
            dtype = DTYPES.get(stored)
            if dtype is None:
                raise DamageError(f"{self.where}: a state holds {stored}; expected one of {', '.join(DTYPES)}")
            data = self._bytes(self._start + start, stop - start)
            array: np.ndarray = np.frombuffer(data, dtype=dtype).reshape(shape)
        except (LookupError, TypeError, ValueError):
            raise DamageError(f"{self.where}: the header of the state file is not ours") from None
        return array

    def _bytes(self, start: int, length: int) -> bytes | memoryview:
        data = self._read(start, length)
        if len(data) != length:
            raise DamageError(f"{self.where}: cut short: {length} bytes wanted at {start}, {len(data)} there")
        return data


def load_states(reduction: Saved[State], blob: bytes, where: str = "states") -> Iterator[tuple[str, State]]:
    """(name, state) of every saved state of this reduction, one at a time."""
    file = StateFile(lambda start, length: blob[start : start + length], where)
    for name in file.names(reduction.kind):
        yield name, file.load(reduction, name)
