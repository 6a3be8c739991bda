"""The sections of docs/results.md: TOML files, run by runs.py, and modules with a `measure`."""
