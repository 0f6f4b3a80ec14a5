"""From documents to the batches that a model reads."""
