"""Step 2: from preference pairs to a reward model."""
