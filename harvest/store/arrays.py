"""The rows of the arrays of a committed attempt: mapped, by range reads, or chunk by chunk where compressed."""

from __future__ import annotations

import itertools

import numpy as np

from harvest.errors import DamageError
from harvest.records import ArraySpec
from harvest.store import layout
from harvest.store.chunks import DecodedChunks, decompressed, parse_index
from harvest.store.files import Files
from harvest.store.grid import DTYPES, chunk_index, parse_metadata

GAP_BYTES = 64 << 10
"""Remote reads that lie closer than this are joined into one."""


class StoredArray:
    """The rows of one array of a committed attempt; what is missing or short is an error, never zeros.

    Rows come in the stored dtype (bfloat16 as uint16 bits): mapped where the store is local, else by range reads;
    compressed ones by whole inner chunks, of which `decoded` keeps the last.
    """

    def __init__(
        self,
        files: Files,
        attempt: str,
        name: str,
        spec: ArraySpec | None = None,
        decoded: DecodedChunks | None = None,
    ) -> None:
        """Reads the array's zarr.json; raises DamageError where it is missing, foreign or differs from `spec`."""
        self.files, self.name = files, name
        self.path = f"{layout.attempt_path(attempt)}/{layout.array_path(name)}"
        self.spec, self.grid = parse_metadata(self._where(layout.ZARR), self._read_metadata())
        found = (self.spec.rows, self.spec.width, self.spec.dtype)
        if spec is not None and (spec.rows, spec.width, spec.dtype) != found:
            raise DamageError(
                f"{self._where(layout.ZARR)}: {self.spec.dtype} [{self.spec.rows}, {self.spec.width}], "
                f"the ledger says {spec.dtype} [{spec.rows}, {spec.width}]"
            )
        self.shape = (self.spec.rows, self.spec.width)
        self.dtype = self.spec.dtype
        self.numpy_dtype = np.dtype(DTYPES[self.dtype])
        self.compressed = self.spec.compression != "none"
        self._mapped: dict[int, np.ndarray] = {}
        self._ends: dict[int, np.ndarray] = {}
        self._decoded = decoded or DecodedChunks()

    def __repr__(self) -> str:
        return f"StoredArray({self.name!r}, {self.dtype} [{self.shape[0]}, {self.shape[1]}])"

    def _where(self, inside: str) -> str:
        return f"{self.files.url}/{self.path}/{inside}"

    def _read_metadata(self) -> bytes:
        try:
            return self.files.read(f"{self.path}/{layout.ZARR}")
        except FileNotFoundError:
            raise DamageError(f"{self._where(layout.ZARR)}: missing") from None

    def check_object(self, number: int) -> str:
        """The path of an object that is there in full."""
        path = f"{self.path}/{layout.object_name(number)}"
        try:
            size = self.files.size(path)
        except FileNotFoundError:
            raise DamageError(f"{self.files.url}/{path}: missing") from None
        if self.compressed:
            self._chunk_ends(number, size)
        elif size != self.grid.object_bytes(number):
            raise DamageError(f"{self.files.url}/{path}: {size} bytes, expected {self.grid.object_bytes(number)}")
        return path

    def check_index(self, number: int) -> None:
        """Raises DamageError unless an object that is there in full ends with the index that belongs to it.

        The checksum of the whole object cannot tell: an index that is followed by its own crc32c leaves it the same
        whatever the index says, also "this chunk was never written".
        """
        if self.compressed:
            return  # an object is not there in full without it
        path, size = f"{self.path}/{layout.object_name(number)}", self.grid.index_bytes
        if self.files.read_range(path, self.grid.object_bytes(number) - size, size) != chunk_index(self.grid, number):
            raise DamageError(f"{self.files.url}/{path}: its chunk index is not the one that was written")

    def _chunk_ends(self, number: int, size: int | None = None) -> np.ndarray:
        """int64 [chunks + 1] where the frames of a compressed object begin and end. `size` of it, where known."""
        if number not in self._ends:
            path, last = f"{self.path}/{layout.object_name(number)}", self.grid.index_bytes
            try:
                end = (self.files.size(path) if size is None else size) - last
                if end < 0:
                    raise ValueError(f"{end + last} bytes, its chunk index alone has {last}")
                held = self.grid.padded_rows_of(number) // self.grid.inner
                self._ends[number] = parse_index(self.files.read_range(path, end, last), held, end)
            except FileNotFoundError:
                raise DamageError(f"{self.files.url}/{path}: missing") from None
            except ValueError as error:
                raise DamageError(f"{self.files.url}/{path}: {error}") from None
        return self._ends[number]

    def _chunk(self, number: int, chunk: int) -> np.ndarray:
        """[inner, width], read-only: an inner chunk of a compressed object, padding included."""

        def decode() -> np.ndarray:
            path = f"{self.path}/{layout.object_name(number)}"
            start, stop = self._chunk_ends(number)[chunk : chunk + 2].tolist()
            try:
                data = decompressed(
                    self.files.read_range(path, start, stop - start), self.grid.inner * self.grid.row_bytes
                )
            except ValueError as error:
                raise DamageError(f"{self.files.url}/{path}: inner chunk {chunk} cannot be read ({error})") from None
            return data.view(self.numpy_dtype).reshape(self.grid.inner, self.spec.width)

        return self._decoded.get((self.files.url, self.path, number, chunk), decode)

    def object_rows(self, number: int) -> np.ndarray | None:
        """The rows of object `number`, [n, width], mapped read-only; None where they cannot be."""
        if self.compressed:
            return None
        if number not in self._mapped:
            data = self.files.map(self.check_object(number))
            if data is None:
                return None
            used = self.grid.rows_of(number) * self.grid.row_bytes
            self._mapped[number] = data[:used].view(self.numpy_dtype).reshape(-1, self.spec.width)
        return self._mapped[number]

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        """Rows [start, stop) as [n, width], into `out` when given."""
        if not 0 <= start <= stop <= self.spec.rows:
            raise IndexError(f"rows {start} to {stop} of {self.name}, which has {self.spec.rows}")
        if out is None:
            out = np.empty((stop - start, self.spec.width), self.numpy_dtype)
        row = start
        while row < stop:
            number, inside = divmod(row, self.grid.outer)
            if self.compressed:  # chunk by chunk, however many are asked for
                count = min(self.grid.inner - inside % self.grid.inner, stop - row)
            else:
                count = min(self.grid.rows_of(number) - inside, stop - row)
            out[row - start : row - start + count] = self._rows(number, inside, count)
            row += count
        return out

    def _rows(self, number: int, inside: int, count: int) -> np.ndarray:
        if self.compressed:  # within one inner chunk
            chunk, first = divmod(inside, self.grid.inner)
            return self._chunk(number, chunk)[first : first + count]
        mapped = self.object_rows(number)
        if mapped is not None:
            return mapped[inside : inside + count]
        path, row_bytes = f"{self.path}/{layout.object_name(number)}", self.grid.row_bytes
        data = self.files.read_range(path, inside * row_bytes, count * row_bytes)
        if len(data) != count * row_bytes:
            raise DamageError(f"{self.files.url}/{path}: ends inside row {inside + len(data) // row_bytes}")
        return np.frombuffer(data, self.numpy_dtype).reshape(count, self.spec.width)

    def gather(self, indices: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Rows at `indices` (ints in [0, rows), any order, repeats allowed) as [n, width], into `out` when given."""
        indices = np.asarray(indices, np.int64).reshape(-1)
        if len(indices) and (indices.min() < 0 or indices.max() >= self.spec.rows):
            raise IndexError(f"row {indices.min()} or {indices.max()} of {self.name}, which has {self.spec.rows}")
        if out is None:
            out = np.empty((len(indices), self.spec.width), self.numpy_dtype)
        numbers = indices // self.grid.outer
        for number in np.unique(numbers):
            wanted = np.nonzero(numbers == number)[0]
            inside = indices[wanted] - number * self.grid.outer
            mapped = self.object_rows(int(number))
            if self.compressed:
                out[wanted] = self._gather_compressed(int(number), inside)
            elif mapped is None:
                out[wanted] = self._gather_remote(int(number), inside)
            elif len(wanted) == len(indices):
                np.take(mapped, inside, axis=0, out=out, mode="clip")  # "clip" spares a buffer; checked above
            else:
                out[wanted] = mapped[inside]
        return out

    def _gather_compressed(self, number: int, inside: np.ndarray) -> np.ndarray:
        """Decodes each chunk that has one of the rows once."""
        found = np.empty((len(inside), self.spec.width), self.numpy_dtype)
        chunks = inside // self.grid.inner
        for chunk in np.unique(chunks).tolist():
            wanted = np.flatnonzero(chunks == chunk)
            found[wanted] = self._chunk(number, chunk)[inside[wanted] - chunk * self.grid.inner]
        return found

    def _gather_remote(self, number: int, inside: np.ndarray) -> np.ndarray:
        """Joins rows that lie close to one another, so that a batch costs few requests."""
        rows, back = np.unique(inside, return_inverse=True)
        gap = max(1, GAP_BYTES // self.grid.row_bytes)
        starts = np.concatenate([[0], np.nonzero(np.diff(rows) > gap)[0] + 1, [len(rows)]])
        found = np.empty((len(rows), self.spec.width), self.numpy_dtype)
        for start, stop in itertools.pairwise(starts.tolist()):
            first = int(rows[start])
            block = self._rows(number, first, int(rows[stop - 1]) - first + 1)
            found[start:stop] = block[rows[start:stop] - first]
        return found[back.reshape(-1)]


def map_rows(files: Files, attempt: str, name: str, spec: ArraySpec) -> list[np.ndarray]:
    """The rows of each object of a local, uncompressed array, [n, width] mapped read-only, uint16 bits for bfloat16.

    Raises DamageError naming an object that is missing or short, or metadata that differ from `spec`.
    """
    stored = StoredArray(files, attempt, name, spec)
    mapped = [stored.object_rows(number) for number in range(stored.grid.objects)]
    return [rows for rows in mapped if rows is not None]
