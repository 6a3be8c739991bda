"""A data set in its own format."""
