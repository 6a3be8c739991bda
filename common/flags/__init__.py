"""Flags: one dataclass field each (default, range, help); parsing and validation."""
