"""Rewards of a response, before the KL penalty."""
