"""GGUF headers read in a fraction of a second, and once: the library's own reader takes seconds over a token list.

The only home of `gguf`. What is read, and what tensors and fields look like, is the library's; only arrays of the
metadata, which it takes apart element by element through a memory map, are taken apart here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGUFReader, GGUFValueType

LIMITED = ("gemma2", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Kinds whose `context_length` is the longest window to transformers; that of Bloom, say, means nothing to it."""
Parts = tuple[int, list[Any], list[int], list[GGUFValueType]]
"""Bytes of a value, its pieces, which of them are content, and its types."""


class Reader(GGUFReader):  # type: ignore[misc]  # the library is untyped
    """The library's reader with the same fields, tensors and errors, 20 times as fast over arrays."""

    def __setattr__(self, name: str, value: Any) -> None:
        # slices of a plain view of the memory map, which is not copied, cost a fifth of those of the map itself
        super().__setattr__(name, np.asarray(value) if name == "data" else value)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Parts:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
        kind, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        element, first = GGUFValueType(int(kind[0])), orig_offs + 12
        if element == GGUFValueType.STRING:
            pieces, end = self._strings(first, int(length[0]))
        elif element in self.gguf_scalar_to_np:
            values = self._get(first, self.gguf_scalar_to_np[element], int(length[0]))
            if len(values) != length[0]:
                raise ValueError(f"the file ends within an array of {length[0]} values")
            pieces, end = list(values.reshape(-1, 1)), first + values.nbytes
        else:  # arrays of arrays
            return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
        step = 2 if element == GGUFValueType.STRING else 1  # of a string the bytes count, not its length
        types = [GGUFValueType.ARRAY, element] if length[0] else [GGUFValueType.ARRAY]
        return end - orig_offs, [kind, length, *pieces], list(range(1 + step, 2 + len(pieces), step)), types

    def _strings(self, at: int, count: int) -> tuple[list[Any], int]:
        """Length and bytes of each of `count` strings, and where they end."""
        bytes_of_file, unpack = self.data, struct.Struct("=Q").unpack_from
        pieces: list[Any] = []
        for _ in range(count):
            text = at + 8
            end = text + unpack(bytes_of_file, at)[0]
            pieces += (bytes_of_file[at:text], bytes_of_file[text:end])
            at = end
        lengths = slice(0, None, 2)
        pieces[lengths] = [piece.view(np.uint64) for piece in pieces[lengths]]
        return pieces, at


_read = functools.lru_cache(maxsize=1)(lambda path, stamp: Reader(path))
_names = functools.lru_cache(maxsize=4)(gguf.get_tensor_name_map)


def _reader(path: str | os.PathLike[str]) -> GGUFReader:
    stat = os.stat(path)
    return _read(os.fspath(path), (stat.st_size, stat.st_mtime_ns, stat.st_ino))


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Inside, each GGUF header is parsed once, whoever asks, and each table of tensor names is built once.

    transformers parses the header for config, tokenizer and weights, and builds the table for every module.
    """
    found = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = _reader, _names
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = found


class Told(NamedTuple):
    """What a header says of the model."""

    kind: str
    layers: int
    positions: int | None


def told(path: Path) -> Told | None:
    """What a header says in plain words; None where it does not, which loading tells in its own words."""
    try:
        fields = _reader(path).fields
        kind = str(fields["general.architecture"].contents())
        found = {key: fields.get(f"{kind}.{key}") for key in ("block_count", "context_length")}
        layers, positions = (field and field.contents() for field in found.values())
    except (OSError, ValueError, KeyError, IndexError, OverflowError, RecursionError, struct.error):
        return None
    if type(layers) is not int or layers < 1:  # a flag is an int, too
        return None
    limited = kind in LIMITED and type(positions) is int
    return Told(kind=kind, layers=layers, positions=positions if limited else None)
