"""A data set in a form of its own."""
