"""A run on disk: log, curves, report, checkpoints that it resumes from, exported models."""
