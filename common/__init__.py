"""What the three steps share: models, data and ranks; never which step is running."""
