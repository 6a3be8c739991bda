"""Processes: start-up, reductions, timers, and a joint exit when one fails."""
