"""Environments that converse with the model: a calculator and a guessing game."""
