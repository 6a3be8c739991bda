"""Processes: how they start, reduce, time their phases, and end together when one fails."""
