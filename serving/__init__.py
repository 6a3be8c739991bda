"""Servers: chat models, the reward server, the arena and its judgements, the OpenAI-compatible API."""
