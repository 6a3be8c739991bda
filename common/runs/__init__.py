"""A run on disk: its log, checkpoints that it resumes from, exported models."""
