"""Associative running sums over rows: zero, update, merge, finalise."""
