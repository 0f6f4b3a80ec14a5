"""Compressed inner chunks: their bytes, the index of an object whose chunks differ in size, and which stay decoded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import google_crc32c
import numpy as np
import pyarrow as pa

LEVEL = 1
"""Of zstd. Higher ones gain less than a hundredth on activations, whose low bits are noise."""
ZSTD = {"name": "zstd", "configuration": {"level": LEVEL, "checksum": False}}
"""The codec as a zarr.json says it; a checksum of the whole object is in the shard's record."""
ABSENT = np.uint64(2**64 - 1)
"""Offset and size of an inner chunk that an object does not hold."""


def compressed(rows: np.ndarray) -> np.ndarray:
    """uint8 [m]: the bytes of C-contiguous rows as one zstd frame that says its size; the same ones for the same."""
    codec = pa.Codec("zstd", compression_level=LEVEL)
    return np.frombuffer(codec.compress(pa.py_buffer(rows.reshape(-1).view(np.uint8))), np.uint8)


def decompressed(data: bytes, size: int) -> np.ndarray:
    """uint8 [size], read-only. Raises ValueError for what is no zstd frame of so many bytes."""
    try:
        found = np.frombuffer(pa.Codec("zstd").decompress(data, size), np.uint8)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(" ".join(str(error).split())[:200]) from None
    if len(found) != size:
        raise ValueError(f"{len(found)} bytes, expected {size}")
    return found


def index_bytes(sizes: Sequence[int], chunks: int) -> bytes:
    """The index of an object whose first inner chunks have these sizes and follow one another, of `chunks` it could
    hold: offset and size (uint64, little endian) of each, then the crc32c of that."""
    index = np.full((chunks, 2), ABSENT, "<u8")
    index[: len(sizes), 1] = sizes
    index[: len(sizes), 0] = np.cumsum([0, *sizes])[: len(sizes)]
    data = index.tobytes()
    return data + int(google_crc32c.value(data)).to_bytes(4, "little")


def parse_index(data: bytes, held: int, end: int) -> np.ndarray:
    """int64 [held + 1]: where each of the first `held` chunks begins, and where the last one ends, which is `end`.

    Raises ValueError for any index that `index_bytes` would not have written: a chunk that it calls absent is missing.
    """
    entries = np.frombuffer(data[:-4], "<u8").reshape(-1, 2)
    sizes = [int(size) for size in entries[:held, 1]]
    if any(size > end for size in sizes) or sum(sizes) != end or index_bytes(sizes, len(entries)) != data:
        raise ValueError("its chunk index is not one that was written")
    return np.cumsum([0, *sizes])


class DecodedChunks:
    """Chunks that were decoded last, up to so many bytes, and always the very last one; for any number of arrays."""

    def __init__(self, most_bytes: int = 0) -> None:
        self._most, self._held = most_bytes, 0
        self._chunks: OrderedDict[Hashable, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, decode: Callable[[], np.ndarray]) -> np.ndarray:
        """The chunk of that key; `decode` makes it where it is not held, outside the lock."""
        with self._lock:
            if key in self._chunks:
                self._chunks.move_to_end(key)
                return self._chunks[key]
        chunk = decode()
        with self._lock:
            if key not in self._chunks:
                self._chunks[key] = chunk
                self._held += chunk.nbytes
            while self._held > self._most and len(self._chunks) > 1:
                self._held -= self._chunks.popitem(last=False)[1].nbytes
        return chunk
