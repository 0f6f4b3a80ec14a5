"""Directions of a run: what its shards keep for them, what they are, what they are worth."""
