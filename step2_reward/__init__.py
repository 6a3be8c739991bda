"""Step 2: preference pairs to a reward model."""
