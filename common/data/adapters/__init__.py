"""Adapters, one file for each family of data sets; importing this package registers them all."""

from common.data.adapters import chitchat, comparisons, human_assistant, local_files, ported_class

__all__ = ["chitchat", "comparisons", "human_assistant", "local_files", "ported_class"]
