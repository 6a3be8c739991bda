"""Adapters, one for each data set with rows of its own; importing this package registers them all."""

from common.data.adapters import ported_class, public_sets

__all__ = ["ported_class", "public_sets"]
