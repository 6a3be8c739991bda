"""Flags: one dataclass field each (default, range, help), how they are read and refused."""
