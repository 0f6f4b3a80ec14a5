"""One hash for what the rows of a shard are: equal for runs over the same tokens, whatever their model or layers."""

from __future__ import annotations

import hashlib

import numpy as np

from harvest.records import TokenColumns

COLUMNS = (("document", "<i8"), ("variant", "i1"), ("position", "<i4"), ("token", "<i4"))
"""What makes a key, and the bytes it is hashed as; rows without variants count as variant 0."""


class KeysDigest:
    """Hash of (document, variant, position, token) in row order, fed in pieces of any size."""

    def __init__(self) -> None:
        self._hashes = {name: hashlib.blake2b(digest_size=16) for name, _ in COLUMNS}

    def update(
        self, document: np.ndarray, position: np.ndarray, token: np.ndarray, variant: np.ndarray | None = None
    ) -> None:
        """Adds rows: four integer arrays of one length."""
        columns = {
            "document": document,
            "variant": np.zeros(len(document), np.int8) if variant is None else variant,
            "position": position,
            "token": token,
        }
        for name, dtype in COLUMNS:
            self._hashes[name].update(np.ascontiguousarray(columns[name], dtype))

    def hexdigest(self) -> str:
        """32 hex digits over all rows so far."""
        return hashlib.blake2b(b"".join(h.digest() for h in self._hashes.values()), digest_size=16).hexdigest()


def keys_digest(tokens: TokenColumns) -> str:
    """`ShardRecord.keys_digest` of a token table held in memory."""
    digest = KeysDigest()
    digest.update(tokens.document, tokens.position, tokens.token)
    return digest.hexdigest()
