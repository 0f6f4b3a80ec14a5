"""Rows of a dataset, addressed by (file, row range)."""
