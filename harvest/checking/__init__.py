"""What is on disk against the ledger: found by reading everything again, and mended by harvesting it again."""
