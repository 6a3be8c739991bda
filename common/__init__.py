"""Code that the three steps share: models, data and ranks. It does not know which step is running."""
