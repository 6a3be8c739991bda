"""Generation: key/value slots, sampling, and the loop of prefill and decode."""
