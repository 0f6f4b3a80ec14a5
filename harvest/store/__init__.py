"""The run folder: files, arrays, tables, ledger."""
