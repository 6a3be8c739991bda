"""The pages of docs/results: TOML files, run by runs.py, and modules with a `measure`."""
