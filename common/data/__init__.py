"""Raw rows to token batches: sources, adapters, stage splits, token cache, collators."""
