"""Runs as tables and arrays: rows, tokens, texts, and shuffled batches for training."""
