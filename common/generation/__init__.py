"""Text from a model: slots of keys and values, sampling, and the loop of prefill and decode."""
