"""Exports: a run's rows in the formats that other tools read, one file per format; `export.py` is the way through."""
