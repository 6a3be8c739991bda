"""What every program does: checks before the start, and the loop that steps 1 and 2 share."""
