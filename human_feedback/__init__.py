"""People and models: the terminal's conversation, the arena's page, judgements, and what they amount to."""
