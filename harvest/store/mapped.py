"""Many files mapped into one range of addresses, so that rows in thousands of objects index like one array.

Taking a batch of rows shard by shard costs a call for each; here it is one gather, whatever the number of shards.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import weakref
from collections.abc import Sequence

import numpy as np

MAP_FIXED = 0x10
"""Python's mmap offers no fixed addresses; the value is the same on Linux and macOS."""
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0x40
MAX_BYTES = 2**44
"""Of address space that one array may reserve; a process has 2**47."""
HUGE_PAGE = 2**21
"""Files that begin on such a border can be mapped with large pages, which spares a random gather many misses."""
FAILED = ctypes.c_void_p(-1).value


class MappedRows:
    """Rows of several files as one array with gaps: row `first_rows[k] + i` is row i of file k. Read-only."""

    def __init__(self, files: Sequence[tuple[str, int]], row_bytes: int) -> None:
        """`files`: (path, rows); the rows begin at the file's first byte and the file holds all of them.

        Raises OSError naming a file that cannot be mapped.
        """
        sizes = [rows * row_bytes for _, rows in files]
        starts = _starts(files, row_bytes)
        total = int(starts[-1])
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        reserved = _map(None, total + HUGE_PAGE, 0, anonymous, -1, "address space")
        base = math.ceil(reserved / HUGE_PAGE) * HUGE_PAGE
        region = (ctypes.c_uint8 * total).from_address(base)
        weakref.finalize(region, _libc().munmap, ctypes.c_void_p(reserved), ctypes.c_size_t(total + HUGE_PAGE))
        for (path, _), start, size in zip(files, starts, sizes):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                _map(base + int(start), size, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, descriptor, path)
            finally:
                os.close(descriptor)
        self.first_rows: np.ndarray = starts[:-1] // row_bytes
        """int64 [files]"""
        self.bytes: np.ndarray = np.ctypeslib.as_array(region).reshape(-1, row_bytes)
        """uint8 [rows and gaps, row_bytes]; touching a gap ends the process. Keeps the mapping alive."""


def can_map(files: Sequence[tuple[str, int]], row_bytes: int) -> bool:
    """Whether this system can lay out these files in one range."""
    return os.name == "posix" and all(rows for _, rows in files) and 0 < _starts(files, row_bytes)[-1] <= MAX_BYTES


def _starts(files: Sequence[tuple[str, int]], row_bytes: int) -> np.ndarray:
    """Where each file begins, and the end: on a page, a huge one where that fits, and whole rows apart."""
    for page in (HUGE_PAGE, mmap.PAGESIZE):
        step = math.lcm(page, row_bytes)
        starts: np.ndarray = np.cumsum([0, *(math.ceil(rows * row_bytes / step) * step for _, rows in files)])
        if starts[-1] <= MAX_BYTES:
            break
    return starts


def _map(address: int | None, length: int, protection: int, flags: int, descriptor: int, what: str) -> int:
    found = _libc().mmap(address, length, protection, flags, descriptor, 0)
    if found is None or found == FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: cannot be mapped ({os.strerror(code)})")
    return int(found)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    return libc
