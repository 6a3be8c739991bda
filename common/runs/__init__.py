"""A run on disk: its logs, checkpoints and exported models."""
