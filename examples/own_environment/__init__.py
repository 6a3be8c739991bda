"""Environments that talk with the model: a calculator and a guessing game."""
