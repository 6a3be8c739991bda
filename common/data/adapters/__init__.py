"""Adapters, one for each data set with rows of its own; importing this package registers them all."""

from common.data.adapters import local_files, ported_class, public_sets

__all__ = ["local_files", "ported_class", "public_sets"]
