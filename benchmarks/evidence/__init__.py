"""The sections of docs/results.md: a TOML file each, which runs.py runs, or a module with a `measure`."""
