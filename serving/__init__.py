"""What answers requests: chat models, the reward server, the arena and its judgements, OpenAI's protocol."""
