"""What docs/results.md shows, one file a section; `measure` returns facts, and the curves of a figure."""
