"""A reward that uses other fields of the row."""
