"""Who runs the shards: this process, or workers on a cluster."""
