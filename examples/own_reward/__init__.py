"""A reward that knows what a prompt asked for."""
