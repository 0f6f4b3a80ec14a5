"""The tables of a job file, each validated by itself."""
